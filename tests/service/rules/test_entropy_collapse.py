"""A fall of entropy that buys nothing; sharpening is not one."""

from __future__ import annotations

import math
import random

from foreshock_service.rules.interface import StepView
from tests.service.rules.streams import healthy, opened, view

RULE = "entropy_collapse"


def falling(rate: float, reward_slope: float, start: int = 30, steps: int = 90) -> list[StepView]:
    source, views = random.Random(1), []
    for step in range(steps):
        late = max(0, step - start)
        entropy = 0.6 * math.exp(-rate * late) * math.exp(source.gauss(0, 0.03))
        views.append(
            view(step, {"entropy.mean": entropy, "reward.mean": 0.5 + reward_slope * late + source.gauss(0, 0.02)})
        )
    return views


def test_a_fall_without_a_gain_warns_before_entropy_is_a_third() -> None:
    incident = opened(falling(0.04, 0.0), RULE)[0]
    assert incident.severity == "warning"
    assert incident.opened is not None
    assert 31 <= incident.opened <= 30 + math.log(3) / 0.04


def test_the_same_fall_while_the_reward_rises_is_sharpening() -> None:
    assert opened(falling(0.04, 0.006), RULE) == []


def test_with_the_reward_falling_as_well_it_is_critical() -> None:
    assert opened(falling(0.05, -0.008), RULE)[0].severity == "critical"


def test_an_entropy_of_any_size_is_healthy_while_it_stays() -> None:
    for level in (0.01, 0.1, 10.0):
        views = [view(i, {"entropy.mean": level * (1 + 0.05 * (i % 3))}) for i in range(100)]
        assert opened(views, RULE) == []


def test_a_restart_from_other_weights_begins_a_new_baseline() -> None:
    views = healthy(60) + [view(i, {"entropy.mean": 0.05, "reward.mean": 0.3}, attempt=2, segment=1) for i in range(40)]
    assert opened(views, RULE) == []


def test_zero_entropy_is_a_measurement() -> None:
    views = [view(i, {"entropy.mean": 0.5 if i < 30 else 0.0}) for i in range(60)]
    assert opened(views, RULE)[0].opened is not None


def test_an_entropy_that_is_gone_before_a_baseline_is_known_warns_all_the_same() -> None:
    values = [1.2, 0.9, 1.1, 0.6, 0.05] + [1e-5] * 10
    (incident,) = opened([view(i, {"entropy.mean": x, "reward.mean": 0.0}) for i, x in enumerate(values)], RULE)
    assert (incident.opened, incident.first.onset_step, incident.severity) == (9, 5, "warning")


def test_an_entropy_that_was_always_tiny_is_in_another_unit() -> None:
    assert opened([view(i, {"entropy.mean": 3e-4, "reward.mean": 0.5}) for i in range(40)], RULE) == []
