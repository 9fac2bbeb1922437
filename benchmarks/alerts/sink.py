"""A real HTTP server that keeps what it is posted and answers as it is told."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server(ThreadingHTTPServer):
    """Threads of its own; a caller that hung up before the answer came is no error."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says what went wrong, unless it is the connection."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class Sink:
    """`answers` are the next statuses, then 200; `got` holds (path, headers, body). `trouble`, while set, answers."""

    def __init__(self) -> None:
        self.answers: list[int] = []
        self.headers: dict[str, str] = {}
        self.trouble: Callable[[BaseHTTPRequestHandler], None] | None = None
        self.got: list[tuple[str, dict[str, str], bytes]] = []
        sink = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if sink.trouble is not None:
                    sink.trouble(self)
                    return
                sink.got.append((self.path, dict(self.headers), body))
                self.send_response(sink.answers.pop(0) if sink.answers else 200)
                for name, value in sink.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, _, body in self.got]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()
