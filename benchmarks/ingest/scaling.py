"""What a frame costs as runs, ranks and stored frames grow, and what a series costs out of many points.

    python -m benchmarks.ingest.scaling runs|ranks|stored|series [--database KIND] [--most N] [--json FILE]

`runs`, `ranks`: CPU a frame of storing and evaluating (one process, no HTTP) for 1, 10, … runs and 1, 4, … ranks; of
runs at the same load, so many frames together however many runs they are of, and for one run besides as its steps come.
`stored`: the same frames on top of 10⁴, 10⁵, … frames, which the database copied from real ones (10⁷: 35 GB on
PostgreSQL). `series`: `GET …/series` of 10⁴ points of one signal out of `--most` stored ones, wall and CPU. Ends 1
where a cost is more than 20 % above its first or the series takes more than 100 ms at p95; the table comes last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import text

from benchmarks.ingest.bulk import COPIED_FROM, FIRST_COPY, copy_run, copy_steps, settled
from benchmarks.ingest.load import bodies, quantile_ms, record
from benchmarks.ingest.service import Service, serving
from benchmarks.ingest.stages import measured, open_stages, postgres_cpu_s, postmaster_of
from benchmarks.latency.databases import database
from benchmarks.soak.load import Run
from foreshock.stats.record import PairRecord
from foreshock_service.heap import settle
from foreshock_service.store.engine import Store

FRAMES, RANKS = 16, 8
TOGETHER = 256
"""Frames: what comes of 1,700 a second while steps gather."""
NEAR = 0.2
SERIES_P95_MS = 100.0
SERIES_POINTS, STEPS_A_RUN = 10_000, 100_000
WARMING, READS = 10, 60
OTHERS, ROUNDS = 9, 5


def work_of(pair: PairRecord, runs: int, ranks: int, envelopes: int, name: str, frames: int = FRAMES) -> list[bytes]:
    """Envelopes of every rank of every run, turn by turn."""
    clients = [
        list(bodies(pair, f"bench/{name}{run}", rank, ranks, frames, envelopes))
        for run in range(runs)
        for rank in range(ranks)
    ]
    return [body for turn in zip(*clients, strict=True) for body in turn]


def over(kind: str, what: str, most: int) -> list[dict[str, Any]]:
    """One row for each number of runs or ranks up to `most`, a fresh database each.

    Runs have 8 ranks that post one frame each a step, and `TOGETHER` frames are evaluated together, a step of each run
    at least; with ranks, envelopes of 16 frames come of each.
    """
    if what == "runs":
        sizes = [n for n in (1, 10, 100, 1000) if n <= most]
        alone = {"alone": True, **_over(kind, 1, RANKS, 1, rounds=64, steps=1)}
        return [
            *({"runs": n, **_over(kind, n, RANKS, 1, max(2, 64 // n), max(1, TOGETHER // n // RANKS))} for n in sizes),
            alone,
        ]
    sizes = [n for n in (1, 4, 16, 64, 256) if n <= most]
    return [{"ranks": n, **_over(kind, 1, n, FRAMES, rounds=max(1, 256 // (FRAMES * n)), steps=1)} for n in sizes]


def _over(kind: str, runs: int, ranks: int, frames: int, rounds: int, steps: int) -> dict[str, Any]:
    """The mean cost of a frame where each of `runs` brings `rounds` envelopes a rank, `steps` of them together."""
    pair, each = record(), runs * ranks
    with database(kind) as url, open_stages(url, pair) as stages:
        settle()
        work = work_of(pair, runs, ranks, rounds + 1, "r", frames)
        measured(stages, work[:each], ranks)  # the runs' first step makes them
        costs = [measured(stages, work[n : n + steps * each], ranks) for n in range(each, len(work), steps * each)]
        mean = {name: round(sum(c[name] for c in costs) / len(costs), 1) for name in costs[0]}
    return {"frames": rounds * each * frames, **mean}


def stored(kind: str, most: int) -> list[dict[str, Any]]:
    """One row for each power of ten of stored frames up to `most`: half of them the run's that goes on, half others'.

    The frames that are measured are sent, stored and evaluated as ever, in `ROUNDS` rounds of which the median counts;
    those they are stored upon are copies of real ones with their steps and points (`benchmarks.ingest.bulk`).
    """
    pair, found, so_far, size = record(), [], 0, min(10_000, most)
    names = ["bench/grown0", *(f"bench/other{n}" for n in range(OTHERS))]
    with database(kind) as url, open_stages(url, pair) as stages:
        settle()
        for seed, name in enumerate(names):
            measured(stages, _real_steps(name, seed), RANKS)
        while size <= most:
            began = time.perf_counter()
            for n, name in enumerate(names):
                share = (size - so_far) // RANKS // (2 if n == 0 else 2 * OTHERS)
                copy_steps(stages.store, name, FIRST_COPY + so_far, share)
            settled(stages.store, vacuumed="frames, steps, points")
            filled = time.perf_counter() - began
            rounds = [measured(stages, _later(pair, size, n), RANKS) for n in range(ROUNDS)]
            median = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
            # The kernel counts its CPU in hundredths of a second: a round is too short for a median.
            theirs = statistics.fmean(one["postgres_us"] for one in rounds)
            found.append({"stored": size, "filled_s": round(filled, 1), **median, "postgres_us": round(theirs, 1)})
            print(kind, json.dumps(found[-1]), file=sys.stderr, flush=True)
            so_far, size = size, size * 10
    return found


def _real_steps(name: str, seed: int) -> list[bytes]:
    """Some steps of a run whose values wander."""
    run = Run(name, RANKS, [record(n) for n in range(4)], seed)
    return [body for _ in range(COPIED_FROM) for body in run.bodies()]


def _later(pair: PairRecord, size: int, number: int) -> list[bytes]:
    """512 frames of new clients of the grown run, at steps behind all that are stored."""
    first = 100_000_000 + 10 * size + 1_000 * number
    clients = [list(bodies(pair, "bench/grown0", rank, RANKS, FRAMES, 4, first_step=first)) for rank in range(RANKS)]
    return [body for turn in zip(*clients, strict=True) for body in turn]


def series(kind: str, most: int) -> list[dict[str, Any]]:
    """Reads of 10⁴ steps' points of one signal out of `most` values in runs of 10⁵ steps, through the service."""
    with database(kind) as url:
        with open_stages(url, record()) as stages:
            measured(stages, _real_steps("bench/series0", 0), RANKS)
            names, size = _filled(stages.store, most)
        with serving(url, {"FORESHOCK_MAX_SERIES_POINTS": "10000"}) as at:
            return [{**size, **_reads(at, names, size), "database_bytes": at.disk_bytes()}]


