"""The load generator, a process of its own: ranks of training runs that post frames over kept connections.

    python -m benchmarks.ingest.load URL --runs 4 --ranks 8 --frames 16 --seconds 5 [--rate ENVELOPES_PER_S]

Each rank is one client as the SDK is: one envelope in flight. Requests are made before the clock starts. Without
`--rate` each posts as fast as it is answered. Prints one JSON object: counts, seconds, latencies, CPU seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
import uuid
from collections.abc import Iterator
from typing import cast
from urllib.parse import urlsplit

import torch
import uvloop

from foreshock.stats.merge import statistics
from foreshock.stats.packed import pack
from foreshock.stats.pair import PairAccumulator
from foreshock.stats.record import PairRecord
from foreshock.wire import PROTOCOL, Envelope, Frame
from foreshock.wire.codec import encode

SCALARS = {f"metric.{i}": 0.1 * i for i in range(24)} | {
    "reward.mean": 0.3, "grad.norm": 0.8, "loss": -0.02, "lr": 1e-6, "entropy.mean": 1.1, "length.mean": 310.0,
}  # fmt: skip
HEALTH_EVERY_S = 0.05


def record(seed: int = 0) -> PairRecord:
    """A real record of 8 sequences of 1,024 tokens in bf16 noise."""
    generator = torch.Generator().manual_seed(seed)
    a = -torch.rand(8, 1024, generator=generator) * 3
    accumulator = PairAccumulator()
    accumulator.observe(a, a + 0.01 * torch.randn(8, 1024, generator=generator), torch.ones(8, 1024))
    accumulator.collect()
    return accumulator.record()


def values_a_frame(pair: PairRecord) -> int:
    """Figures that one frame brings: 30 scalars and the statistics of two pairs."""
    return len(SCALARS) + 2 * len(statistics(pair).values)


def bodies(
    pair: PairRecord, run: str, rank: int, ranks: int, frames: int, count: int, first_step: int = 0
) -> Iterator[bytes]:
    """`count` encoded envelopes of one client, in order."""
    client, block = uuid.uuid4().hex, pack(pair)
    for n in range(count):
        items = [
            Frame(
                sequence=n * frames + i + 1, step=first_step + n * frames + i, role="trainer", rank=rank, sealed_s=1.0,
                scalars=SCALARS, pairs={"policy": block, "mismatch": block}, step_s=1.0,
            )
            for i in range(frames)
        ]  # fmt: skip
        yield encode(
            Envelope(
                protocol=PROTOCOL, client=client, sequence=(n + 1) * frames, run=run, launch="bench", rank=rank,
                sent_s=1.0, controller=rank == 0, frames=items, expected_ranks={"trainer": ranks},
            )
        )  # fmt: skip


class Connection(asyncio.Protocol):
    """One kept HTTP/1.1 connection, no more than the load needs: on two cores, the generator's CPU is the service's."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = str(parts.hostname), int(parts.port or 80)
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._got = b""

    async def open(self) -> Connection:
        await asyncio.get_running_loop().create_connection(lambda: self, self._host, self._port)
        return self

    def request(self, method: str, path: str, body: bytes = b"", media: str = "application/msgpack") -> bytes:
        """The request as it goes out."""
        head = f"{method} {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: {media}\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def ask(
        self, method: str, path: str, body: bytes = b"", media: str = "application/msgpack"
    ) -> tuple[int, bytes]:
        """Status and body. Raises `ConnectionError` where the connection is lost."""
        return await self.send(self.request(method, path, body, media))

    async def send(self, request: bytes) -> tuple[int, bytes]:
        """`ask` for a request made before."""
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("the connection is closed")
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by their class

    def data_received(self, data: bytes) -> None:
        got = self._got = self._got + data if self._got else data
        end = got.find(b"\r\n\r\n")
        if end < 0 or self._answer is None:
            return
        head = got[:end].lower()
        at = head.find(b"\r\ncontent-length:") + 17
        length = int(head[at : head.find(b"\r\n", at) if head.find(b"\r\n", at) > 0 else end])
        if len(got) >= end + 4 + length:
            self._got = b""
            answer, self._answer = self._answer, None
            if not answer.done():
                answer.set_result((int(head[9:12]), got[end + 4 : end + 4 + length]))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or ConnectionResetError("the connection was closed"))

    async def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Drops the connection without a word, if there is one."""
        if self._transport is not None:
            self._transport.abort()


class Tally:
    """What came of the requests."""

    def __init__(self) -> None:
        self.taken: list[float] = []
        self.refused = 0
        self.health: list[float] = []


async def client(url: str, work: list[bytes], until: float, every_s: float, phase: float, tally: Tally) -> None:
    """Posts its envelopes in order, each `every_s` from its own share `phase` of that on: jobs do not step together.

    A refused envelope is posted again, as the SDK would.
    """
    connection = await Connection(url).open()
    due = time.perf_counter() + phase * every_s
    for request in work:
        while True:
            if time.perf_counter() > until:
                return
            if every_s:
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                due += every_s
            began = time.perf_counter()
            status, _ = await connection.send(request)
            if status == 200:
                tally.taken.append(time.perf_counter() - began)
                break
            tally.refused += 1
            await asyncio.sleep(0.05)


async def look(url: str, run: str, until: float, tally: Tally) -> None:
    """Asks for the run's health while the load goes on."""
    connection = await Connection(url).open()
    while time.perf_counter() < until:
        began = time.perf_counter()
        status, _ = await connection.ask("GET", f"/v1/runs/{run}/health")
        if status == 200:
            tally.health.append(time.perf_counter() - began)
        await asyncio.sleep(HEALTH_EVERY_S)


