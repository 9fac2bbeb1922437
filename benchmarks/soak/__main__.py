"""A long run in short: 500 simulated runs on one real service for minutes; is anything growing that should not?

    python -m benchmarks.soak [--database sqlite] [--runs 500] [--ranks 2] [--step-s 2] [--minutes 3] [--json FILE]

Each run makes a step every `--step-s` seconds; each rank posts a frame of two pairs and 30 scalars. The retention of
raw frames is cut to a fifth of the time, so that it is at work: rows that are deleted on SQLite, partitions of a third
of it that are dropped on PostgreSQL. Ends 1 where a promise is broken; the table comes last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sqlite3
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.ingest.load import quantile_ms, record
from benchmarks.ingest.service import Service, service
from benchmarks.soak.judge import Window, findings
from benchmarks.soak.load import Run, Tally, drive
from foreshock_service.store.retention import DAY_S, span_s

WINDOWS = 6
BEHIND_S = 10.0


def soak(
    kind: str, runs: int, ranks: int, step_s: float, seconds: float
) -> tuple[list[Window], dict[str, bool], dict[str, Any]]:
    """The windows of one soak, which promises were kept, and its figures."""
    keep_s, upkeep_s = seconds / 5, max(1.0, seconds / 30)
    extra = {"FORESHOCK_UPKEEP_S": str(upkeep_s), "FORESHOCK_FRAMES_RETENTION_DAYS": str(keep_s / DAY_S)}
    retention_s = keep_s + upkeep_s + (span_s(keep_s / DAY_S, upkeep_s) if kind == "postgresql" else 0.0)
    records = [record(seed) for seed in range(4)]
    jobs = [Run(f"soak/run{n}", ranks, records, n) for n in range(runs)]
    tally = Tally()
    with service(kind, extra) as at:
        began = time.perf_counter()
        windows: list[Window] = []
        watcher = threading.Thread(target=_watch, args=(at, tally, began, seconds, windows))
        watcher.start()
        asyncio.run(drive(at.url, jobs, seconds, step_s, tally))
        watcher.join()
        lost, behind = _count(at, jobs, ranks)
    rate = tally.frames / seconds
    figures = {"frames": tally.frames, "frames_per_s": round(rate, 1), "refused": tally.refused, "runs": runs,
               "lost": lost, "behind": behind}  # fmt: skip
    return windows, findings(windows, retention_s, rate, lost, behind), figures


def _watch(at: Service, tally: Tally, began: float, seconds: float, windows: list[Window]) -> None:
    seen = 0
    for number in range(1, WINDOWS + 1):
        time.sleep(max(0.0, began + seconds * number / WINDOWS - time.perf_counter()))
        taken = [took for _, took in tally.taken[seen:]]
        seen += len(taken)
        windows.append(
            Window(
                seconds=round(time.perf_counter() - began, 1),
                frames=tally.frames,
                memory_bytes=at.memory_bytes(),
                p50_ms=quantile_ms(taken, 0.5),
                p99_ms=quantile_ms(taken, 0.99),
                frames_kept=_rows(at, "SELECT count(*) FROM frames"),
                steps_kept=_rows(at, "SELECT count(*) FROM points"),
                database_bytes=at.disk_bytes(),
            )
        )


def _rows(at: Service, query: str) -> int:
    if at.database_url.startswith("sqlite"):
        with sqlite3.connect(f"file:{at.database_url.removeprefix('sqlite:///')}?mode=ro", uri=True) as connection:
            return int(connection.execute(query).fetchone()[0])
    with psycopg.connect(at.database_url) as connection:
        row = connection.execute(query).fetchone()
        return int(row[0]) if row else 0


def _count(at: Service, jobs: list[Run], ranks: int) -> tuple[int, int]:
    """Acknowledged frames that no step's row counts, and steps that are not evaluated after `BEHIND_S` more seconds."""
    until = time.monotonic() + BEHIND_S
    sent = sum(job.step for job in jobs)
    while time.monotonic() < until:
        behind = sent - _rows(at, "SELECT count(*) FROM points")
        if behind <= 0:
            break
        time.sleep(0.2)
    counted = _rows(at, "SELECT coalesce(sum(reported), 0) FROM steps")
    return max(0, sent * ranks - counted), max(0, behind)


def table(kind: str, windows: list[Window], kept: dict[str, bool], figures: dict[str, Any]) -> None:
    print(f"\n{kind}: {figures['runs']} runs, {figures['frames_per_s']} frames/s, {figures['refused']} sent again")
    print("   after s    frames  memory MB  p50 ms  p99 ms  frames kept  steps kept  database MB")
    for w in windows:
        print(
            f"{w.seconds:10.0f} {w.frames:9d} {w.memory_bytes / 2**20:10.1f} {w.p50_ms or 0:7.1f} {w.p99_ms or 0:7.1f}"
            f" {w.frames_kept:12d} {w.steps_kept:11d} {w.database_bytes / 2**20:12.1f}"
        )
    for promise, good in kept.items():
        print(f"{'kept  ' if good else 'BROKEN'} {promise}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database", choices=["sqlite", "postgresql"], action="append")
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--step-s", type=float, default=2.0)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = {}
    for kind in options.database or ["sqlite", "postgresql"]:
        found[kind] = soak(kind, options.runs, options.ranks, options.step_s, 60 * options.minutes)
    if options.json:
        document = {
            kind: {"windows": [vars(w) for w in windows], "kept": kept, **figures}
            for kind, (windows, kept, figures) in found.items()
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=1))
    for kind, (windows, kept, figures) in found.items():
        table(kind, windows, kept, figures)
    return 0 if all(all(kept.values()) for _, kept, _ in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
