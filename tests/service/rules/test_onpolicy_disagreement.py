"""Same weights on both sides: more than this run's rounding is a defect, and the three edges say where."""

from __future__ import annotations

import math
from typing import Any

import pytest

from foreshock_service.rules.interface import StepView
from tests.service.rules.streams import changed, healthy, incidents, noise, opened, view

RULE = "onpolicy_disagreement"


def ill(factor: float, start: int = 25, seed: int = 0, steps: int = 60, edge: str = "training_pass") -> list[StepView]:
    """policy.kl_k2 times `factor` from `start`; the edge of the odd pass carries it."""
    carried = {"training_pass": "mismatch_current.kl_k2", "scoring_pass": "mismatch.kl_k2"}[edge]
    views = []
    for seen in healthy(steps, seed):
        values = dict(seen.values)
        if seen.step >= start:
            values["policy.kl_k2"] *= factor
            values[carried] += values["policy.kl_k2"]
            values["mismatch.kl_k3"] = values["mismatch.kl_k2"]
        views.append(view(seen.step, values))
    return views


@pytest.mark.parametrize("seed", range(10))
def test_a_healthy_run_has_no_incident(seed: int) -> None:
    assert incidents(healthy(200, seed)) == []


@pytest.mark.parametrize("seed", range(5))
def test_two_orders_above_the_floor_is_critical_at_the_first_step(seed: int) -> None:
    (incident,) = opened(ill(300.0, seed=seed), RULE)
    assert (incident.opened, incident.severity) == (25, "critical")
    assert incident.first.onset_step == 25
    assert incident.first.edge == "training_pass"


def test_a_drift_of_a_fifth_a_step_is_found_before_it_is_a_hundredfold() -> None:
    factors = noise(3, 0.1)
    views = changed(healthy(80), 30, policy__kl_k2=lambda x: x * next(factors))
    views = [
        view(v.step, {**v.values, "policy.kl_k2": v.values["policy.kl_k2"] * math.exp(0.2 * max(0, v.step - 30))})
        for v in views
    ]
    incident = opened(views, RULE)[0]
    assert incident.opened is not None
    assert 31 <= incident.opened <= 30 + math.log(100) / 0.2


def test_the_edges_name_the_training_pass_and_leave_the_engine_rule_silent() -> None:
    found = incidents(ill(300.0))
    assert [(i.rule, i.first.edge) for i in found] == [(RULE, "training_pass")]


def test_a_scoring_pass_fault_is_only_a_warning_and_leaves_the_engine_rule_silent() -> None:
    found = incidents(ill(300.0, edge="scoring_pass"))
    assert [(i.rule, i.severity, i.first.edge) for i in found] == [(RULE, "warning", "scoring_pass")]


def test_without_the_engines_log_probs_the_pass_is_undecided_and_still_critical() -> None:
    views = [view(v.step, {"policy.kl_k2": v.values["policy.kl_k2"]}) for v in ill(300.0)]
    (incident,) = opened(views, RULE)
    assert (incident.severity, incident.first.edge) == ("critical", "undecided")


def test_log_probs_of_other_rows_are_critical_even_in_the_scoring_pass() -> None:
    views = changed(ill(1e4, edge="scoring_pass"), 25, policy__logp_pearson=0.01)
    assert opened(views, RULE)[0].severity == "critical"


def test_one_step_without_correlation_proves_nothing() -> None:
    views = ill(300.0, edge="scoring_pass")
    views[40] = view(40, {**views[40].values, "policy.logp_pearson": 0.01})
    assert opened(views, RULE)[0].severity == "warning"


def test_what_follows_from_a_much_larger_engine_mismatch_only_warns() -> None:
    views = changed(healthy(60), 25, policy__kl_k2=lambda x: 100 * x, mismatch__kl_k2=0.5, mismatch_current__kl_k2=0.5)
    (incident,) = opened(views, RULE)
    assert (incident.severity, incident.first.edge) == ("warning", "engine")


def test_one_rank_of_64_far_above_its_own_floor_is_found_and_named() -> None:
    """The merged figure moves by a third; the worst rank's own value says it."""
    views = []
    for seen in healthy(60):
        policy = seen.values["policy.kl_k2"]
        worst = (3000 * policy, 17) if seen.step >= 30 else (2 * policy, seen.step % 64)
        values = {**seen.values, "policy.kl_k2": 1.3 * policy if seen.step >= 30 else policy}
        views.append(view(seen.step, values, worst={"policy.kl_k2": worst}, reported=64, expected=64))
    (incident,) = opened(views, RULE)
    assert incident.opened == 30
    assert incident.first.evidence[0].rank == 17


