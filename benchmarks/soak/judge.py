"""Is it flat? Samples of a soak in equal windows; the first third is the warm-up, in which caches and states fill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MEMORY_GROWTH, MEMORY_SLACK = 1.15, 20 << 20
LATENCY_GROWTH, LATENCY_SLACK_MS = 1.5, 10.0
FRAMES_SLACK = 1.5


@dataclass(frozen=True)
class Window:
    """One stretch of the soak: resident bytes of all service processes, ingest latency, rows kept, steps behind."""

    seconds: float
    frames: int
    memory_bytes: int
    p50_ms: float
    p99_ms: float
    frames_kept: int
    database_bytes: int


def findings(windows: Sequence[Window], retention_s: float, rate: float, lost: int, behind: int) -> dict[str, bool]:
    """Promise → kept. `rate`: frames stored a second; `lost`: acknowledged frames that no merged step counts;
    `behind`: steps not evaluated ten seconds after the load ended. `retention_s` 0: frames are kept for whole days."""
    settled = windows[len(windows) // 3 :]
    first, last = settled[0], settled[-1]
    kept = {
        "no acknowledged frame lost": lost == 0,
        "every step evaluated": behind == 0,
        "memory flat": last.memory_bytes <= MEMORY_GROWTH * first.memory_bytes + MEMORY_SLACK,
        # The median: what else a machine does shows in the worst of a window, what grows shows in all of it.
        "latency flat": last.p50_ms <= LATENCY_GROWTH * first.p50_ms + LATENCY_SLACK_MS,
    }
    if retention_s:
        most = FRAMES_SLACK * retention_s * rate
        kept["frames bounded by retention"] = all(window.frames_kept <= most for window in settled)
    return kept