def _filled(store: Store, most: int) -> tuple[list[str], dict[str, Any]]:
    """Copies of the real run's points until there are `most` values; its signals, and how much there is."""
    began = time.perf_counter()
    with store.read() as session:
        asked = "SELECT s.name FROM signals s JOIN runs r ON r.id = s.run_id WHERE r.name = 'bench/series0' ORDER BY 1"
        names = list(session.scalars(text(asked)))
    steps = min(STEPS_A_RUN, most // len(names))
    runs = max(1, round(most / len(names) / steps))
    for n in range(runs):
        if n:
            copy_run(store, "bench/series0", f"bench/series{n}")
        copy_steps(store, f"bench/series{n}", FIRST_COPY, steps, frames=False)
    settled(store, vacuumed="points")
    filled = round(time.perf_counter() - began, 1)
    return names, {"values": runs * steps * len(names), "rows": runs * steps, "runs": runs, "filled_s": filled}


def _reads(at: Service, names: Sequence[str], size: dict[str, Any]) -> dict[str, Any]:
    """Latency of `READS` reads, each of another signal, run and window; CPU of the service and of PostgreSQL a read."""
    taken = []
    postmaster = postmaster_of(at.database_url)
    steps = size["rows"] // size["runs"]
    cpu = theirs = 0.0
    _calm(at)
    for n in range(-WARMING, READS):
        if n == 0:
            cpu, theirs = at.cpu_s(), postgres_cpu_s(postmaster)
        low = FIRST_COPY + (n * 7919) % max(1, steps - SERIES_POINTS)
        window = f"attempt=1&from_step={low}&to_step={low + SERIES_POINTS - 1}&max_points={SERIES_POINTS}"
        url = f"{at.url}/v1/runs/bench/series{n % size['runs']}/series?signal={names[n % len(names)]}&{window}"
        began = time.perf_counter()
        with urllib.request.urlopen(url, timeout=60) as answer:
            body = answer.read()
        taken.append(time.perf_counter() - began)
        shown = len(json.loads(body)["series"][0]["points"])
        if shown != min(SERIES_POINTS, steps):
            raise SystemExit(f"{shown} points came of {url}")
    return {
        "bytes": len(body), "p50_ms": quantile_ms(taken[WARMING:], 0.5), "p95_ms": quantile_ms(taken[WARMING:], 0.95),
        "cpu_ms": round(1e3 * (at.cpu_s() - cpu) / READS, 1),
        "postgres_ms": round(1e3 * (postgres_cpu_s(postmaster) - theirs) / READS, 1),
    }  # fmt: skip


def _calm(at: Service) -> None:
    """Waits until the service has started all that it starts: no more CPU than an idle one uses."""
    for _ in range(60):
        before = at.cpu_s()
        time.sleep(0.5)
        if at.cpu_s() - before <= 0.02:
            return


def judged(rows: list[dict[str, Any]], what: str) -> bool:
    """No figure beyond its target, and there are figures. A cost may fall."""
    if what == "series":
        return bool(rows) and all(row["p95_ms"] is not None and row["p95_ms"] <= SERIES_P95_MS for row in rows)
    rows = [row for row in rows if not row.get("alone")]
    return len(rows) > 1 and all(row["cpu_us"] <= (1 + NEAR) * rows[0]["cpu_us"] for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["runs", "ranks", "stored", "series"])
    parser.add_argument("--database", choices=["sqlite", "postgresql"], action="append")
    parser.add_argument("--most", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    most = options.most or {"runs": 1000, "ranks": 256, "stored": 10_000_000, "series": 100_000_000}[options.what]
    found: dict[str, list[dict[str, Any]]] = {}
    for kind in options.database or ["postgresql"]:
        match options.what:
            case "stored":
                found[kind] = stored(kind, most)
            case "series":
                found[kind] = series(kind, most)
            case what:
                found[kind] = over(kind, what, most)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    good = True
    for kind, rows in found.items():
        for row in rows:
            print(kind, json.dumps(row))
        met = judged(rows, options.what)
        print(f"{'met   ' if met else 'MISSED'} {kind} {options.what}")
        good &= met
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
