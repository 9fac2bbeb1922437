"""A real, tiny HTTP service in this process that takes what the SDK posts, and misbehaves as a test asks."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest

import foreshock
from foreshock.monitor import Monitor
from foreshock.stats.merge import record_of
from foreshock.wire import Envelope, Frame, Notice, Reply
from foreshock.wire.codec import MSGPACK, decode_envelope, encode
from foreshock.wire.commands import Ack, Command
from foreshock.wire.errors import WireError

Misbehaviour = Callable[["Request"], bool]
"""Answers the request in its own way and returns True, or returns False and the service behaves."""


class FakeService:
    """Stores items once per (client, sequence), as the real one does; answers acks; holds commands."""

    def __init__(self, port: int = 0) -> None:
        self.envelopes: list[Envelope] = []
        self.items: dict[tuple[str, int], Frame | Notice] = {}
        self.order: list[tuple[str, int]] = []
        self.last: dict[str, int] = {}
        self.losses: dict[str, dict[str, int]] = {}
        self.acks: list[tuple[str, Ack]] = []
        self.requests = 0
        self.commands: list[Command] = []
        self.attempt: int | None = 1
        self.misbehave: Misbehaviour | None = None
        self.ack_status: Callable[[str, Ack], int] = lambda command, ack: 200
        self.changed = threading.Condition()
        service = self

        class Handler(Request):
            owner = service

        ThreadingHTTPServer.allow_reuse_address = True
        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """As a killed process: nobody listens any more, and kept connections break."""
        self.misbehave = _break
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def wait_for(self, condition: Callable[[], object], seconds: float = 10.0) -> None:
        """Waits until `condition()` holds; fails the test otherwise."""
        deadline = time.monotonic() + seconds
        with self.changed:
            while not condition():
                left = deadline - time.monotonic()
                assert left > 0, "the service never saw it"
                self.changed.wait(min(left, 0.05))

    def frames(self) -> list[Frame]:
        return [item for item in self._in_order() if isinstance(item, Frame)]

    def notices(self, kind: str | None = None) -> list[Notice]:
        return [item for item in self._in_order() if isinstance(item, Notice) and kind in (None, item.kind)]

    def steps(self) -> list[int]:
        return [frame.step for frame in self.frames()]

    def _in_order(self) -> list[Frame | Notice]:
        return [self.items[key] for key in self.order]

    def take(self, envelope: Envelope) -> Reply:
        for frame in envelope.frames:
            frame.pairs = {name: record_of(pair) for name, pair in frame.pairs.items()}
        with self.changed:
            self.envelopes.append(envelope)
            self.losses[envelope.client] = dict(envelope.losses)
            for item in sorted([*envelope.frames, *envelope.notices], key=lambda item: item.sequence):
                if item.sequence > self.last.get(envelope.client, 0):
                    self.last[envelope.client] = item.sequence
                    self.items[envelope.client, item.sequence] = item
                    self.order.append((envelope.client, item.sequence))
            self.changed.notify_all()
            commands = list(self.commands) if envelope.controller else []
            return Reply(acknowledged=self.last.get(envelope.client, 0), attempt=self.attempt, commands=commands)


class Request(BaseHTTPRequestHandler):
    """One request; `owner` is the service."""

    owner: FakeService
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self._serve()

    def do_GET(self) -> None:
        self.body = b""
        self._serve()

    def _serve(self) -> None:
        owner = self.owner
        with owner.changed:
            owner.requests += 1
            owner.changed.notify_all()
        with suppress(ConnectionError, TimeoutError):
            if owner.misbehave is not None and owner.misbehave(self):
                return
            path = urlsplit(self.path).path
            if path == "/v1/ingest":
                self._ingest()
            elif path.endswith("/ack"):
                self._ack(path.split("/")[-2])
            elif path.endswith("/health"):
                self._health()
            else:
                self.answer(404, b"")

    def _ingest(self) -> None:
        try:
            envelope = decode_envelope(
                self.body, self.headers.get("Content-Type", ""), self.headers.get("Content-Encoding", "")
            )
        except WireError as error:
            self.answer(error.status, str(error).encode())
            return
        self.answer(200, encode(self.owner.take(envelope)), MSGPACK)

    def _ack(self, command: str) -> None:
        ack = msgspec.json.decode(self.body, type=Ack)
        status = self.owner.ack_status(command, ack)
        with self.owner.changed:
            if status == 200:
                self.owner.acks.append((command, ack))
                self.owner.commands = [c for c in self.owner.commands if c.id != command]
            self.owner.changed.notify_all()
        self.answer(status, msgspec.json.encode({"state": ack.state}))

    def _health(self) -> None:
        wait = float(parse_qs(urlsplit(self.path).query).get("wait", ["0"])[0])
        with self.owner.changed:
            deadline = time.monotonic() + min(wait, 2.0)
            while not self.owner.commands and time.monotonic() < deadline:
                self.owner.changed.wait(0.05)
            commands = list(self.owner.commands)
        health = {"verdict": "healthy", "attempt": self.owner.attempt, "commands": commands}
        self.answer(200, msgspec.json.encode(health))

    def answer(self, status: int, body: bytes, content_type: str = "application/json", **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def reset(self) -> None:
        """Breaks the connection without an answer."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        self.connection.close()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Silent."""


def _break(request: Request) -> bool:
    request.reset()
    return True


@pytest.fixture
def service() -> Iterator[FakeService]:
    """A well-behaved service until the test says otherwise."""
    fake = FakeService()
    yield fake
    fake.stop()


@pytest.fixture
def make_monitor(service: FakeService, tmp_path: Path) -> Iterator[Callable[..., Monitor]]:
    """Makes monitors against the fake service with short pauses; ends what the test left open."""
    made: list[Monitor] = []

    def make(**arguments: Any) -> Monitor:
        defaults: dict[str, Any] = {
            "run": "lab/x", "url": service.url, "spool_dir": str(tmp_path / "spool"), "launch": "one",
            "timeout_s": 2.0, "backoff_s": 0.02, "backoff_max_s": 0.1, "finish_s": 3.0, "poll_s": 1.0,
        }  # fmt: skip
        monitor = foreshock.init(**(defaults | arguments))
        made.append(monitor)
        return monitor

    yield make
    for monitor in made:
        monitor.end("completed", None, 0.2)
