"""The engine and the trainer part; which of them is at fault is read off the policy edge."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from foreshock.stats.merge import statistics
from foreshock.stats.pair import PairAccumulator
from foreshock_service.rules.interface import StepView
from tests.service.rules.streams import changed, healthy, incidents, noise, opened, view

RULE = "rollout_mismatch"


def ill(value: float = 0.05, start: int = 25, steps: int = 60, seed: int = 0) -> list[StepView]:
    return changed(
        healthy(steps, seed), start, mismatch__kl_k2=value, mismatch__kl_k3=value, mismatch_current__kl_k2=value
    )


@pytest.mark.parametrize("seed", range(5))
def test_an_engine_fault_is_critical_at_the_first_step_with_policy_at_its_floor(seed: int) -> None:
    found = incidents(ill(seed=seed))
    assert [(i.rule, i.opened, i.severity, i.first.edge) for i in found] == [(RULE, 25, "critical", "engine")]


def test_a_slow_drift_of_the_engine_is_found() -> None:
    views = [
        view(v.step, {**v.values, "mismatch.kl_k3": v.values["mismatch.kl_k3"] * math.exp(0.15 * max(0, v.step - 30))})
        for v in healthy(90)
    ]
    incident = opened(views, RULE)[0]
    assert incident.opened is not None
    assert 31 <= incident.opened <= 55


def test_a_training_pass_fault_is_not_an_engine_fault() -> None:
    views = changed(healthy(60), 25, policy__kl_k2=0.05, mismatch_current__kl_k2=0.05)
    assert opened(views, RULE) == []


def test_a_scoring_pass_fault_is_not_an_engine_fault() -> None:
    views = changed(healthy(60), 25, policy__kl_k2=0.05, mismatch__kl_k2=0.05, mismatch__kl_k3=0.05)
    assert opened(views, RULE) == []


def test_detached_old_log_probs_leave_the_edge_undecided() -> None:
    views = [view(v.step, {k: x for k, x in v.values.items() if not k.startswith("policy")}) for v in ill()]
    (incident,) = opened(views, RULE)
    assert incident.first.edge == "undecided"


def test_uncorrelated_log_probs_are_nobodys_stale_weights() -> None:
    (incident,) = opened(changed(ill(value=5.0), 25, mismatch__logp_pearson=0.02), RULE)
    assert (incident.severity, incident.first.edge) == ("critical", "undecided")
    assert "other tokens or rows" in incident.first.message


def test_where_only_a_mean_difference_is_logged_it_serves() -> None:
    views = [view(v.step, {"mismatch.abs_mean": math.sqrt(2 * v.values["mismatch.kl_k3"])}) for v in ill(value=0.2)]
    (incident,) = opened(views, RULE)
    assert incident.opened is not None
    assert incident.opened <= 28
    assert incident.first.evidence[0].signal == "mismatch.abs_mean"
    assert incident.first.evidence[0].value == pytest.approx(math.sqrt(0.4))


def test_a_run_that_never_agreed_warns_by_preset() -> None:
    found = opened(ill(value=0.3, start=0), RULE)
    assert [i.severity for i in found] == ["warning"]


def test_one_worst_rank_is_found() -> None:
    views = [
        view(v.step, v.values, reported=8, expected=8, worst={"mismatch.kl_k3": (0.4 if v.step > 30 else 5e-4, 3)})
        for v in healthy(50)
    ]
    (incident,) = opened(views, RULE)
    assert incident.opened == 31
    assert "rank 3" in incident.first.message


def test_tiny_changes_of_a_tiny_floor_are_no_finding() -> None:
    views = changed(changed(healthy(60), 0, mismatch__kl_k3=1e-8), 30, mismatch__kl_k3=5e-5)
    assert opened(views, RULE) == []


def test_the_learning_rate_warm_up_is_not_learned_from() -> None:
    """In asynchronous training staleness, and with it the mismatch, rises with the learning rate."""
    views = []
    for seen in healthy(80):
        mismatch = seen.values["mismatch.kl_k3"] * (0.03 if seen.step < 15 else 30)
        views.append(view(seen.step, {"mismatch.kl_k3": mismatch, "lr": 1e-7 * min(15, seen.step + 1)}))
    assert opened(views, RULE) == []
    constant = [view(v.step, {**v.values, "lr": 1e-6}) for v in views]
    assert opened(constant, RULE) != []


def by_lag(fresh: float = 1.0, old: float = 1.0, old_share: float = 0.2, steps: int = 60) -> list[StepView]:
    """Lag 0 at 3e-4 nats, lag 1 at 2e-2; from step 30 on times the factors, with a share of old tokens."""
    views = []
    for seen in healthy(steps):
        noise = seen.values["mismatch.kl_k3"] / 3e-4
        late = seen.step >= 30
        lag0, lag1 = 3e-4 * noise * (fresh if late else 1.0), 2e-2 * noise * (old if late else 1.0)
        share = old_share if late else 0.02
        mixed = (1 - share) * lag0 + share * lag1
        views.append(
            view(seen.step, {"mismatch.kl_k3": mixed, "mismatch@lag0.kl_k3": lag0, "mismatch@lag1.kl_k3": lag1})
        )
    return views


def test_each_version_lag_has_a_baseline_of_its_own() -> None:
    (incident,) = opened(by_lag(fresh=100.0, old_share=0.02), RULE)
    assert incident.opened == 30
    assert incident.severity == "critical"
    assert incident.first.message.startswith("mismatch@lag0.kl_k3")


def test_more_tokens_from_older_weights_are_no_engine_fault() -> None:
    (incident,) = opened(by_lag(old_share=0.9), RULE)
    assert incident.severity == "warning"
    assert "older weights" in incident.first.message


def test_an_overflow_that_leaves_kl_k3_missing_is_found_by_kl_k2() -> None:
    views = [
        view(v.step, {k: x for k, x in v.values.items() if v.step < 30 or k != "mismatch.kl_k3"}) for v in healthy(40)
    ]
    views = changed(views, 30, mismatch__kl_k2=400.0, mismatch_current__kl_k2=400.0)
    assert opened(views, RULE)[0].opened == 30


@pytest.mark.parametrize(
    ("signal", "of_kl"),
    [
        ("mismatch_current.kl_k3", lambda kl: kl),
        ("mismatch.prob_abs_mean", lambda kl: 0.5 * math.sqrt(2 * kl)),
        ("mismatch.kl_k1", lambda kl: -0.5 * kl),
    ],
)
def test_where_no_kl_is_logged_what_is_there_stands_in_for_it(signal: str, of_kl: Callable[[float], float]) -> None:
    def only(views: list[StepView]) -> list[StepView]:
        return [view(v.step, {signal: of_kl(v.values["mismatch.kl_k3"])}) for v in views]

    (incident,) = opened(only(ill(value=0.2)), RULE)
    assert incident.opened == 25
    evidence = incident.first.evidence[0]
    assert evidence.signal == signal
    assert evidence.value == pytest.approx(abs(of_kl(0.2)))
    assert opened(only(healthy(200)), RULE) == []


def test_stand_ins_of_different_units_are_not_mixed() -> None:
    views = [
        view(v.step, {"mismatch.prob_abs_mean": 0.01} if v.step % 2 else {"mismatch.abs_mean": 0.5})
        for v in healthy(80)
    ]
    assert opened(views, RULE) == []


def bulky(start: int, jump: float, k3: float = 3e-4, steps: int = 60, **values: float) -> list[StepView]:
    """A policy that sharpens, so that the median difference falls, and from `start` on is `jump` times what it was."""
    level = noise(5, 0.15)
    views = []
    for seen in healthy(steps):
        median = 6e-4 * math.exp(-seen.step / 12) * next(level)
        said = {"mismatch.abs_q50": median, "mismatch.b_mean": -0.4, "mismatch.abs_mean": 20 * median}
        if seen.step >= start:
            said |= {"mismatch.abs_q50": jump * median, "mismatch.kl_k3": k3, "mismatch.kl_k2": k3, **values}
        views.append(view(seen.step, {**seen.values, **said}))
    return views


def test_the_median_token_tells_of_the_engine_at_once_where_no_mean_has_left_its_range() -> None:
    (incident,) = opened(bulky(30, 8.0, 5e-4), RULE)
    assert (incident.opened, incident.severity, incident.first.edge) == (30, "warning", "engine")
    assert incident.first.evidence[0].signal == "mismatch.abs_q50"


def test_a_median_that_falls_as_the_policy_sharpens_or_wavers_is_healthy() -> None:
    for seed in range(5):
        source = noise(seed, 0.25)
        calm = bulky(999, 1.0, steps=300)
        medians = [v.values["mismatch.abs_q50"] * next(source) for v in calm]
        views = [view(v.step, {**v.values, "mismatch.abs_q50": x}) for v, x in zip(calm, medians, strict=True)]
        assert opened(views, RULE) == []


def bfloat16_steps(seed: int, quantised_from: int = 999, steps: int = 120) -> list[StepView]:
    """One policy scored twice: trainer and engine round their bfloat16 logits apart, 1,024 tokens a step.

    The policy sharpens, and each batch is easier or harder than the last; from `quantised_from` on the engine's logits
    are off by a share that is fixed, as with weights of another precision.
    """
    generator = torch.Generator().manual_seed(seed)
    off = 0.06 * torch.randn(64, generator=generator)
    views = []
    for seen in healthy(steps, seed):
        difficulty = math.exp(0.1 * float(torch.randn((), generator=generator)))
        logits = torch.randn(1024, 64, generator=generator) * (2.0 + 3.0 * seen.step / steps) / difficulty
        token = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        passes = [(logits + 1e-2 * torch.randn(logits.shape, generator=generator)).bfloat16().float() for _ in "ab"]
        if seen.step >= quantised_from:
            passes[1] = passes[1] * (1.0 + off)
        a, b = (p.log_softmax(-1).gather(-1, token)[None, :, 0] for p in passes)
        accumulator = PairAccumulator()
        accumulator.observe(a, b, torch.ones_like(a))
        accumulator.collect()
        found = statistics(accumulator.record()).values
        pair = {f"{edge}.{name}": x for edge in ("mismatch", "mismatch_current") for name, x in found.items()}
        kept = {name: x for name, x in seen.values.items() if not name.startswith("mismatch.")}
        views.append(view(seen.step, kept | pair))
    return views


@pytest.mark.parametrize("seed", range(4))
def test_the_rounding_of_bfloat16_is_healthy_while_a_policy_sharpens_and_batches_differ(seed: int) -> None:
    assert opened(bfloat16_steps(seed), RULE) == []


def test_weights_of_another_precision_are_told_above_the_rounding_of_bfloat16() -> None:
    (incident, *_) = opened(bfloat16_steps(0, quantised_from=60), RULE)
    assert incident.opened in (60, 61)


def test_a_median_that_rises_as_surprise_explains_is_healthy_and_one_below_what_matters_too() -> None:
    assert opened(bulky(30, 8.0, 5e-4, **{"mismatch.b_mean": -1.2}), RULE) == []
    assert opened(bulky(30, 8.0, 5e-5), RULE) == []


def test_a_new_level_of_the_median_after_a_change_of_settings_is_learned() -> None:
    views = [view(v.step, v.values, segment=int(v.step >= 30)) for v in bulky(30, 8.0, 5e-4)]
    assert opened(views, RULE) == []


def test_a_truncated_sampler_is_named_and_warned_of_though_its_kl_is_negligible() -> None:
    shift = {"mismatch.abs_mean": 0.014, "mismatch.kl_k1": 0.0138}
    (incident,) = opened(bulky(30, 40.0, 1e-4, **shift), RULE)
    assert (incident.opened, incident.severity) == (30, "warning")
    assert "top-k" in incident.first.message
    assert incident.closed is not None, "told of once: it is a setting that stays"
    # A few tokens of much probability push the KL out of its range: still nothing that rolls back.
    far = {"mismatch.abs_mean": 0.031, "mismatch.kl_k1": 0.03, "mismatch_current.kl_k2": 6e-3}
    (incident,) = opened(bulky(30, 40.0, 6e-3, **far), RULE)
    assert incident.severity == "warning"
