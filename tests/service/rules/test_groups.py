"""mixed_groups and dead_groups: invariants of group-relative advantages."""

from __future__ import annotations

import random

from tests.service.rules.streams import opened, view


def test_one_mixed_group_is_critical_at_the_first_step() -> None:
    (incident,) = opened([view(0, {"group.mixed": 0.01})], "mixed_groups")
    assert incident.severity == "critical"


def test_no_mixed_group_is_healthy_and_no_figure_is_unknown() -> None:
    assert opened([view(i, {"group.mixed": 0.0}) for i in range(5)], "mixed_groups") == []
    assert opened([view(i, {"group.mixed": float("nan")}) for i in range(5)], "mixed_groups") == []


def test_groups_that_stay_dead_warn() -> None:
    (incident,) = opened(
        [view(i, {"group.zero_std": 0.5 if i < 20 else 1.0, "reward.mean": 0.0}) for i in range(60)], "dead_groups"
    )
    assert incident.severity == "warning"
    assert incident.opened is not None
    assert 27 <= incident.opened <= 45
    assert "reward of 0" in incident.first.message


def test_small_batches_that_touch_one_now_and_then_are_normal() -> None:
    source = random.Random(1)
    views = [view(i, {"group.zero_std": source.choice((0.6, 0.8, 0.8, 1.0, 1.0))}) for i in range(300)]
    assert opened(views, "dead_groups") == []
