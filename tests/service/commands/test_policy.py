"""What is asked of the trainer, step by step: routed by the three edges, once per evidence, as far as the mode goes."""

from __future__ import annotations

import pytest

from foreshock.wire.commands import COMMAND_KINDS
from foreshock_service.commands import protocol
from foreshock_service.rules.interface import Evidence, Finding
from foreshock_service.store.engine import Store
from tests.service.commands.simulation import (
    BANDS,
    ENGINE_FAULT,
    SCORING_FAULT,
    STALE,
    TRAINING_FAULT,
    Simulation,
    closes,
    opens,
)

TRAINING = opens("onpolicy_disagreement", "training_pass")
ENGINE = opens("rollout_mismatch", "engine")
WITHOUT_RESYNC = tuple(k for k in COMMAND_KINDS if k not in ("resync_engine", "rollback"))


def test_a_training_pass_fault_is_resynced_and_never_corrected(store: Store) -> None:
    run = Simulation(store)
    run.checkpoint()
    run.steps(3)
    changes = run.step(TRAINING, **TRAINING_FAULT)
    assert [(c.command.kind, c.became) for c in changes] == [
        ("resync_trainer", "proposed"),
        ("resync_trainer", "approved"),
    ]
    assert run.answer() == "resync_trainer"
    run.steps(3)
    assert run.row("resync_trainer").verdict == "helped"
    assert run.incident("onpolicy_disagreement").status == "mitigated"
    run.step(closes("onpolicy_disagreement"))
    assert run.incident("onpolicy_disagreement").status == "resolved"
    run.steps(5)
    assert run.commands() == [("resync_trainer", "done")]


def test_a_resync_after_which_the_rule_closed_the_incident_helped_though_the_floor_has_risen(store: Store) -> None:
    run = Simulation(store)
    run.checkpoint()
    run.steps(3)
    run.step(TRAINING, **TRAINING_FAULT)
    assert run.answer() == "resync_trainer"
    risen = {"policy.kl_k2": 2 * BANDS["policy.kl_k2"][2]}
    run.steps(3, **risen)
    assert run.row("resync_trainer").verdict is None
    run.step(closes("onpolicy_disagreement"), **risen)
    assert run.row("resync_trainer").verdict == "helped"
    assert run.incident("onpolicy_disagreement").status == "resolved"


def test_a_resync_that_does_not_help_is_followed_by_a_rollback_and_not_repeated(store: Store) -> None:
    run = Simulation(store)
    run.steps(3)
    run.checkpoint()
    run.steps(8)
    run.step(TRAINING, **TRAINING_FAULT)
    run.answer()
    run.steps(8, **TRAINING_FAULT)
    resync, rollback = run.row("resync_trainer"), run.row("rollback")
    assert resync.verdict == "no_effect"
    assert (rollback.state, rollback.actions[0]["arguments"]) == (
        "approved",
        {"checkpoint": "/ckpt/1/3", "step": 3, "skip_until_step": 20, "scope": ["weights", "optimizer"]},
    )
    assert "resync_trainer did not help" in rollback.reason
    assert run.answer(new_attempt_at=3) == "rollback"
    run.steps(20, **TRAINING_FAULT)
    kinds = [kind for kind, _ in run.commands()]
    assert kinds == ["resync_trainer", "rollback", "pause"]
    assert run.row("rollback").verdict == "no_effect"


def test_pause_waits_for_a_person_even_in_auto(store: Store) -> None:
    run = Simulation(store, capabilities=("pause",))
    run.steps(3)
    run.step(TRAINING, **TRAINING_FAULT)
    run.steps(5, **TRAINING_FAULT)
    assert run.commands() == [("pause", "proposed")]


def test_a_training_pass_fault_is_rolled_back_at_once_when_the_reward_has_gone(store: Store) -> None:
    run = Simulation(store)
    run.steps(3)
    run.checkpoint()
    run.steps(10)
    run.step(TRAINING, **TRAINING_FAULT, reward__mean=0.1, group__zero_std=0.95)
    assert run.commands() == [("rollback", "approved")]


