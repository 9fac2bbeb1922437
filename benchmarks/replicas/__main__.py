"""One, two and three replicas on one PostgreSQL under load; then three, one of them killed and one stopped.

    python -m benchmarks.replicas [--replicas N …] [--no-faults] [--runs 8] [--ranks 4] [--envelopes 20] [--json FILE]

Each replica is a `foreshock serve` of its own. Ranks post in order to the replicas in turn; every run falls ill on the
way. Meanwhile retention drops frames of days past, which are planted again and again, and a reader asks for
down-sampled curves. Faults: SIGKILL of one replica after 30 % of the envelopes, SIGSTOP of another after 40 % until its
leases have long passed to the third. Ends 1 unless all is there exactly once; the table comes last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy.exc import OperationalError

from benchmarks.alerts.sink import Sink
from benchmarks.ingest.load import quantile_ms, record
from benchmarks.ingest.service import Service, serving
from benchmarks.latency.databases import database
from benchmarks.replicas import count
from benchmarks.replicas.load import Job, Tally, accept, drive
from foreshock_service.store.engine import Store
from foreshock_service.store.retention import DAY_S, ensure_partitions

LEASE_S = 2.0
STOPPED_S = 3 * LEASE_S
KILL_AT, STOP_AT = 0.3, 0.4
KEEP_DAYS = 3.0
PLANT_EVERY_S = 3.0
PATIENCE_S = 120.0


class Gardener(threading.Thread):
    """Gives retention something to drop: now and then frames of nobody, of a past day, in a partition of their own.

    Each making and each dropping of a partition holds up all who use the table until those before them are through.
    """

    def __init__(self, database_url: str, done: threading.Event) -> None:
        super().__init__()
        self._url, self._done = database_url, done
        self.planted = 0

    def run(self) -> None:
        """Until `done` is set."""
        store = Store(self._url)
        days = 40
        while not self._done.wait(PLANT_EVERY_S):
            days = max(8, days - 2)
            then = time.time() - days * DAY_S
            with suppress(OperationalError), store.write() as session:  # in use for long: the default one takes them
                ensure_partitions(session, then, ahead=0)
            with psycopg.connect(self._url) as connection:
                self.planted += connection.execute(_planting(connection), {"then": then}).rowcount
        store.close()


def _planting(connection: psycopg.Connection[Any]) -> str:
    query = "SELECT column_name FROM information_schema.columns WHERE table_name = 'frames' ORDER BY ordinal_position"
    names = [row[0] for row in connection.execute(query)]
    given = [{"run_id": "-1", "received_at": "%(then)s"}.get(name, name) for name in names]
    return (
        f"INSERT INTO frames ({', '.join(names)}) SELECT {', '.join(given)} FROM frames WHERE run_id > 0 LIMIT 200"
        " ON CONFLICT DO NOTHING"
    )


def strikes(replicas: Sequence[Service], envelopes: int) -> list[tuple[float, Callable[[], object]]]:
    """Kills the second replica and stops the third, which goes on after `STOPPED_S`."""
    killed, stopped = replicas[1].pid, replicas[2].pid

    def stop() -> None:
        os.kill(stopped, signal.SIGSTOP)
        threading.Timer(STOPPED_S, os.kill, (stopped, signal.SIGCONT)).start()

    return [(KILL_AT * envelopes, lambda: os.kill(killed, signal.SIGKILL)), (STOP_AT * envelopes, stop)]


def run(number: int, jobs: Sequence[Job], faults: bool) -> dict[str, Any]:
    """One round on a fresh database: figures, and which promises were kept."""
    sink = Sink()
    settings = {
        "FORESHOCK_EVALUATOR_PROCESSES": "0", "FORESHOCK_LEASE_S": str(LEASE_S), "FORESHOCK_UPKEEP_S": "1",
        "FORESHOCK_FRAMES_RETENTION_DAYS": str(KEEP_DAYS), "FORESHOCK_WEBHOOK_URL": f"{sink.url}/hook",
        "FORESHOCK_DIGEST_OVER": "1000",
    }  # fmt: skip
    tally, done = Tally(), threading.Event()
    envelopes = sum(job.envelopes * job.ranks for job in jobs)
    with ExitStack() as stack:
        stack.callback(sink.close)
        url = stack.enter_context(database("postgresql"))
        replicas = [stack.enter_context(serving(url, settings)) for _ in range(number)]
        gardener = Gardener(url, done)
        gardener.start()
        tally.strikes = strikes(replicas, envelopes) if faults else []
        began = time.perf_counter()
        try:
            seconds = asyncio.run(drive([at.url for at in replicas], jobs, record(), tally))
        finally:
            done.set()
            gardener.join()
        frames = sum(job.steps * job.ranks for job in jobs)
        _until(lambda: sum(run["steps"] for run in count.per_run(url).values()) >= sum(job.steps for job in jobs))
        evaluated_s = time.perf_counter() - began
        alive = [at for n, at in enumerate(replicas) if not faults or n != 1]
        if faults:
            time.sleep(max(0.0, began + seconds + STOPPED_S - time.perf_counter()))  # it goes on by then
        kept = settle(url, jobs, [at.url for at in alive], sink)
        return {
            "replicas": number, "faults": faults, "frames": frames, "seconds": round(seconds, 2),
            "frames_per_s": round(frames / seconds, 1), "evaluated_per_s": round(frames / evaluated_s, 1),
            "p50_ms": quantile_ms(tally.seconds, 0.5), "p99_ms": quantile_ms(tally.seconds, 0.99),
            "sent_again": tally.sent_again, "reads": tally.reads, "planted": gardener.planted, "kept": kept,
        }  # fmt: skip


def settle(url: str, jobs: Sequence[Job], doors: Sequence[str], sink: Sink) -> dict[str, bool]:
    """Waits for what is still under way, answers the commands, and counts."""
    _until(lambda: len(count.commands(url)) >= len(jobs))
    _until(lambda: sum(body["event"] == count.OPENED for body in sink.bodies()) >= len(jobs))
    asked = count.commands(url)
    for job in jobs:
        if job.name in asked:
            asyncio.run(accept(doors, job, asked[job.name]))
    cut = time.time() - (KEEP_DAYS + 1) * DAY_S  # PostgreSQL drops whole days
    _until(lambda: count.old_frames(url, cut) == 0)
    time.sleep(LEASE_S)  # what would come twice has come by now
    return count.findings(jobs, count.per_run(url), count.accepted(url), sink.bodies(), count.old_frames(url, cut))


def _until(true: Any) -> None:
    """Waits; what did not come is found missing by whoever counts."""
    deadline = time.monotonic() + PATIENCE_S
    while not true() and time.monotonic() < deadline:
        time.sleep(0.1)


def jobs_of(runs: int, ranks: int, frames: int, envelopes: int) -> list[Job]:
    """Jobs that fall ill one after another, between a quarter of their steps and the last ones."""
    steps = frames * envelopes
    return [
        Job(f"bench/run{n}", ranks, frames, envelopes, ill_from=steps // 4 + n * (steps // 2) // max(1, runs))
        for n in range(runs)
    ]


def table(results: Sequence[dict[str, Any]]) -> None:
    print("replicas                   frames  frames/s  evaluated/s  p50 ms  p99 ms  sent again  curves read")
    for one in results:
        name = f"{one['replicas']}, one killed, one stopped" if one["faults"] else str(one["replicas"])
        print(
            f"{name:26s} {one['frames']:6d} {one['frames_per_s']:9.0f} {one['evaluated_per_s']:12.0f}"
            f" {one['p50_ms'] or 0:7.1f} {one['p99_ms'] or 0:7.1f} {one['sent_again']:11d} {one['reads']:12d}"
        )
    for one in results:
        what = f"{one['replicas']}{' with faults' if one['faults'] else ''}, {one['planted']} old frames planted"
        for promise, good in one["kept"].items():
            print(f"{'kept  ' if good else 'BROKEN'} {what}: {promise}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, action="append")
    parser.add_argument("--no-faults", action="store_true")
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--frames", type=int, default=16, help="frames an envelope")
    parser.add_argument("--envelopes", type=int, default=20, help="of each rank")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rounds = [(number, False) for number in options.replicas or (1, 2, 3)] + ([] if options.no_faults else [(3, True)])
    shape = (options.runs, options.ranks, options.frames, options.envelopes)
    results = []
    for number, faults in rounds:
        results.append(run(number, jobs_of(*shape), faults))
        print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    if options.json:
        options.json.write_text(json.dumps({"load_average": os.getloadavg(), "results": results}, indent=1))
    print(f"load average {os.getloadavg()[0]:.1f}")
    table(results)
    return 0 if all(all(one["kept"].values()) for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())
