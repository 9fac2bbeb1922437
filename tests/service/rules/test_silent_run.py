"""Silence is measured in the run's own step times."""

from __future__ import annotations

from typing import Any

from foreshock_service.rules.interface import Tick
from tests.service.rules.streams import opened, view

RULE = "silent_run"


def tick(silent_s: float, **more: Any) -> Tick:
    return Tick(**{"run": "lab/run", "attempt": 1, "step": 7, "silent_s": silent_s, "median_step_s": 60.0, **more})


def test_a_few_step_times_are_no_silence() -> None:
    assert opened([tick(200), tick(299)], RULE) == []


def test_it_warns_then_is_critical() -> None:
    (incident,) = opened([tick(200), tick(301), tick(1799), tick(1801)], RULE)
    assert [f.transition for f in incident.findings] == ["open", "escalate"]


def test_slow_steps_need_longer_silence() -> None:
    assert opened([tick(1400, median_step_s=300.0)], RULE) == []
    assert opened([tick(1600, median_step_s=300.0)], RULE)[0].severity == "warning"


def test_the_next_step_resolves_it() -> None:
    (incident,) = opened([tick(400), view(8, {"loss": 0.1})], RULE)
    assert incident.closed == 8


def test_a_finished_or_paused_run_is_not_a_silent_one() -> None:
    assert opened([tick(1e6, finished=True), tick(1e6, paused=True)], RULE) == []


def test_before_the_first_step_there_is_time_to_load_and_it_never_is_more_than_a_warning() -> None:
    assert opened([tick(7000, step=None, median_step_s=None)], RULE) == []
    assert opened([tick(90_000, step=None, median_step_s=None)], RULE)[0].severity == "warning"
