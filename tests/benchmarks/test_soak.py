"""A small `make soak`: a real service on SQLite; and the judge, which can find fault."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.soak.__main__ import soak
from benchmarks.soak.judge import Window, findings

CALM = [Window(10.0 * n, 1000 * n, 200 << 20, 2.0, 8.0, 900, 9 << 20) for n in range(1, 7)]


def broken(windows: list[Window], retention_s: float = 20.0, lost: int = 0, behind: int = 0) -> set[str]:
    return {promise for promise, kept in findings(windows, retention_s, 100.0, lost, behind).items() if not kept}


def test_the_judge_names_what_grows_and_what_is_lost() -> None:
    grown = {
        "memory flat": {"memory_bytes": 400 << 20},
        "latency flat": {"p50_ms": 80.0},
        "frames bounded by retention": {"frames_kept": 6000},
    }
    assert broken(CALM) == set()
    for promise, change in grown.items():
        assert broken([*CALM[:-1], dataclasses.replace(CALM[-1], **change)]) == {promise}  # type: ignore[arg-type]
    assert broken(CALM, lost=1) == {"no acknowledged frame lost"}
    assert broken(CALM, behind=1) == {"every step evaluated"}
    assert "frames bounded by retention" not in findings(CALM, 0.0, 100.0, 0, 0)


@pytest.mark.timeout(300)
def test_a_small_soak_loses_nothing_evaluates_everything_and_forgets_old_frames() -> None:
    windows, kept, figures = soak("sqlite", runs=12, ranks=2, step_s=0.5, seconds=15.0)
    assert kept["no acknowledged frame lost"]
    assert kept["every step evaluated"]
    assert figures["frames"] > windows[-1].frames_kept > 0, "retention was not at work"
