"""What a frame costs as runs, ranks and stored frames grow, and what a series costs out of many points.

    python -m benchmarks.ingest.scaling runs|ranks|stored|series [--database KIND] [--most N] [--json FILE]

`runs`, `ranks`: CPU a frame of storing and evaluating (one process, no HTTP) for 1, 10, … runs and 1, 4, … ranks.
`stored`: the same 1,024 frames on top of 10⁴, 10⁵, … frames that were put there by the database itself. `series`:
`GET …/series` of 10⁴ points of one signal out of `--most` stored ones. Ends 1 where a cost leaves ±20 % of its first or
the series takes more than 100 ms at p95; the table comes last.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from sqlalchemy import text

from benchmarks.ingest.load import bodies, quantile_ms, record
from benchmarks.ingest.stages import measured, open_stages
from benchmarks.latency.databases import database
from foreshock.stats.record import PairRecord
from foreshock_service.heap import settle
from foreshock_service.store.engine import Store

FRAMES = 16
NEAR = 0.2
SERIES_P95_MS = 100.0
SIGNALS = 100
"""Values a stored point holds, for the series."""


def work_of(pair: PairRecord, runs: int, ranks: int, envelopes: int, name: str, frames: int = FRAMES) -> list[bytes]:
    """Envelopes of every rank of every run, turn by turn."""
    clients = [
        list(bodies(pair, f"bench/{name}{run}", rank, ranks, frames, envelopes))
        for run in range(runs)
        for rank in range(ranks)
    ]
    return [body for turn in zip(*clients, strict=True) for body in turn]


def over(kind: str, what: str, most: int) -> list[dict[str, Any]]:
    """One row for each number of runs or ranks up to `most`, a fresh database each, steps evaluated as they come.

    Runs have 8 ranks that post one frame each a step; with ranks, envelopes of 16 frames come of each.
    """
    pair, found = record(), []
    sizes = [n for n in ((1, 10, 100, 1000) if what == "runs" else (1, 4, 16, 64, 256)) if n <= most]
    for size in sizes:
        runs, ranks, frames = (size, 8, 1) if what == "runs" else (1, size, FRAMES)
        rounds = max(2, 64 // runs) if what == "runs" else max(1, 256 // (FRAMES * ranks))
        with database(kind) as url, open_stages(url, pair) as stages:
            settle()
            work = work_of(pair, runs, ranks, rounds + 1, "r", frames)
            each = runs * ranks
            measured(stages, work[:each], ranks)  # the runs' first step makes them
            costs = [measured(stages, work[n : n + each], ranks) for n in range(each, len(work), each)]
            mean = {name: round(sum(c[name] for c in costs) / len(costs), 1) for name in costs[0]}
            found.append({what: size, "frames": rounds * each * frames, **mean})
    return found


def stored(kind: str, most: int) -> list[dict[str, Any]]:
    """One row for each power of ten of stored frames up to `most`; the bulk belongs to the run that goes on."""
    pair, found, so_far, size = record(), [], 0, 10_000
    with database(kind) as url, open_stages(url, pair) as stages:
        settle()
        first = work_of(pair, 1, 8, 8, "grown")
        measured(stages, first, 8)
        part = 0
        while size <= most:
            _fill(stages.store, size - so_far, so_far)
            so_far, part = size, part + 1
            work = _later(pair, part, size)
            found.append({"stored": size, "frames": len(work) * FRAMES, **measured(stages, work, 8)})
            size *= 10
    return found


def _later(pair: PairRecord, part: int, stored_frames: int) -> list[bytes]:
    """Envelopes of new clients of the grown run, at steps behind all that are stored."""
    first = 10_000_000 * part + stored_frames
    clients = [list(bodies(pair, "bench/grown0", rank, 8, FRAMES, 8, first_step=first)) for rank in range(8)]
    return [body for turn in zip(*clients, strict=True) for body in turn]


def _fill(store: Store, frames: int, before: int) -> None:
    """`frames` more frames of 8 ranks, with evaluated steps and points, copied in the database from one of each."""
    series = "generate_series(CAST(:low AS bigint), CAST(:high AS bigint))"
    if store.dialect == "sqlite":
        series = "(WITH RECURSIVE c(g) AS (SELECT :low UNION ALL SELECT g + 1 FROM c WHERE g < :high) SELECT g FROM c)"
    g = f"{series} AS s(g)" if store.dialect == "postgresql" else f"{series} AS s"
    low = 100_000 + before // 8
    which = {"low": low, "high": low + frames // 8 - 1}
    with store.write(durable=False) as session:
        run = "(SELECT id FROM runs WHERE name = 'bench/grown0')"
        session.execute(
            text(
                "INSERT INTO steps (run_id, attempt, step, first_at, event_at, due_at, reported, expected, flags,"
                " evaluated_at) SELECT run_id, attempt, g, first_at, event_at, due_at, reported, expected, flags,"
                f" evaluated_at FROM steps, {g} WHERE run_id = {run} AND step = 1"
            ),
            which,
        )
        session.execute(
            text(
                f"INSERT INTO frames (run_id, attempt, step, role, rank, client_id, sequence, received_at, event_at,"
                f" flags, body) SELECT run_id, attempt, g, role, rank, client_id, g, received_at, event_at, flags, body"
                f" FROM frames, {g} WHERE run_id = {run} AND step = 1"
            ),
            which,
        )
        session.execute(
            text(
                'INSERT INTO points (run_id, attempt, step, at, "values", missing, worst, evidence, reported, expected,'
                ' segment, bands, flag) SELECT run_id, attempt, g, at, "values", missing, worst, evidence, reported,'
                f" expected, segment, bands, flag FROM points, {g} WHERE run_id = {run} AND step = 1"
            ),
            which,
        )
    if store.dialect == "postgresql":
        with store.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("ANALYZE"))


def series(kind: str, most: int) -> list[dict[str, Any]]:
    """Reads of 10⁴ steps' points of one signal out of `most` values in runs of 10⁵ steps, through the service."""
    import urllib.request

    from benchmarks.ingest.service import service

    steps = 100_000
    runs = max(1, most // (steps * SIGNALS))
    with service(kind, {"FORESHOCK_MAX_SERIES_POINTS": "10000"}) as at:
        store = Store(at.database_url, exclusive=False)
        began = time.perf_counter()
        for run in range(runs):
            _points(store, run, steps)
        filled = time.perf_counter() - began
        if kind == "postgresql":
            with store.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.execute(text("ANALYZE points"))
        store.close()
        taken = []
        for n in range(40):
            low = (n * 7919) % (steps - 10_000)
            asked = f"attempt=1&signal=s.{n % SIGNALS}&from_step={low}&to_step={low + 9_999}&max_points=10000"
            began = time.perf_counter()
            with urllib.request.urlopen(
                f"{at.url}/v1/runs/bench/series{n % runs}/series?{asked}", timeout=60
            ) as answer:
                size = len(answer.read())
            taken.append(time.perf_counter() - began)
        return [
            {"values": runs * steps * SIGNALS, "rows": runs * steps, "filled_s": round(filled, 1), "bytes": size,
             "p50_ms": quantile_ms(taken, 0.5), "p95_ms": quantile_ms(taken, 0.95),
             "database_bytes": at.disk_bytes()}
        ]  # fmt: skip


def _points(store: Store, run: int, steps: int) -> None:
    row = f"array(SELECT random() + 0 * g FROM generate_series(1, {SIGNALS}))" if store.dialect == "postgresql" else (
        f"randomblob({8 * SIGNALS})"
    )  # fmt: skip
    numbers = "generate_series(1, :steps) AS s(g)" if store.dialect == "postgresql" else (
        "(WITH RECURSIVE c(g) AS (SELECT 1 UNION ALL SELECT g + 1 FROM c WHERE g < :steps) SELECT g FROM c) AS s"
    )  # fmt: skip
    with store.write(durable=False) as session:
        session.execute(
            text(
                "INSERT INTO runs (name, project, created_at, last_seen_at, status, verdict, capabilities, settings,"
                " config, labels, rules, attempt, budget) VALUES (:name, 'bench', 1, 1, 'finished', 'healthy', '[]',"
                " '{}', '{}', '{}', '{}', 1, '{}')"
            ),
            {"name": f"bench/series{run}"},
        )
        run_id = session.scalar(text("SELECT id FROM runs WHERE name = :name"), {"name": f"bench/series{run}"})
        session.execute(
            text("INSERT INTO attempts (run_id, ordinal, launch, generation, started_at, reason, expected_ranks)"
                 " VALUES (:run, 1, 'l', 0, 1, 'launch', '{}')"), {"run": run_id}
        )  # fmt: skip
        for position in range(SIGNALS):
            session.execute(
                text("INSERT INTO signals (run_id, position, name) VALUES (:run, :position, :name)"),
                {"run": run_id, "position": position + 1, "name": f"s.{position}"},
            )
        empty = "CAST('{}' AS jsonb)" if store.dialect == "postgresql" else "'{}'"
        session.execute(
            text(
                'INSERT INTO points (run_id, attempt, step, at, "values", missing, worst, evidence, reported, expected,'
                f" segment, bands, flag) SELECT :run, 1, g, 1000 + g, {row}, {empty}, {empty}, {empty}, 8, 8, 0,"
                f" {empty}, false FROM {numbers}"
            ),
            {"run": run_id, "steps": steps},
        )


def judged(rows: list[dict[str, Any]], what: str) -> bool:
    if what == "series":
        return all(row["p95_ms"] <= SERIES_P95_MS for row in rows)
    first = rows[0]["cpu_us"]
    return all(abs(row["cpu_us"] / first - 1) <= NEAR or row["cpu_us"] < first for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["runs", "ranks", "stored", "series"])
    parser.add_argument("--database", choices=["sqlite", "postgresql"], action="append")
    parser.add_argument("--most", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    most = options.most or {"runs": 1000, "ranks": 256, "stored": 1_000_000, "series": 100_000_000}[options.what]
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