def test_exactly_zero_is_a_floor_and_leaving_it_is_found() -> None:
    views = changed(changed(healthy(60), 0, policy__kl_k2=0.0), 30, policy__kl_k2=2e-3)
    assert opened(views, RULE)[0].opened == 30


def test_leaving_zero_for_mere_rounding_is_no_finding() -> None:
    views = changed(changed(healthy(60), 0, policy__kl_k2=0.0), 30, policy__kl_k2=2e-5)
    assert opened(views, RULE) == []


def test_a_fault_from_the_first_step_warns_by_preset_and_never_more() -> None:
    found = opened(changed(healthy(60), 0, policy__kl_k2=lambda x: 4e3 * x), RULE)
    assert [i.severity for i in found] == ["warning"]
    assert "first step" in found[0].first.message


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({"dtype": "float32"}, True),
        ({"dtype": "bfloat16"}, False),
        ({"dtype": "bfloat16", "moe": True}, False),
        ({}, False),
    ],
)
def test_presets_follow_the_dtype(settings: dict[str, Any], warned: bool) -> None:
    views = [view(v.step, {"policy.kl_k2": 3e-4}, settings=settings) for v in healthy(20)]
    assert bool(opened(views, RULE)) == warned


def test_a_floor_calibrated_by_the_host_needs_no_learning() -> None:
    views = [view(i, {"policy.kl_k2": 1e-3}, settings={"floors": {"policy.kl_k2": 2e-5}}) for i in range(3)]
    (incident,) = opened(views, RULE)
    assert (incident.opened, incident.severity) == (0, "critical")


def test_nan_never_poisons_the_floor_and_a_missing_figure_decides_nothing() -> None:
    views = changed(healthy(60), 0, policy__kl_k2=lambda x: x)
    for i in (3, 9, 12, 20):
        views[i] = view(i, {**views[i].values, "policy.kl_k2": math.nan})
    for i in (5, 24):
        views[i] = view(i, {k: v for k, v in views[i].values.items() if k != "policy.kl_k2"})
    (incident,) = opened(changed(views, 30, policy__kl_k2=0.05), RULE)
    assert incident.opened == 30


def test_while_the_figure_is_missing_an_open_incident_stays_open() -> None:
    views = ill(300.0, steps=40)
    views += [view(i, {"reward.mean": 0.5}) for i in range(40, 60)]
    assert opened(views, RULE)[0].closed is None


def test_the_floor_survives_a_restart_and_finds_the_same_fault_again_at_once() -> None:
    views = healthy(30) + healthy(3, seed=4, first=10, attempt=2, segment=1)
    again = [view(v.step + 13, {**v.values, "policy.kl_k2": 0.02}, attempt=2, segment=1) for v in healthy(2)]
    assert opened(views + again, RULE)[0].opened == 13


def test_coarse_steps_are_steps() -> None:
    views = [view(5 * v.step, v.values) for v in ill(300.0)]
    (incident,) = opened(views, RULE)
    assert incident.opened == 125


def test_back_at_the_floor_the_incident_resolves() -> None:
    views = changed(ill(300.0, steps=80), 50, policy__kl_k2=2e-5)
    (incident,) = opened(views, RULE)
    assert incident.closed is not None
    assert 54 <= incident.closed <= 62


def creeping(rate: float, steps: int = 500) -> list[StepView]:
    return [
        view(v.step, {**v.values, "policy.kl_k2": v.values["policy.kl_k2"] * math.exp(rate * max(0, v.step - 30))})
        for v in healthy(steps)
    ]


def test_a_creep_of_one_per_cent_a_step_that_every_baseline_would_follow_warns_then_is_critical() -> None:
    (incident,) = opened(creeping(0.01), RULE)[:1]
    assert incident.first.severity == "warning"
    assert incident.opened is not None
    assert incident.opened <= 30 + math.log(30) / 0.01
    assert incident.severity == "critical"


def test_a_floor_that_doubles_or_trebles_over_a_long_run_is_no_finding() -> None:
    assert opened(creeping(0.002), RULE) == []
