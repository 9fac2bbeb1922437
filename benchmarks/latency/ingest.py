"""Frames per second through the group writer: envelopes of 16 frames, durable on commit, one writer thread.

    python -m benchmarks.latency.ingest [--seconds 5] [--clients 8] [--frames 16]

Each frame is what a trainer's rank sends: three pairs with sketches and 30 scalars. Decoding is not measured, storing
is: dedupe, attempts, completeness, flags, frames, step rows, commit. No evaluator runs.
"""

from __future__ import annotations

import argparse
import threading
import time
import uuid
from concurrent.futures import Future

import torch

from benchmarks.latency.databases import database
from foreshock.stats.packed import pack
from foreshock.stats.pair import PairAccumulator
from foreshock.stats.record import PairRecord
from foreshock.wire import PROTOCOL, Envelope, Frame, Reply
from foreshock_service.ingest.arrivals import encode_frame
from foreshock_service.ingest.writer import GroupWriter
from foreshock_service.store import migrate
from foreshock_service.store.engine import Store
from foreshock_service.workers.hub import Hub


def record() -> PairRecord:
    """A real record of 8 sequences of 1,024 tokens."""
    generator = torch.Generator().manual_seed(0)
    a = -torch.rand(8, 1024, generator=generator) * 3
    b = a + 0.01 * torch.randn(8, 1024, generator=generator)
    accumulator = PairAccumulator()
    accumulator.observe(a, b, torch.ones(8, 1024))
    accumulator.collect()
    return accumulator.record()


def envelopes(client: str, rank: int, ranks: int, frames: int, count: int, pair: PairRecord) -> list[Envelope]:
    block = pack(pair)
    scalars = {f"scalar.{i}": i / 7 for i in range(30)}
    made = []
    for n in range(count):
        body = [
            Frame(
                sequence=n * frames + i + 1, step=n * frames + i, role="trainer", rank=rank, sealed_s=1.0,
                scalars=scalars, pairs={"policy": block, "mismatch": block, "mismatch_current": block},
            )
            for i in range(frames)
        ]  # fmt: skip
        made.append(
            Envelope(
                protocol=PROTOCOL, client=client, sequence=(n + 1) * frames, run=f"bench/run{rank % 4}", launch="l",
                rank=rank, sent_s=1.0, frames=body, expected_ranks={"trainer": ranks},
            )
        )  # fmt: skip
    return made


def measure(kind: str, seconds: float, clients: int, frames: int) -> None:
    with database(kind) as url:
        store = Store(url)
        migrate.upgrade(store)
        writer = GroupWriter(store, Hub())
        stop = threading.Event()
        thread = threading.Thread(target=writer.run, args=(stop,))
        thread.start()
        pair = record()
        work = [envelopes(uuid.uuid4().hex, rank, clients, frames, 2000, pair) for rank in range(clients)]
        waits: list[float] = []
        began = time.perf_counter()
        loops = [threading.Thread(target=_post, args=(writer, mine, began + seconds, waits)) for mine in work]
        for loop in loops:
            loop.start()
        for loop in loops:
            loop.join()
        took = time.perf_counter() - began
        stop.set()
        writer.interrupt()
        thread.join()
        store.close()
    waits.sort()
    counts = writer.counts
    size = len(encode_frame(work[0][0].frames[0]))
    print(
        f"{kind:10s} {counts.frames / took:8.0f} frames/s  {counts.envelopes / took:6.0f} envelopes/s"
        f"  {counts.envelopes / counts.groups:4.1f} envelopes a commit  {size} bytes a frame"
        f"  submit to durable: p50 {1000 * waits[len(waits) // 2]:.1f} ms,"
        f" p99 {1000 * waits[len(waits) * 99 // 100]:.1f} ms"
    )


def _post(writer: GroupWriter, mine: list[Envelope], until: float, waits: list[float]) -> None:
    """One client as the SDK is: one envelope in flight."""
    for envelope in mine:
        began = time.perf_counter()
        if began > until:
            return
        future: Future[Reply] = writer.submit(envelope)
        future.result(60)
        waits.append(time.perf_counter() - began)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--frames", type=int, default=16)
    options = parser.parse_args()
    for name in ("sqlite", "postgresql"):
        measure(name, options.seconds, options.clients, options.frames)
