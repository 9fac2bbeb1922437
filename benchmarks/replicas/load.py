"""Jobs that post to several replicas in turn, each rank one envelope at a time, and fall ill on the way.

A rank that gets no answer within `TIMEOUT_S`, or no 200, sends the same envelope to the next replica, as a load
balancer in front would have it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from benchmarks.ingest.load import SCALARS, Connection
from foreshock.stats.packed import pack
from foreshock.stats.record import PairRecord
from foreshock.wire import PROTOCOL, Ack, Envelope, Frame, Notice
from foreshock.wire.codec import encode

TIMEOUT_S = 3.0
RULE = "non_finite"
KIND = "skip_update"


@dataclass
class Tally:
    """What came of the posts."""

    acknowledged: int = 0
    sent_again: int = 0
    seconds: list[float] = field(default_factory=list)
    reads: int = 0
    strikes: list[tuple[float, Callable[[], object]]] = field(default_factory=list)
    """After so many acknowledged envelopes, in order: what happens then."""


@dataclass
class Job:
    """One run. From step `ill_from` on its gradients are not finite, which asks for one incident and one command."""

    name: str
    ranks: int
    frames: int
    """Of an envelope."""
    envelopes: int
    ill_from: int
    clients: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clients = [uuid.uuid4().hex for _ in range(self.ranks)]

    @property
    def steps(self) -> int:
        return self.frames * self.envelopes

    def bodies(self, rank: int, pair: PairRecord) -> Iterator[bytes]:
        """The rank's envelopes, in order; the controller's first one announces the run."""
        first = 1 if rank == 0 else 0
        for number in range(self.envelopes):
            items = [self._frame(rank, first, number * self.frames + i, pair) for i in range(self.frames)]
            yield encode(
                Envelope(
                    protocol=PROTOCOL, client=self.clients[rank], sequence=first + (number + 1) * self.frames,
                    run=self.name, launch="bench", rank=rank, sent_s=1.0, controller=rank == 0, frames=items,
                    notices=[_started()] if first and number == 0 else [], expected_ranks={"trainer": self.ranks},
                )
            )  # fmt: skip

    def _frame(self, rank: int, first: int, step: int, pair: PairRecord) -> Frame:
        ill = {"grad.nonfinite": 1.0} if step >= self.ill_from else {"grad.nonfinite": 0.0}
        return Frame(
            sequence=first + step + 1, step=step, role="trainer", rank=rank, sealed_s=1.0, scalars=SCALARS | ill,
            pairs={"policy": pack(pair), "mismatch": pack(pair)}, step_s=1.0,
        )  # fmt: skip


def _started() -> Notice:
    data = {"mode": "auto", "capabilities": [KIND], "config": {}, "settings": {}}
    return Notice(sequence=1, kind="started", sealed_s=1.0, data=data, role="trainer", rank=0)


class Doors:
    """One client's kept connections, one a replica, opened when first needed."""

    def __init__(self, urls: Sequence[str], first: int) -> None:
        self._urls = urls
        self._open: dict[str, Connection] = {}
        self._known: set[str] = set()
        """Replicas to which there is a connection."""
        self._turns = itertools.cycle([*urls[first % len(urls) :], *urls[: first % len(urls)]])

    async def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """The next replica's answer. Raises OSError, EOFError or TimeoutError where it gives none."""
        url = next(self._turns)
        connection = self._open.pop(url, None) or Connection(url)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                if url not in self._known:
                    await connection.open()
                    self._known.add(url)
                answer = await connection.ask(method, path, body)
        except BaseException:
            self._known.discard(url)
            connection.abort()
            raise
        self._open[url] = connection
        return answer

    def close(self) -> None:
        """Drops every connection."""
        for connection in self._open.values():
            connection.abort()


async def post(doors: Doors, work: Sequence[bytes], tally: Tally) -> None:
    """One client: its envelopes in order, each until it is acknowledged."""
    for body in work:
        began = time.perf_counter()
        while True:
            try:
                status, _ = await doors.ask("POST", "/v1/ingest", body)
            except (OSError, EOFError, TimeoutError):
                status = 0
            if status == 200:
                tally.acknowledged += 1
                tally.seconds.append(time.perf_counter() - began)
                while tally.strikes and tally.acknowledged >= tally.strikes[0][0]:
                    tally.strikes.pop(0)[1]()
                break
            tally.sent_again += 1
            await asyncio.sleep(0.05)
    doors.close()


async def read(doors: Doors, jobs: Sequence[Job], tally: Tally, done: asyncio.Event) -> None:
    """A page that keeps asking for down-sampled curves."""
    for job in itertools.cycle(jobs):
        with contextlib.suppress(OSError, EOFError, TimeoutError):
            status, _ = await doors.ask("GET", f"/v1/runs/{job.name}/series?signal=grad.nonfinite&max_points=10")
            tally.reads += status == 200
        await asyncio.sleep(0.1)
        if done.is_set():
            break
    doors.close()


async def drive(urls: Sequence[str], jobs: Sequence[Job], pair: PairRecord, tally: Tally) -> float:
    """Every job's frames; seconds until the last one was acknowledged. Bodies are encoded before the clock starts."""
    work = [(job, rank, list(job.bodies(rank, pair))) for job in jobs for rank in range(job.ranks)]
    done = asyncio.Event()
    reader = asyncio.create_task(read(Doors(urls, 0), jobs, tally, done))
    began = time.perf_counter()
    await asyncio.gather(*(post(Doors(urls, n), bodies, tally) for n, (_, _, bodies) in enumerate(work)))
    seconds = time.perf_counter() - began
    done.set()
    await reader
    return seconds


async def accept(urls: Sequence[str], job: Job, command: str) -> None:
    """The controller asks for its command, accepts it at every replica at the same time, and says that it is done."""
    path = f"/v1/commands/{command}/ack"

    async def answer(url: str, state: str) -> None:
        connection = await Connection(url).open()
        body = msgspec.json.encode(Ack(state=state, client=job.clients[0], attempt=1))
        await connection.ask("POST", path, body, "application/json")
        await connection.close()

    connection = await Connection(urls[0]).open()
    await connection.ask("GET", f"/v1/runs/{job.name}/health?client={job.clients[0]}")
    await connection.close()
    await asyncio.gather(*(answer(url, "accepted") for url in urls))
    await answer(urls[0], "done")
