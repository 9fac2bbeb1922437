"""A small `make soak`: a real service on each database; and the judge, which can find fault."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from benchmarks.soak.__main__ import soak
from benchmarks.soak.judge import Window, findings

CALM = [Window(10.0 * n, 1000 * n, 200 << 20, 2.0, 8.0, 900, 500 * n, (9 + 2 * n) << 20) for n in range(1, 7)]


def broken(windows: list[Window], retention_s: float = 20.0, lost: int = 0, behind: int = 0) -> set[str]:
    return {promise for promise, kept in findings(windows, retention_s, 100.0, lost, behind).items() if not kept}


def test_the_judge_names_what_grows_and_what_is_lost() -> None:
    grown: dict[str, dict[str, Any]] = {
        "memory flat": {"memory_bytes": 400 << 20},
        "latency flat, median": {"p50_ms": 80.0},
        "latency flat, 99 %": {"p99_ms": 300.0},
        "frames bounded by retention": {"frames_kept": 6000},
        "database grows by merged steps alone": {"database_bytes": 200 << 20},
    }
    assert broken(CALM) == set()
    for promise, change in grown.items():
        assert broken([*CALM[:-1], dataclasses.replace(CALM[-1], **change)]) == {promise}
    assert broken(CALM, lost=1) == {"no acknowledged frame lost"}
    assert broken(CALM, behind=1) == {"every step evaluated"}


def test_what_was_not_measured_was_not_kept() -> None:
    silent = dataclasses.replace(CALM[-1], p50_ms=None, p99_ms=None)
    assert broken([*CALM[:-1], silent]) == {"latency flat, median", "latency flat, 99 %"}
    assert not all(findings([], 20.0, 100.0, 0, 0).values())
    assert not all(findings(CALM, 20.0, 0.0, 0, 0).values())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def test_a_small_soak_loses_nothing_evaluates_everything_and_forgets_old_frames(kind: str) -> None:
    windows, kept, figures = soak(kind, runs=12, ranks=2, step_s=0.5, seconds=30.0 if kind == "postgresql" else 15.0)
    timed = {"latency flat, median", "latency flat, 99 %", "frames bounded by retention"}
    assert {promise for promise, good in kept.items() if not good} <= timed, "no matter how busy the machine is"
    assert figures["frames"] > 1.5 * windows[-1].frames_kept > 0, "retention was not at work"
    assert windows[-1].steps_kept * 2 > windows[-1].frames_kept, "points went with their frames"
