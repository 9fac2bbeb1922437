"""Drift from the reference is training; a KL that stays at a multiple of all it ever was is not."""

from __future__ import annotations

import math
import random

from foreshock_service.rules.interface import StepView
from tests.service.rules.streams import opened, view

RULE = "kl_blowup"


def drifting(steps: int = 200) -> list[StepView]:
    source = random.Random(0)
    return [view(i, {"reference.kl_k3": 1e-3 + 1e-3 * i + abs(source.gauss(0, 3e-3))}) for i in range(steps)]


def test_steady_drift_is_followed() -> None:
    assert opened(drifting(600), RULE) == []


def test_one_outlier_heals() -> None:
    views = drifting()
    views[100] = view(100, {"reference.kl_k3": 30.0})
    assert opened(views, RULE) == []


def test_exponential_growth_warns_then_is_critical() -> None:
    views = [
        view(v.step, {"reference.kl_k3": v.values["reference.kl_k3"] * math.exp(0.25 * max(0, v.step - 120))})
        for v in drifting(160)
    ]
    (incident,) = opened(views, RULE)
    assert [f.transition for f in incident.findings if f.transition != "update"] == ["open", "escalate"]
    assert incident.opened is not None
    assert 121 <= incident.opened <= 138


def test_a_hopeless_kl_is_critical_from_the_first_step() -> None:
    assert opened([view(0, {"reference.kl_k3": 1e24})], RULE)[0].severity == "critical"


def test_updates_that_run_away_are_found_too() -> None:
    views = [view(i, {"update.kl_k2": 1e-3 if i < 50 else 2.0}) for i in range(70)]
    assert opened(views, RULE)[0].severity == "critical"


def test_small_figures_that_multiply_are_no_finding() -> None:
    assert opened([view(i, {"reference.kl_k3": 1e-5 if i < 50 else 1e-2}) for i in range(100)], RULE) == []


def test_a_kl_of_several_nats_in_the_first_steps_warns_at_the_third() -> None:
    """Nothing is known to compare with, and nothing needs to be: sampled tokens are seven times likelier."""
    (incident,) = opened([view(i, {"reference.kl_k3": x}) for i, x in enumerate([0.0, 0.6, 3.7, 6.3, 3.1, 5.4])], RULE)
    assert (incident.opened, incident.first.onset_step, incident.severity) == (4, 2, "warning")


def test_single_early_spikes_and_a_level_reached_slowly_are_no_finding() -> None:
    assert opened([view(i, {"reference.kl_k3": 5.0 if i in (2, 5) else 0.1}) for i in range(12)], RULE) == []
    assert opened([view(i, {"reference.kl_k3": 0.05 * i}) for i in range(100)], RULE) == []


def test_a_mean_ratio_that_leaves_1_warns_and_one_that_never_was_near_it_does_not() -> None:
    source = random.Random(4)
    near = [view(i, {"update.ratio_mean": 1 + source.gauss(0, 0.02)}) for i in range(120)]
    assert opened(near, RULE) == []
    away = [v if v.step < 80 else view(v.step, {"update.ratio_mean": 1 + 0.1 * (v.step - 79)}) for v in near]
    (incident,) = opened(away, RULE)
    assert incident.opened is not None
    assert incident.opened <= 90
    assert "should be 1" in incident.first.message
    noisy = [view(i, {"update.ratio_mean": 1 + source.gauss(0, 0.5)}) for i in range(200)]
    assert opened(noisy, RULE) == []
