"""Many simulated runs on one service: each posts a step's frames, rank by rank, at its own beat, with moving values.

One process, a bounded number of kept connections; a client has one envelope in flight. Every frame that was answered
200 is counted, and its sequence never used again.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
import uuid
from dataclasses import dataclass, field

from benchmarks.ingest.load import SCALARS, Connection
from foreshock.stats.packed import pack
from foreshock.stats.record import PairRecord
from foreshock.wire import PROTOCOL, Envelope, Frame
from foreshock.wire.codec import encode

CONNECTIONS = 32


@dataclass
class Tally:
    """What came of the posts: (when, seconds) of each that was taken, and how many were turned away and sent again."""

    taken: list[tuple[float, float]] = field(default_factory=list)
    refused: int = 0
    frames: int = 0


class Run:
    """One run: its ranks' clients, and values that wander as a healthy run's do."""

    def __init__(self, name: str, ranks: int, records: list[PairRecord], seed: int) -> None:
        self.name = name
        self.step = 0
        self._clients = [uuid.uuid4().hex for _ in range(ranks)]
        self._blocks: list[bytes | PairRecord] = list(map(pack, records))
        self._random = random.Random(seed)

    def bodies(self) -> list[bytes]:
        """The next step's envelopes, one a rank."""
        self.step += 1
        wander = 1.0 + 0.05 * math.sin(self.step / 7.0)
        scalars = {name: value * wander * self._random.uniform(0.97, 1.03) for name, value in SCALARS.items()}
        made = []
        for rank, client in enumerate(self._clients):
            pairs = {name: self._random.choice(self._blocks) for name in ("policy", "mismatch")}
            frame = Frame(
                sequence=self.step, step=self.step, role="trainer", rank=rank, sealed_s=1.0, scalars=scalars,
                pairs=pairs, step_s=1.0,
            )  # fmt: skip
            made.append(
                encode(
                    Envelope(
                        protocol=PROTOCOL, client=client, sequence=self.step, run=self.name, launch="soak", rank=rank,
                        sent_s=1.0, controller=rank == 0, frames=[frame],
                        expected_ranks={"trainer": len(self._clients)},
                    )
                )
            )  # fmt: skip
        return made


async def drive(url: str, runs: list[Run], seconds: float, step_s: float, tally: Tally) -> None:
    """Every run makes a step each `step_s` seconds, spread evenly, for `seconds`; late ones follow as fast as taken."""
    due: asyncio.PriorityQueue[tuple[float, int]] = asyncio.PriorityQueue()
    began = time.perf_counter()
    for number in range(len(runs)):
        due.put_nowait((began + step_s * number / len(runs), number))
    until = began + seconds

    async def work() -> None:
        connection = await Connection(url).open()
        while True:
            at, number = await due.get()
            if at > until or time.perf_counter() > until:
                await connection.close()
                return
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            for body in runs[number].bodies():
                await _post(connection, body, tally)
            due.put_nowait((at + step_s, number))

    await asyncio.gather(*(work() for _ in range(min(CONNECTIONS, len(runs)))))


async def _post(connection: Connection, body: bytes, tally: Tally) -> None:
    while True:
        began = time.perf_counter()
        status, _ = await connection.ask("POST", "/v1/ingest", body)
        if status == 200:
            tally.taken.append((began, time.perf_counter() - began))
            tally.frames += 1
            return
        tally.refused += 1
        await asyncio.sleep(0.1)
