"""CPU a frame costs the service, stage by stage, in one process and thread: where the next microsecond is to be found.

    python -m benchmarks.ingest.stages [--database sqlite|postgresql] [--envelopes 256] [--frames 16] [--profile STAGE]

The stages are the service's own: `decode` (bytes → checked envelope), `store` (group commits of eight envelopes),
`evaluate` (every due step through the shipped rules). PostgreSQL's own CPU is given beside it. `--profile` prints
cProfile's shares of one stage instead of trusting anyone's guess.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from benchmarks.ingest.load import bodies, record
from benchmarks.latency.databases import database
from foreshock.wire.codec import decode_envelope
from foreshock_service.alerts.outbox import Outbox
from foreshock_service.commands.limits import Limits
from foreshock_service.heap import settle
from foreshock_service.ingest.arrivals import Arrival
from foreshock_service.ingest.checks import IngestLimits, check_envelope
from foreshock_service.ingest.group import store_group
from foreshock_service.introductions import Engines, evaluator_rooms, ingest_hooks
from foreshock_service.rules.pack import PackFile
from foreshock_service.store import migrate
from foreshock_service.store.engine import Store
from foreshock_service.workers.evaluator import Evaluator
from foreshock_service.workers.hub import Hub

RANKS, GROUP = 8, 8
TICKS = os.sysconf("SC_CLK_TCK")


def postgres_cpu_s() -> float:
    """CPU seconds of all PostgreSQL processes of this machine that are still alive."""
    total = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
                head, _, tail = file.read().rpartition(")")
        except OSError:
            continue
        if "(postgres" in head:
            fields = tail.split()
            total += int(fields[11]) + int(fields[12])
    return total / TICKS


@contextmanager
def stage(name: str, frames: int, profiled: str) -> Iterator[None]:
    """Prints what the block cost a frame."""
    profiler = cProfile.Profile(time.process_time) if profiled == name else None
    theirs, mine, wall = postgres_cpu_s(), time.process_time(), time.perf_counter()
    if profiler:
        profiler.enable()
    yield
    if profiler:
        profiler.disable()
    mine, wall, theirs = time.process_time() - mine, time.perf_counter() - wall, postgres_cpu_s() - theirs
    print(
        f"{name:9s} {1e6 * mine / frames:8.1f} µs CPU a frame, {1e6 * wall / frames:8.1f} µs wall,"
        f" {1e6 * theirs / frames:8.1f} µs in PostgreSQL"
    )
    if profiler:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(45)


def measure(kind: str, envelopes: int, frames: int, runs: int, profiled: str) -> None:
    """All three stages over `envelopes` of each of `runs` × 8 ranks."""
    pair = record()
    clients = [
        list(bodies(pair, f"bench/{run}", rank, RANKS, frames, envelopes))
        for run in range(runs)
        for rank in range(RANKS)
    ]
    work = [body for turn in zip(*clients, strict=True) for body in turn]
    total = len(work) * frames
    print(f"{kind}: {total} frames in envelopes of {frames}, {len(work[0]) // frames} bytes a frame, {runs} runs")
    with database(kind) as url:
        store = Store(url)
        migrate.upgrade(store)
        limits = IngestLimits()
        hub = Hub()
        hooks = ingest_hooks(Limits())
        evaluator = Evaluator(store, hub, evaluator_rooms(Engines(PackFile(None)), Limits(), Outbox(())))
        for first in range(2):
            # Statements are compiled and plans prepared once in a service's life.
            warm = [decode_envelope(b) for b in bodies(pair, "bench/warm", first, 2, frames, 4)]
            with store.write() as session:
                store_group(session, [Arrival(e, time.time()) for e in warm], hooks, limits, time.time())
        _drain(evaluator.evaluate_due)
        settle()
        before = evaluator.counts.steps
        with stage("decode", total, profiled):
            decoded = [decode_envelope(body) for body in work]
            for envelope in decoded:
                check_envelope(envelope, limits)
        arrivals = [Arrival(envelope, time.time()) for envelope in decoded]
        with stage("store", total, profiled):
            for first in range(0, len(arrivals), GROUP):
                with store.write() as session:
                    store_group(session, arrivals[first : first + GROUP], hooks, limits, time.time())
        with stage("evaluate", total, profiled):
            _drain(evaluator.evaluate_due)
        steps, failed = evaluator.counts.steps - before, evaluator.counts.failed_steps
        print(f"{steps} of {total // RANKS} steps evaluated, {failed} failed")
        store.close()


def _drain(look: Callable[[], float]) -> None:
    while look() == 0.0:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database", choices=["sqlite", "postgresql"], action="append")
    parser.add_argument("--envelopes", type=int, default=16, help="of each rank")
    parser.add_argument("--frames", type=int, default=16)
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--profile", choices=["decode", "store", "evaluate"], default="")
    options = parser.parse_args()
    for kind in options.database or ["sqlite", "postgresql"]:
        measure(kind, options.envelopes, options.frames, options.runs, options.profile)


if __name__ == "__main__":
    main()