def test_a_rollback_that_restores_the_reward_helped(store: Store) -> None:
    run = Simulation(store)
    run.steps(3)
    run.checkpoint()
    run.steps(10)
    run.step(TRAINING, **TRAINING_FAULT, reward__mean=0.1, group__zero_std=0.95)
    run.answer(new_attempt_at=3)
    run.steps(7)
    assert run.row("rollback").verdict is None
    run.step()
    rollback = run.row("rollback")
    assert (rollback.verdict, rollback.verdict_step) == ("helped", 11)
    assert rollback.detail["before"]["reward_level"] == pytest.approx(0.8)


def test_a_scoring_pass_fault_leads_to_no_command(store: Store) -> None:
    run = Simulation(store)
    run.steps(3)
    run.step(opens("onpolicy_disagreement", "scoring_pass"), **SCORING_FAULT)
    run.steps(20, **SCORING_FAULT)
    assert run.commands() == []


def test_a_warning_leads_to_no_command(store: Store) -> None:
    run = Simulation(store)
    run.step(opens("onpolicy_disagreement", "training_pass", severity="warning"), **TRAINING_FAULT)
    assert run.commands() == []


def test_an_engine_fault_is_resynced(store: Store) -> None:
    run = Simulation(store)
    run.steps(3)
    run.step(ENGINE, **ENGINE_FAULT, **STALE)
    assert run.commands() == [("resync_engine", "approved")]
    run.answer()
    run.steps(3)
    assert run.row("resync_engine").verdict == "helped"


def test_an_engine_fault_that_a_resync_did_not_cure_is_corrected(store: Store) -> None:
    run = Simulation(store)
    run.steps(3)
    run.step(ENGINE, **ENGINE_FAULT, **STALE)
    run.answer("failed")
    run.step(**ENGINE_FAULT, **STALE)
    correction = run.row("enable_is_correction")
    assert (correction.state, correction.actions[0]["arguments"]) == ("approved", {"cap": 2.0})
    assert correction.detail["masks"]["mismatch.kl_k3 above the floor"] == pytest.approx(0.1 - 5e-4)


def test_correction_is_not_asked_for_while_the_engine_looks_stale(store: Store) -> None:
    run = Simulation(store, capabilities=WITHOUT_RESYNC)
    run.steps(3)
    run.step(ENGINE, **ENGINE_FAULT, **STALE)
    run.steps(3, **ENGINE_FAULT, **STALE)
    assert run.commands() == []


def test_without_a_resync_an_engine_that_is_not_stale_is_corrected_and_stays_mitigated(store: Store) -> None:
    run = Simulation(store, capabilities=WITHOUT_RESYNC)
    run.steps(3, reward__validation=0.8)
    temperature = {"mismatch.slope": 1.4, "mismatch.logp_pearson": 0.997, "mismatch.abs_mean": 0.4}
    run.step(ENGINE, **ENGINE_FAULT, **temperature)
    assert run.answer() == "enable_is_correction"
    run.step(**ENGINE_FAULT, **temperature)
    assert run.incident("rollout_mismatch").status == "mitigated"
    run.steps(7, **ENGINE_FAULT, **temperature, reward__validation=0.79)
    assert run.row("enable_is_correction").verdict == "helped"
    assert run.incident("rollout_mismatch").status == "mitigated"


def test_correction_that_cannot_be_validated_is_undecided(store: Store) -> None:
    run = Simulation(store, capabilities=WITHOUT_RESYNC)
    run.steps(3)
    temperature = {"mismatch.slope": 1.4, "mismatch.logp_pearson": 0.997}
    run.step(ENGINE, **ENGINE_FAULT, **temperature)
    run.answer()
    run.steps(15, **ENGINE_FAULT, **temperature)
    assert run.row("enable_is_correction").verdict == "undecided"


@pytest.mark.parametrize(("announced", "asked"), [(("probe", "resync_trainer"), ["probe"]), (("resync_trainer",), [])])
def test_undecided_asks_for_another_scoring_or_for_nothing(
    store: Store, announced: tuple[str, ...], asked: list[str]
) -> None:
    run = Simulation(store, capabilities=announced)
    run.steps(3)
    run.step(opens("onpolicy_disagreement", "undecided"), policy__kl_k2=0.02, mismatch__kl_k2=0.1,
             mismatch__kl_k3=0.1, mismatch_current__kl_k2=0.1, mismatch_current__kl_k3=0.1)  # fmt: skip
    assert [kind for kind, _ in run.commands()] == asked


