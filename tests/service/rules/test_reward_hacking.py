"""The rollout reward climbs while what it stands for falls."""

from __future__ import annotations

import random

from foreshock_service.rules.interface import StepView
from tests.service.rules.streams import opened, view

RULE = "reward_hacking"


def run(validation_slope: float, repetition: float = 0.0, steps: int = 120) -> list[StepView]:
    source, views = random.Random(3), []
    for step in range(steps):
        late = max(0, step - 50)
        values = {"reward.mean": 0.4 + 0.006 * late + source.gauss(0, 0.02)}
        if step % 5 == 0:
            values["reward.validation"] = 0.4 + validation_slope * late + source.gauss(0, 0.01)
        values["length.repetition"] = min(0.9, 0.02 + repetition * late)
        views.append(view(step, values))
    return views


def test_validation_that_falls_while_the_reward_climbs_warns() -> None:
    (incident,) = opened(run(-0.004), RULE)[:1]
    assert incident.severity == "warning"
    assert {e.signal for e in incident.first.evidence} == {"reward.mean", "reward.validation"}


def test_repetition_that_climbs_with_the_reward_warns() -> None:
    assert opened(run(0.0, repetition=0.01), RULE) != []


def test_a_reward_that_validation_follows_is_learning() -> None:
    assert opened(run(0.005), RULE) == []


def test_without_anything_to_contradict_it_a_reward_is_believed() -> None:
    views = [view(v.step, {"reward.mean": v.values["reward.mean"]}) for v in run(0.0)]
    assert opened(views, RULE) == []
