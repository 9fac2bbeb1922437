"""The socket on which the job speaks to its launcher: one line of JSON a connection, read without blocking anyone."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from typing import Any, Final

MOST_BYTES: Final = 1 << 16
READ_S: Final = 2.0


class Line:
    """Listens until closed. `answer(message)` gives what is sent back, None: nothing."""

    def __init__(self) -> None:
        # In /tmp, since a socket's path may have no more than some hundred bytes; only we may enter.
        self._folder = tempfile.mkdtemp(prefix="foreshock-launch-")
        self.path = os.path.join(self._folder, "s")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.bind(self.path)
        self.socket.listen(64)
        self.socket.setblocking(False)

    def serve(self, answer: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
        """Takes every connection that waits. What is no message is passed over."""
        while True:
            try:
                connection, _ = self.socket.accept()
            except (BlockingIOError, InterruptedError):
                return
            with connection, contextlib.suppress(OSError, ValueError):
                connection.settimeout(READ_S)
                message = json.loads(connection.makefile("rb").readline(MOST_BYTES))
                said = answer(message) if isinstance(message, dict) else None
                if said is not None:
                    connection.sendall(json.dumps(said).encode() + b"\n")

    def close(self) -> None:
        """Takes the socket away."""
        self.socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)
