"""LISTEN/NOTIFY between replicas on one PostgreSQL: one thread, one connection of its own, outside the pool.

Words are sent after the commit they tell of, by this thread, so that nobody waits for them: NOTIFY inside a transaction
would serialise all commits of the server. The connection is made anew when it breaks; what was missed meanwhile is
found by the pollers.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import uuid
from collections import deque
from typing import Any

import psycopg

from foreshock_service.store.engine import Store
from foreshock_service.workers.hub import Hub, Word

logger = logging.getLogger(__name__)

NAME = "foreshock"
RETRY_S = 1.0
PENDING = 10_000


class Channel:
    """Carries the hub's words to the other replicas and theirs to the hub. A worker: `run` until the event is set."""

    name = "notify"

    def __init__(self, store: Store, hub: Hub) -> None:
        if store.dialect != "postgresql":
            raise ValueError("only PostgreSQL has other replicas to tell")
        self._conninfo = store.url.set(drivername="postgresql").render_as_string(hide_password=False)
        self._hub = hub
        self._origin = uuid.uuid4().hex[:8]
        self._lock = threading.Lock()
        self._pending: deque[str] = deque(maxlen=PENDING)
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self.connected = threading.Event()
        hub.forward = self.send

    def send(self, word: Word, run_id: int) -> None:
        """Queues a word; never blocks. Repeats of a word that still waits are dropped."""
        payload = f"{word[0]}:{run_id}:{self._origin}"
        with self._lock:
            if payload in self._pending:
                return
            self._pending.append(payload)
        self._wake()

    def _wake(self) -> None:
        try:
            self._wake_write.send(b"x")
        except OSError:  # full: the thread will wake anyway; or closed: nobody sleeps there any more
            return

    def close(self) -> None:
        """Gives the wake-up sockets back, once `run` has returned. Words sent afterwards are dropped."""
        self._hub.forward = None
        self._wake_read.close()
        self._wake_write.close()

    def run(self, stop: threading.Event) -> None:
        """Listens and sends until `stop` is set (then call `interrupt`). Reconnects when the server goes away."""
        while not stop.is_set():
            try:
                with psycopg.connect(self._conninfo, autocommit=True, connect_timeout=10) as connection:
                    connection.execute(f"LISTEN {NAME}")
                    self.connected.set()
                    self._serve(connection, stop)
            except psycopg.Error as error:
                logger.warning("LISTEN connection lost, again in %.0f s: %s", RETRY_S, error)
            finally:
                self.connected.clear()
            stop.wait(RETRY_S if not stop.is_set() else 0)

    def interrupt(self) -> None:
        """Lets `run` see that it shall stop."""
        self._wake()

    def _serve(self, connection: psycopg.Connection[Any], stop: threading.Event) -> None:
        while not stop.is_set():
            ready, _, _ = select.select([connection.fileno(), self._wake_read.fileno()], [], [], 5.0)
            if self._wake_read.fileno() in ready:
                _drain(self._wake_read)
            payloads = self._take_pending()
            if payloads:
                # All in one transaction: each takes the server's one lock on its queue.
                connection.execute("SELECT pg_notify(%s, word) FROM unnest(%s::text[]) AS word", (NAME, payloads))
            for notice in connection.notifies(timeout=0):
                self._hear(notice.payload)

    def _take_pending(self) -> list[str]:
        with self._lock:
            taken = list(self._pending)
            self._pending.clear()
            return taken

    def _hear(self, payload: str) -> None:
        letter, _, rest = payload.partition(":")
        run_id, _, origin = rest.partition(":")
        if origin == self._origin or not run_id.isdigit():
            return
        self._hub.hear("stepped" if letter == "s" else "changed", int(run_id))


def _drain(readable: socket.socket) -> None:
    try:
        while readable.recv(4096):
            pass
    except BlockingIOError:
        return