def quantile_ms(values: list[float], q: float) -> float | None:
    return round(1000 * sorted(values)[min(len(values) - 1, math.ceil(q * len(values)) - 1)], 2) if values else None


async def measure(options: argparse.Namespace) -> dict[str, object]:
    pair = record()
    clients = options.runs * options.ranks
    count = options.most // clients + 1
    names = [f"bench/{options.prefix}{r}" for r in range(options.runs)]
    post = Connection(options.url).request
    work = [
        [post("POST", "/v1/ingest", body) for body in bodies(pair, name, rank, options.ranks, options.frames, count)]
        for name in names
        for rank in range(options.ranks)
    ]
    size = len(next(bodies(pair, names[0], 0, options.ranks, options.frames, 1)))
    tally = Tally()
    every_s = clients / options.rate if options.rate else 0.0
    began, cpu = time.perf_counter(), time.process_time()
    until = began + options.seconds
    await asyncio.gather(
        look(options.url, names[0], until, tally),
        *(client(options.url, w, until, every_s, n / clients, tally) for n, w in enumerate(work)),
    )
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    frames = len(tally.taken) * options.frames
    return {
        "envelopes": len(tally.taken),
        "refused": tally.refused,
        "frames": frames,
        "seconds": round(seconds, 3),
        "frames_per_s": round(frames / seconds, 1),
        "requests_per_s": round(len(tally.taken) / seconds, 1),
        "values_per_s": round(frames * values_a_frame(pair) / seconds),
        "p50_ms": quantile_ms(tally.taken, 0.5),
        "p99_ms": quantile_ms(tally.taken, 0.99),
        "health_p50_ms": quantile_ms(tally.health, 0.5),
        "health_p99_ms": quantile_ms(tally.health, 0.99),
        "wire_bytes_per_frame": round(size / options.frames),
        "load_cpu_s": round(cpu_s, 3),
        "runs": names,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--frames", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rate", type=float, default=0.0, help="envelopes per second of all clients; 0: no pacing")
    parser.add_argument("--most", type=int, default=6000, help="envelopes encoded beforehand")
    parser.add_argument("--prefix", default="run")
    print(json.dumps(uvloop.run(measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
