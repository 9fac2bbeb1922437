"""Held against the largest norm of the past: bimodal norms are normal, bursts and lasting rises are not."""

from __future__ import annotations

import random

from foreshock_service.rules.interface import StepView
from tests.service.rules.streams import changed, healthy, opened, view

RULE = "gradient_spike"


def spiked(at: set[int], factor: float = 20.0) -> list[StepView]:
    return [
        view(v.step, {**v.values, "grad.norm": v.values["grad.norm"] * (factor if v.step in at else 1.0)})
        for v in healthy(120)
    ]


def test_one_spike_heals_by_itself() -> None:
    assert opened(spiked({50}), RULE) == []


def test_a_burst_of_spikes_warns() -> None:
    (incident,) = opened(spiked({50, 52, 53}), RULE)
    assert (incident.opened, incident.severity, incident.first.onset_step) == (53, "warning", 50)


def test_a_norm_that_stays_up_is_critical() -> None:
    assert opened(changed(healthy(90), 50, grad__norm=lambda x: 20 * x), RULE)[0].severity == "critical"


def test_norms_that_are_near_zero_whenever_groups_tie_are_normal() -> None:
    source = random.Random(0)
    views = [view(i, {"grad.norm": source.uniform(0.2, 0.8) if source.random() < 0.3 else 1e-3}) for i in range(400)]
    assert opened(views, RULE) == []


def test_exact_zeros_and_nan_are_no_part_of_the_past() -> None:
    views = changed(healthy(60), 0, grad__norm=0.0)
    views += changed(healthy(10, first=60), 60, grad__norm=5.0)
    views.append(view(70, {"grad.norm": float("nan")}))
    assert opened(views, RULE) == []
