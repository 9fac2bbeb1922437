"""CPU a frame costs the service, stage by stage, in one process and thread: where the next microsecond is to be found.

    python -m benchmarks.ingest.stages [--database sqlite|postgresql] [--envelopes 256] [--frames 16] [--profile STAGE]

The stages are the service's own: `decode` (bytes → checked envelope), `store` (group commits of `--group` envelopes),
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
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from benchmarks.ingest.load import bodies, record
from benchmarks.latency.databases import database
from foreshock.stats.record import PairRecord
from foreshock.wire import Envelope
from foreshock.wire.codec import decode_envelope
from foreshock_service.alerts.outbox import Outbox
from foreshock_service.commands.limits import Limits
from foreshock_service.heap import settle
from foreshock_service.ingest.arrivals import Arrival
from foreshock_service.ingest.checks import IngestLimits, check_envelope
from foreshock_service.ingest.group import store_group
from foreshock_service.ingest.hooks import Hooks
from foreshock_service.ingest.steps import Seen
from foreshock_service.introductions import Engines, evaluator_rooms, ingest_hooks
from foreshock_service.rules.pack import PackFile
from foreshock_service.store import migrate
from foreshock_service.store.engine import Store
from foreshock_service.store.retention import ensure_partitions
from foreshock_service.workers.evaluator import Evaluator
from foreshock_service.workers.hub import Hub

RANKS, GROUP = 8, 8
"""Ranks a step, and envelopes a group: single frames come in groups of 20 to 40 (`--group 32`)."""
TICKS = os.sysconf("SC_CLK_TCK")


def postmaster_of(url: str) -> int | None:
    """The process id of a private server (`benchmarks.latency.databases`); None for any other database."""
    folder = parse_qs(urlsplit(url).query).get("host", [""])[0]
    try:
        return int(Path(folder, "data", "postmaster.pid").read_text(encoding="utf-8").split()[0])
    except (OSError, ValueError, IndexError):
        return None


def postgres_cpu_s(postmaster: int | None) -> float:
    """CPU seconds of a server and all its processes, those that have ended too; 0 where there is none."""
    if postmaster is None:
        return 0.0
    ticks = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if int(pid) == postmaster:
            ticks += sum(map(int, fields[11:15]))
        elif int(fields[1]) == postmaster:
            ticks += sum(map(int, fields[11:13]))
    return ticks / TICKS


@dataclass
class Stages:
    """A store, an evaluator with the shipped rules, warm: statements are compiled once in a service's life."""

    store: Store
    evaluator: Evaluator
    hooks: Hooks
    limits: IngestLimits
    seen: Seen
    postmaster: int | None


@contextmanager
def open_stages(url: str, pair: PairRecord) -> Iterator[Stages]:
    """The stages on an empty database, after a few frames of a run of their own."""
    store = Store(url)
    migrate.upgrade(store)
    with store.write() as session:
        ensure_partitions(session, time.time())
    rooms = evaluator_rooms(Engines(PackFile(None)), Limits(), Outbox(()))
    stages = Stages(
        store, Evaluator(store, Hub(), rooms), ingest_hooks(Limits()), IngestLimits(), Seen(), postmaster_of(url)
    )
    for rank in range(2):
        _store(stages, [decode_envelope(body) for body in bodies(pair, "bench/warm", rank, 2, 16, 4)])
    _drain(stages.evaluator.evaluate_due)
    yield stages
    store.close()


def _store(stages: Stages, envelopes: list[Envelope], group: int = GROUP) -> None:
    arrivals = [Arrival(envelope, time.time()) for envelope in envelopes]
    for first in range(0, len(arrivals), group):
        with stages.store.write() as session:
            some = arrivals[first : first + group]
            store_group(session, some, stages.hooks, stages.limits, time.time(), stages.seen)


@dataclass
class Cost:
    """CPU, wall and PostgreSQL's CPU, in µs a frame."""

    cpu: float = 0.0
    wall: float = 0.0
    postgres: float = 0.0


@contextmanager
def stage(name: str, frames: int, profiled: str, postmaster: int | None) -> Iterator[Cost]:
    """What the block costs a frame, filled in when it ends."""
    profiler = cProfile.Profile(time.process_time) if profiled == name else None
    cost = Cost()
    theirs, mine, wall = postgres_cpu_s(postmaster), time.process_time(), time.perf_counter()
    if profiler:
        profiler.enable()
    yield cost
    if profiler:
        profiler.disable()
    cost.cpu = 1e6 * (time.process_time() - mine) / frames
    cost.wall = 1e6 * (time.perf_counter() - wall) / frames
    cost.postgres = 1e6 * (postgres_cpu_s(postmaster) - theirs) / frames
    if profiler:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(45)


def measured(stages: Stages, work: list[bytes], ranks: int, profiled: str = "", group: int = GROUP) -> dict[str, float]:
    """All three stages over `work`: µs of CPU a frame of each, their sum, and PostgreSQL's."""
    envelopes: list[Envelope] = []
    frames = sum(len(decode_envelope(body).frames) for body in work)
    with stage("decode", frames, profiled, stages.postmaster) as decoding:
        for body in work:
            envelope = decode_envelope(body)
            check_envelope(envelope, stages.limits)
            envelopes.append(envelope)
    with stage("store", frames, profiled, stages.postmaster) as storing:
        _store(stages, envelopes, group)
    before = stages.evaluator.counts.steps
    with stage("evaluate", frames, profiled, stages.postmaster) as evaluating:
        _drain(stages.evaluator.evaluate_due)
    evaluated = stages.evaluator.counts.steps - before
    if evaluated * ranks != frames:
        raise SystemExit(f"{evaluated} steps of {ranks} ranks evaluated out of {frames} frames")
    costs = {"decode": decoding, "store": storing, "evaluate": evaluating}
    return {
        **{f"{name}_us": round(cost.cpu, 1) for name, cost in costs.items()},
        "cpu_us": round(sum(cost.cpu for cost in costs.values()), 1),
        "postgres_us": round(sum(cost.postgres for cost in costs.values()), 1),
        "wall_us": round(sum(cost.wall for cost in costs.values()), 1),
    }


def measure(kind: str, envelopes: int, frames: int, runs: int, profiled: str, group: int) -> None:
    """Prints the stages' costs over `envelopes` of each of `runs` × 8 ranks."""
    pair = record()
    clients = [
        list(bodies(pair, f"bench/{run}", rank, RANKS, frames, envelopes))
        for run in range(runs)
        for rank in range(RANKS)
    ]
    work = [body for turn in zip(*clients, strict=True) for body in turn]
    with database(kind) as url, open_stages(url, pair) as stages:
        settle()
        found = measured(stages, work, RANKS, profiled, group)
    print(
        f"{kind}, {len(work) * frames} frames of {len(work[0]) // frames} bytes in envelopes of {frames}, µs a frame:"
    )
    print("  " + ", ".join(f"{name.removesuffix('_us')} {us}" for name, us in found.items()))


def _drain(look: Callable[[], float]) -> None:
    while look() == 0.0:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database", choices=["sqlite", "postgresql"], action="append")
    parser.add_argument("--envelopes", type=int, default=16, help="of each rank")
    parser.add_argument("--frames", type=int, default=16)
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--group", type=int, default=GROUP, help="envelopes of one transaction")
    parser.add_argument("--profile", choices=["decode", "store", "evaluate"], default="")
    options = parser.parse_args()
    for kind in options.database or ["sqlite", "postgresql"]:
        measure(kind, options.envelopes, options.frames, options.runs, options.profile, options.group)


if __name__ == "__main__":
    main()
