"""An HTTP proxy on loopback that misbehaves as it is told: hangs, talks garbage, cuts, delays, repeats, reorders.

It reads whole requests and whole answers, so a misbehaviour strikes between or inside them, at random from a seed.
`mode` may be changed at any time and holds from the next request on.
"""

from __future__ import annotations

import random
import socket
import socketserver
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress

LINGER_RESET = b"\x01\x00\x00\x00\x00\x00\x00\x00"
PATIENCE_S = 60.0
GARBAGE = (
    b"\x00\xff\x13garbage\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\nContent-Type: application/msgpack\r\nContent-Length: 3\r\n\r\n\x93\x01\x02",
    b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\nshort",
    b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: soon\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzzz\r\n",
    b"HTTP/1.1 999 What\r\nContent-Length: 0\r\n\r\n",
)


class Exchange:
    """One request and the ways to deal with it."""

    def __init__(self, proxy: Proxy, client: socket.socket, request: bytes) -> None:
        self.proxy, self.client, self.request = proxy, client, request
        self.random = proxy.random

    def forward(self, request: bytes | None = None) -> bytes:
        """Asks the service; its whole answer. Raises OSError where it does not answer."""
        with socket.create_connection(("127.0.0.1", self.proxy.upstream), 5.0) as service:
            service.settimeout(PATIENCE_S)
            service.sendall(self.request if request is None else request)
            return _message(service)

    def answer(self, data: bytes) -> None:
        """Sends the client `data`."""
        self.client.sendall(data)

    def reset(self) -> None:
        """Breaks the connection; raises ConnectionError, which ends it."""
        self.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_RESET)
        raise ConnectionResetError


def well(exchange: Exchange) -> None:
    """Passes everything on."""
    exchange.answer(exchange.forward())


def hang(exchange: Exchange) -> None:
    """Never answers, until the proxy's mode changes."""
    while exchange.proxy.mode is hang:
        time.sleep(0.05)
    exchange.reset()


def away(exchange: Exchange) -> None:
    """Answers 503, as a balancer does whose service is gone."""
    exchange.answer(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")


def garbage(exchange: Exchange) -> None:
    """Answers with what is no answer, and never asks the service."""
    exchange.answer(exchange.random.choice(GARBAGE))
    raise ConnectionAbortedError  # closed in order, else the client's kernel would throw the garbage away unread


def cut(exchange: Exchange) -> None:
    """Breaks before, inside or after the request reached the service, or inside the answer; sometimes passes it on."""
    where = exchange.random.choice(("before", "inside the request", "before the answer", "inside the answer", "never"))
    if where == "inside the request":
        with suppress(OSError), socket.create_connection(("127.0.0.1", exchange.proxy.upstream), 5.0) as service:
            service.sendall(exchange.request[: len(exchange.request) // 2])
    elif where != "before":
        answer = exchange.forward()
        if where == "never":
            exchange.answer(answer)
            return
        if where == "inside the answer":
            exchange.answer(answer[: len(answer) // 2])
    exchange.reset()


def delay(exchange: Exchange) -> None:
    """Holds the request, then the answer, each for up to a second: often longer than the client waits."""
    time.sleep(exchange.random.uniform(0.0, 1.0))
    answer = exchange.forward()
    time.sleep(exchange.random.uniform(0.0, 1.0))
    exchange.answer(answer)


def repeat(exchange: Exchange) -> None:
    """Delivers each request twice and an older one once more behind it, and the answer twice."""
    first = exchange.forward()
    exchange.forward()
    if b" /v1/ingest " in exchange.request[:64]:
        exchange.forward(exchange.random.choice(exchange.proxy.seen))
        exchange.proxy.seen.append(exchange.request)
    exchange.answer(first)
    exchange.answer(first)


class _Handler(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        proxy = self.server.proxy
        with suppress(OSError):
            while request := _message(self.request):
                if b" /v1/ingest " in request[:64] and not proxy.seen:
                    proxy.seen.append(request)
                mode = proxy.mode
                proxy.did[mode.__name__] += 1
                mode(Exchange(proxy, self.request, request))


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    proxy: Proxy

    def handle_error(self, request: object, client_address: object) -> None:
        """Silent: a broken connection is what it is here for."""


class Proxy:
    """Listens on a port of its own until `close`; `upstream` is the service's port."""

    def __init__(self, upstream: int, mode: Callable[[Exchange], None] = well, seed: int = 0) -> None:
        self.upstream, self.mode = upstream, mode
        self.random = random.Random(seed)
        self.seen: deque[bytes] = deque(maxlen=50)
        self.did: Counter[str] = Counter()
        """mode → requests that met it"""
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.proxy = self
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        """Listens no longer."""
        self.mode = well
        self._server.shutdown()
        self._server.server_close()


def _message(sock: socket.socket) -> bytes:
    """One whole HTTP request or answer with its body by Content-Length; empty at the end of the stream."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = sock.recv(65536)
        if not part:
            return b""
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    length = 0
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            length = int(value)
    while len(body) < length:
        part = sock.recv(65536)
        if not part:
            raise ConnectionError("cut short")
        body += part
    return head + b"\r\n\r\n" + body
