"""What people ask for is checked: arguments, a target for a rollback, no correction over stale weights."""

from __future__ import annotations

from typing import Any

import pytest

from foreshock.wire.commands import Action
from foreshock_service.commands import protocol, requests
from foreshock_service.errors import Unprocessable
from foreshock_service.store.engine import Store
from foreshock_service.store.models import Run
from tests.service.commands.simulation import ENGINE_FAULT, STALE, Simulation, opens


def prepare(run: Simulation, kind: str, **arguments: Any) -> tuple[Action, dict[str, Any]]:
    with run.store.write() as session:
        row = session.get_one(Run, run.run_id)
        (action,), detail = requests.prepared(session, row, [Action(kind=kind, arguments=arguments)])
        return action, detail


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("scale_lr", {}),
        ("scale_lr", {"factor": 0}),
        ("scale_lr", {"factor": 2}),
        ("scale_lr", {"factor": True}),
        ("scale_lr", {"factor": float("nan")}),
        ("skip_update", {"steps": 0}),
        ("skip_update", {"steps": 10_000}),
        ("enable_is_correction", {"cap": -1}),
        ("rollback", {"checkpoint": "a\x00b"}),
        ("rollback", {"checkpoint": 7}),
    ],
)
def test_arguments_that_cannot_be_are_refused(store: Store, kind: str, arguments: dict[str, Any]) -> None:
    run = Simulation(store)
    with pytest.raises(Unprocessable):
        prepare(run, kind, **arguments)


def test_a_rollback_without_a_checkpoint_goes_to_the_newest_healthy_one(store: Store) -> None:
    run = Simulation(store)
    with pytest.raises(protocol.Refused, match="no healthy checkpoint"):
        prepare(run, "rollback")
    run.checkpoint()
    run.steps(6)
    assert prepare(run, "rollback")[0].arguments == {
        "checkpoint": "/ckpt/1/0", "step": 0, "scope": ["weights", "optimizer"],
    }  # fmt: skip
    assert prepare(run, "rollback", checkpoint="/mine")[0].arguments == {"checkpoint": "/mine"}


def test_correction_over_stale_weights_is_refused_with_what_it_would_mask(store: Store) -> None:
    run = Simulation(store, mode="approve")
    run.steps(3)
    assert prepare(run, "enable_is_correction")[1]["masks"]["mismatch.kl_k3"] == pytest.approx(5e-4)
    run.step(opens("rollout_mismatch", "engine"), **ENGINE_FAULT, **STALE)
    run.steps(6, **ENGINE_FAULT, **STALE)
    with pytest.raises(protocol.Refused, match="stale-weights") as refused:
        prepare(run, "enable_is_correction")
    assert refused.value.detail["masks"]["mismatch.kl_k3"] == pytest.approx(0.1)


def test_a_resync_in_vain_opens_the_gate(store: Store) -> None:
    run = Simulation(store)
    run.checkpoint()
    run.steps(3)
    run.step(opens("rollout_mismatch", "engine"), **ENGINE_FAULT, **STALE)
    run.answer("failed")
    assert prepare(run, "enable_is_correction")[1]["masks"]


def test_a_request_is_approved_at_once_or_left_to_another_person(store: Store) -> None:
    run = Simulation(store, mode="approve")
    with store.write() as session:
        row = session.get_one(Run, run.run_id)
        asked = requests.request(session, row, [Action(kind="pause")], "ada", run.now, approve=False)
        assert (asked.became, asked.command.requested_by) == ("proposed", "ada")
        done = requests.request(session, row, [Action(kind="pause")], "ada", run.now)
        assert (done.became, done.command.decided_by) == ("approved", "ada")


def test_force_overrides_the_correction_gate_and_is_noted(store: Store) -> None:
    run = Simulation(store, mode="approve")
    run.steps(2)
    run.steps(6, **ENGINE_FAULT, **STALE)
    with store.write() as session:
        row = session.get_one(Run, run.run_id)
        actions = [Action(kind="enable_is_correction")]
        change = requests.request(session, row, actions, "ada", run.now, force=True)
        assert change.command.detail["forced"] is True


def test_nothing_is_approved_for_a_person_in_observe(store: Store) -> None:
    run = Simulation(store, mode="observe")
    with store.write() as session, pytest.raises(protocol.Forbidden):
        requests.request(session, session.get_one(Run, run.run_id), [Action(kind="pause")], "ada", run.now)