def test_shifted_labels_are_nothing_that_a_resync_cures(store: Store) -> None:
    run = Simulation(store)
    run.steps(3)
    shifted = {"mismatch.logp_pearson": 0.02, "mismatch.slope": -0.06, "mismatch.abs_mean": 8.0,
               "mismatch.delta_mean": -7.9, "mismatch.kl_k2": 38.0, "mismatch.kl_k3": 7.0,
               "mismatch_current.kl_k2": 38.0, "mismatch_current.kl_k3": 7.0}  # fmt: skip
    run.step(ENGINE, **shifted)
    assert run.commands() == [("pause", "proposed")]


def test_observe_only_notes_what_it_would_do_and_can_send_nothing(store: Store) -> None:
    run = Simulation(store, mode="observe")
    run.steps(3)
    run.step(TRAINING, **TRAINING_FAULT)
    run.steps(5, **TRAINING_FAULT)
    assert run.commands() == [("resync_trainer", "proposed")]
    assert run.row("resync_trainer").detail["advisory"] is True


def test_approve_waits_for_a_person(store: Store) -> None:
    run = Simulation(store, mode="approve")
    run.steps(3)
    run.step(TRAINING, **TRAINING_FAULT)
    run.steps(5, **TRAINING_FAULT)
    assert run.commands() == [("resync_trainer", "proposed")]
    assert "advisory" not in run.row("resync_trainer").detail


def test_a_replayed_backlog_opens_incidents_and_never_commands(store: Store) -> None:
    run = Simulation(store)
    run.step(TRAINING, may_command=False, **TRAINING_FAULT)
    assert run.incident("onpolicy_disagreement").status == "open"
    assert run.commands() == []


def test_a_proposal_is_withdrawn_when_its_incident_is_over(store: Store) -> None:
    run = Simulation(store, mode="approve")
    run.step(TRAINING, **TRAINING_FAULT)
    run.step(closes("onpolicy_disagreement"))
    assert run.commands() == [("resync_trainer", "cancelled")]


def test_one_command_at_a_time_and_the_cause_is_treated_first(store: Store) -> None:
    run = Simulation(store)
    run.steps(3)
    frozen = Finding(rule="frozen_update", transition="open", severity="critical", step=None)
    run.step(frozen, ENGINE, **ENGINE_FAULT, **STALE)
    assert sorted(run.commands()) == [("resync_engine", "approved"), ("resync_trainer", "proposed")]
    run.answer()
    run.step()
    assert ("resync_trainer", "approved") in run.commands()


def test_a_spent_budget_leaves_the_proposal_to_a_person(store: Store) -> None:
    run = Simulation(store, budget_per_run=1)
    run.steps(3)
    run.step(TRAINING, **TRAINING_FAULT)
    run.answer("failed")
    run.checkpoint()
    run.step(closes("onpolicy_disagreement"))
    run.steps(20)
    run.step(ENGINE, **ENGINE_FAULT, **STALE)
    assert run.commands() == [("resync_trainer", "failed"), ("resync_engine", "proposed")]


def test_an_approved_command_that_expired_is_tried_again_twice(store: Store) -> None:
    run = Simulation(store, cooldown_steps=0)
    run.step(TRAINING, **TRAINING_FAULT)

    for _ in range(4):
        run.now += 700
        with store.write() as session:
            protocol.expire_due(session, run.now)
        run.step(**TRAINING_FAULT)
    assert run.commands() == [("resync_trainer", "expired")] * 3


def test_a_rejection_is_final_for_the_evidence(store: Store) -> None:
    run = Simulation(store, mode="approve")
    run.step(TRAINING, **TRAINING_FAULT)

    with store.write() as session:
        protocol.reject(session, run.row("resync_trainer").id, "ada", run.now)
    run.steps(5, **TRAINING_FAULT)
    assert run.commands() == [("resync_trainer", "rejected")]


