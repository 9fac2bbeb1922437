"""Ranks that were expected and do not report."""

from __future__ import annotations

from typing import Any

from foreshock_service.rules.interface import StepView, Tick
from tests.service.rules.streams import opened, view

RULE = "missing_ranks"


def partial(step: int) -> StepView:
    return view(step, {"loss": 0.1}, reported=7, expected=8, absent_ranks=(("trainer", 5),))


def complete(step: int) -> StepView:
    return view(step, {"loss": 0.1}, reported=8, expected=8)


def tick(**more: Any) -> Tick:
    return Tick(**{"run": "lab/run", "attempt": 1, "step": 7, "silent_s": 5.0, "median_step_s": 30.0, **more})


def test_one_late_rank_is_no_finding() -> None:
    assert opened([complete(0), partial(1), complete(2), partial(3)], RULE) == []


def test_the_same_gap_twice_warns_and_names_the_rank_and_where_it_began() -> None:
    (incident,) = opened([complete(0), partial(1), partial(2)], RULE)
    assert (incident.opened, incident.severity, incident.first.onset_step) == (2, "warning", 1)
    assert "trainer 5" in incident.first.message


def test_complete_steps_resolve_it() -> None:
    (incident,) = opened([partial(1), partial(2), complete(3), complete(4)], RULE)
    assert incident.closed == 4


def test_a_rank_that_falls_silent_between_steps_is_found_by_ticks() -> None:
    silent = tick(silent_ranks=(("rollout", 3, 200.0),))
    assert opened([silent, silent], RULE)[0].first.message.endswith("rollout 3.")


def test_when_nobody_speaks_it_is_not_a_rank_that_is_missing() -> None:
    silent = tick(silent_s=500.0, silent_ranks=(("rollout", 3, 500.0), ("trainer", 0, 500.0)))
    assert opened([silent] * 5, RULE) == []
