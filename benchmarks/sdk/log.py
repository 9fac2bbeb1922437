"""What `log()` of 30 scalars with `end_step()` costs the training loop, beside trackio's `log` of the same 30.

    python benchmarks/sdk/log.py [--json FILE] [--rounds 1000]

Both take turns in one process, one call each a round, with a pause after each that lets their threads work, as a
training step would. Foreshock sends over real HTTP to a sink in a process of its own; trackio writes its local
database. Also measured: without a service (the no-op), and with a service that refuses connections (everything is
spooled). Exits 1 where the median is not below trackio's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PAUSE_S = 0.003
SCALARS = {f"metric/{i}": 0.1 * i for i in range(20)} | {
    "reward.mean": 0.3, "reward.std": 0.1, "grad.norm": 0.8, "loss": -0.02, "lr": 1e-6, "entropy.mean": 1.1,
    "length.mean": 310.0, "length.max": 512.0, "length.truncated": 0.02, "advantage.mean": 0.0,
}  # fmt: skip


def sink() -> None:
    """Answers every envelope; prints its port first."""
    import msgspec

    from foreshock.wire import Reply
    from foreshock.wire.codec import decode_envelope, encode

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            envelope = decode_envelope(body, encoding=self.headers.get("Content-Encoding", ""))
            self._answer(encode(Reply(acknowledged=envelope.sequence, attempt=1)))

        def do_GET(self) -> None:
            time.sleep(20.0)
            self._answer(msgspec.json.encode({"commands": []}))

        def _answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    print(server.server_address[1], flush=True)
    server.serve_forever()


def contenders(url: str, folder: Path) -> dict[str, Callable[[int], None]]:
    """Named calls, each of one step."""
    import trackio

    import foreshock

    def ours(where: str, name: str) -> Callable[[int], None]:
        monitor = foreshock.init(run=f"bench/{name}", url=where, spool_dir=str(folder / name), finish_s=1.0)

        def step(number: int) -> None:
            monitor.log(SCALARS)
            monitor.end_step(number)

        return step

    trackio.init(project="bench", embed=False)
    return {
        "foreshock": ours(url, "up"),
        "foreshock, service down": ours("http://127.0.0.1:9", "down"),
        "foreshock, no service set": ours("", "off"),
        "trackio": lambda number: trackio.log(SCALARS),
    }


def measure(calls: dict[str, Callable[[int], None]], rounds: int) -> dict[str, dict[str, float]]:
    """Contender → median, p90 and best of its caller's cost in µs."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 20):
        for name, call in calls.items():
            began = time.perf_counter_ns()
            call(number)
            if number >= 20:
                taken[name].append((time.perf_counter_ns() - began) / 1e3)
            time.sleep(PAUSE_S)
    return {
        name: {"median_us": statistics.median(t), "p90_us": statistics.quantiles(t, n=10)[8], "best_us": min(t)}
        for name, t in taken.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--sink", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.sink:
        sink()
        return 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"TRACKIO_DIR": folder, "HF_HUB_OFFLINE": "1", "TRACKIO_DISABLE_TELEMETRY": "1"}
        server = subprocess.Popen([sys.executable, __file__, "--sink"], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        try:
            figures = measure(
                contenders(f"http://127.0.0.1:{int(server.stdout.readline())}", Path(folder)), arguments.rounds
            )
        finally:
            server.kill()
    for name, figure in figures.items():
        print(f"{name:28s}" + "".join(f"  {key} {value:8.1f}" for key, value in figure.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))
    return int(figures["foreshock"]["median_us"] >= figures["trackio"]["median_us"])


if __name__ == "__main__":
    sys.exit(main())