def test_non_finite_gradients_skip_an_update_and_non_finite_weights_roll_back(store: Store) -> None:
    def found(signal: str) -> Finding:
        numbers = (Evidence(signal=signal, value=3.0, expected=0.0),)
        return Finding(rule="non_finite", transition="open", severity="critical", step=None, evidence=numbers)

    run = Simulation(store)
    run.steps(2)
    run.checkpoint()
    run.steps(8)
    run.step(found("grad.nonfinite"), grad__nonfinite=3.0)
    assert run.answer() == "skip_update"
    run.steps(3, grad__nonfinite=0.0)
    assert run.row("skip_update").verdict == "helped"
    run.step(closes("non_finite"))
    run.steps(15)
    run.step(found("loss"))
    assert run.commands()[-1] == ("rollback", "approved")


def test_a_collapse_whose_cause_is_over_is_rolled_back_to_before_the_cause(store: Store) -> None:
    run = Simulation(store)
    run.steps(3)
    run.checkpoint()
    run.steps(8)
    run.step(TRAINING, **TRAINING_FAULT)
    run.answer()
    run.checkpoint()
    run.steps(4)
    run.step(closes("onpolicy_disagreement"), reward__mean=0.3)
    run.step(opens("reward_collapse"), reward__mean=0.1)
    rollback = run.row("rollback")
    assert (rollback.state, rollback.actions[0]["arguments"]["step"]) == ("approved", 3)
    assert "after onpolicy_disagreement" in rollback.reason
    assert run.checkpoints() == {(1, 3): "healthy", (1, 12): "quarantined"}


def test_a_collapse_without_a_known_cause_is_left_to_people(store: Store) -> None:
    run = Simulation(store)
    run.steps(3)
    run.checkpoint()
    run.steps(8)
    run.step(opens("reward_collapse"), reward__mean=0.1)
    run.steps(5, reward__mean=0.1)
    assert run.commands() == []


def test_an_act_mode_without_any_checkpoint_asks_for_one(store: Store) -> None:
    run = Simulation(store)
    run.steps(3)
    assert run.commands() == []
    run.step()
    assert run.commands() == [("checkpoint_now", "approved")]
    run.answer()
    run.checkpoint()
    run.steps(10)
    assert run.commands() == [("checkpoint_now", "done")]
    assert run.row("checkpoint_now").verdict == "helped"


def test_an_act_mode_with_a_checkpoint_asks_for_none(store: Store) -> None:
    run = Simulation(store)
    run.checkpoint()
    run.steps(10)
    assert run.commands() == []


def test_a_command_that_makes_it_worse_is_called_so_and_the_incident_escalates(store: Store) -> None:
    run = Simulation(store, capabilities=("resync_trainer",))
    run.step(TRAINING, **TRAINING_FAULT)
    run.answer()
    run.steps(8, policy__kl_k2=0.5, mismatch_current__kl_k2=0.5, mismatch_current__kl_k3=0.5)
    assert run.row("resync_trainer").verdict == "worse"
    assert run.incident("onpolicy_disagreement").status == "open"
    run.steps(10, policy__kl_k2=0.5, mismatch_current__kl_k2=0.5, mismatch_current__kl_k3=0.5)
    assert run.commands() == [("resync_trainer", "done")]


def test_a_signal_without_a_baseline_is_judged_by_the_evidence_bound(store: Store) -> None:
    run = Simulation(store, capabilities=("resync_trainer",))
    run.step(TRAINING, bands={}, **TRAINING_FAULT)
    run.answer()
    for _ in range(3):
        run.step(bands={})
    assert run.row("resync_trainer").verdict == "helped"


def test_a_relaunch_cancels_what_waited_and_the_illness_is_treated_anew(store: Store) -> None:
    run = Simulation(store, cooldown_steps=0)
    run.steps(3)
    run.step(TRAINING, **TRAINING_FAULT)
    run.begin_attempt(0, launch="two")
    run.step(**TRAINING_FAULT)
    assert run.commands() == [("resync_trainer", "cancelled"), ("resync_trainer", "approved")]


def test_bands_of_the_simulation_are_those_that_rules_publish() -> None:
    assert set(BANDS) == {"policy.kl_k2", "mismatch.kl_k3"}
