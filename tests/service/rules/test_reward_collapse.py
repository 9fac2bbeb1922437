"""What the run had is gone, beyond its noise."""

from __future__ import annotations

import random

import pytest

from foreshock_service.rules.interface import StepView
from tests.service.rules.streams import healthy, opened, view

RULE = "reward_collapse"


def run(levels: list[tuple[int, float]], noise: float, seed: int = 0, signal: str = "reward.mean") -> list[StepView]:
    """Consecutive stretches of (steps, level)."""
    source, views = random.Random(seed), []
    for steps, level in levels:
        views += [view(len(views) + i, {signal: level + source.gauss(0, noise)}) for i in range(steps)]
    return views


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("noise", [0.02, 0.1, 0.25])
def test_noise_around_a_level_is_no_collapse(noise: float, seed: int) -> None:
    assert opened(run([(200, 0.5)], noise, seed), RULE) == []


@pytest.mark.parametrize("seed", range(5))
def test_a_collapse_is_critical_within_ten_steps(seed: int) -> None:
    incident = opened(run([(20, 0.4), (40, 0.8), (40, 0.02)], 0.03, seed), RULE)[0]
    assert incident.severity == "critical"
    assert incident.opened is not None
    assert 60 <= incident.opened <= 64
    assert next(f.step for f in incident.findings if f.severity == "critical") <= 70


def test_a_noisy_reward_collapses_more_slowly_in_our_eyes_but_it_does() -> None:
    (incident,) = opened(run([(60, 0.7), (60, 0.0)], 0.2), RULE)
    assert incident.opened is not None
    assert incident.opened <= 85


def test_a_dip_that_heals_resolves() -> None:
    (incident,) = opened(run([(50, 0.8), (12, 0.3), (50, 0.8)], 0.02), RULE)
    assert incident.closed is not None


def test_negative_rewards_and_shifted_scales_are_judged_alike() -> None:
    views = run([(20, -20.0), (40, -4.0), (30, -19.0)], 0.5)
    assert opened(views, RULE)[0].severity == "critical"
    assert opened(run([(100, -20.0)], 0.5), RULE) == []


def test_the_validation_reward_is_judged_by_itself() -> None:
    views = [view(5 * i, {"reward.mean": 0.9, "reward.validation": 0.9 if i < 12 else 0.2}) for i in range(24)]
    assert opened(views, RULE)[0].first.evidence[0].signal == "reward.validation"


def test_a_restart_may_lose_only_what_it_has_itself() -> None:
    again = [view(i, {"reward.mean": 0.35}, attempt=2, segment=1) for i in range(40)]
    assert opened(run([(80, 0.9)], 0.02) + again, RULE) == []


def test_a_constant_reward_and_nan_are_no_collapse() -> None:
    views = [view(i, {"reward.mean": 0.0 if i % 7 else float("nan")}) for i in range(60)]
    assert opened(views, RULE) == []
    assert opened(healthy(200), RULE) == []
