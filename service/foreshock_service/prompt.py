"""uvicorn's HTTP protocol with a bound on how long a request's head may take: it has none of its own (slow loris)."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


def prompt(seconds: float) -> type[HttpToolsProtocol]:
    """The protocol class for `uvicorn.Config(http=…)`: closes a connection whose request's head is late.

    Counted from the connection's start, and from the first byte of each later request; between requests uvicorn's own
    `timeout_keep_alive` holds.
    """

    class Prompt(HttpToolsProtocol):
        _late: asyncio.TimerHandle | None = None
        _inside = False
        """A request's head has begun and not ended."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._late = self.loop.call_later(seconds, transport.close)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            # Heads nearly always come in one piece: then no timer is ever made.
            if self._inside and self._late is None:
                self._late = self.loop.call_later(seconds, self.transport.close)

        def on_message_begin(self) -> None:
            self._inside = True
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._inside = False
            self._in_time()
            super().on_headers_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._in_time()
            super().connection_lost(exc)

        def _in_time(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

    return Prompt
