"""Is it flat? Samples of a soak in equal windows; the first third is the warm-up, in which caches and states fill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MEMORY_GROWTH, MEMORY_SLACK = 1.15, 20 << 20
LATENCY_GROWTH, LATENCY_SLACK_MS = 1.5, 10.0
TAIL_GROWTH, TAIL_SLACK_MS = 2.0, 50.0
"""A tail swings with whatever else the machine does: a checkpoint, a partition that is dropped."""
FRAMES_SLACK = 1.5
STEP_BYTES, DATABASE_SLACK = 8 << 10, 48 << 20
"""What a step leaves for good, its merged point and its row; and what a database takes beside, for its write-ahead log
and for pages that wait to be used again."""


@dataclass(frozen=True)
class Window:
    """One stretch of the soak: resident bytes of all service processes, ingest latency, rows kept, steps behind."""

    seconds: float
    frames: int
    memory_bytes: int
    p50_ms: float | None
    p99_ms: float | None
    """None where nothing was answered."""
    frames_kept: int
    steps_kept: int
    database_bytes: int


def findings(windows: Sequence[Window], retention_s: float, rate: float, lost: int, behind: int) -> dict[str, bool]:
    """Promise → kept. `retention_s`: how long frames may be there, what a partition adds included; `rate`: frames
    stored a second; `lost`: acknowledged frames that no merged step counts; `behind`: steps not evaluated ten seconds
    after the load ended. What was not measured is not kept."""
    settled = windows[len(windows) // 3 :]
    if not settled or not rate:
        return {"anything measured": False}
    first, last = settled[0], settled[-1]
    steps = max(0, last.steps_kept - first.steps_kept)
    return {
        "no acknowledged frame lost": lost == 0,
        "every step evaluated": behind == 0,
        "memory flat": last.memory_bytes <= MEMORY_GROWTH * first.memory_bytes + MEMORY_SLACK,
        "latency flat, median": _flat(first.p50_ms, last.p50_ms, LATENCY_GROWTH, LATENCY_SLACK_MS),
        "latency flat, 99 %": _flat(first.p99_ms, last.p99_ms, TAIL_GROWTH, TAIL_SLACK_MS),
        "frames bounded by retention": all(w.frames_kept <= FRAMES_SLACK * retention_s * rate for w in settled),
        "database grows by merged steps alone": last.database_bytes - first.database_bytes
        <= STEP_BYTES * steps + DATABASE_SLACK,
    }


def _flat(first: float | None, last: float | None, growth: float, slack_ms: float) -> bool:
    return first is not None and last is not None and last <= growth * first + slack_ms
