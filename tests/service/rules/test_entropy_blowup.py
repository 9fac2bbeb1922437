"""A policy on its way to noise."""

from __future__ import annotations

from tests.service.rules.streams import changed, healthy, opened, view

RULE = "entropy_blowup"


def test_a_jump_to_several_times_is_critical_at_once() -> None:
    (incident,) = opened(changed(healthy(60), 30, entropy__mean=4.0), RULE)
    assert (incident.opened, incident.severity) == (30, "critical")


def test_a_slow_rise_without_a_gain_warns() -> None:
    views = [
        view(i, {"entropy.mean": 0.3 * 1.03 ** max(0, i - 30), "reward.mean": 0.5 + 0.001 * (i % 5)}) for i in range(80)
    ]
    incident = opened(views, RULE)[0]
    assert incident.first.severity == "warning"
    assert incident.opened is not None
    assert 40 <= incident.opened <= 65


def test_a_rise_that_the_reward_follows_is_exploration() -> None:
    views = [
        view(
            i,
            {"entropy.mean": 0.3 * 1.03 ** max(0, i - 30), "reward.mean": 0.3 + 0.01 * max(0, i - 30) + 0.01 * (i % 3)},
        )
        for i in range(70)
    ]
    assert opened(views, RULE) == []


def test_a_break_at_the_fifth_line_of_a_coarse_log_warns() -> None:
    entropies = [0.157, 0.137, 0.162, 0.221, 1.5, 2.34, 4.9]
    views = [view(5 * i, {"entropy.mean": x, "reward.mean": 0.8}) for i, x in enumerate(entropies)]
    (incident,) = opened(views, RULE)
    assert (incident.opened, incident.severity) == (20, "warning")


def test_tiny_entropies_that_multiply_are_no_finding() -> None:
    assert opened(changed(changed(healthy(60), 0, entropy__mean=1e-3), 30, entropy__mean=2e-2), RULE) == []
