"""Runs the application under uvicorn: listens, says where, stops gracefully."""

from __future__ import annotations

import logging
import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType

import uvicorn
from sqlalchemy.exc import SQLAlchemyError

from foreshock_service.app import Unprotected, create_app, open_store
from foreshock_service.heap import settle
from foreshock_service.prompt import prompt
from foreshock_service.rules.pack import PackError, PackFile
from foreshock_service.settings import Settings
from foreshock_service.store.engine import StoreError
from foreshock_service.terminal import log_lines

BACKLOG = 2048
KEEP_ALIVE_S = 75
SWITCH_S = 0.001
"""How long a busy thread keeps the interpreter from one that wants it. A look at health takes it some ten times."""


class StartError(Exception):
    """The service cannot start; the message says why and, where it can, what to do."""


def listen(settings: Settings, say: Callable[[str], None]) -> int:
    """Serves until SIGINT or SIGTERM and returns the exit code. `say` gets the URL once requests are answered.

    Raises `StartError` for what is known before: the database, the rule pack, the port, a missing token.
    """
    prepare(settings)
    door = _bound(settings)
    port = door.getsockname()[1]
    settings = settings.model_copy(update={"port": port})
    server = _Server(
        uvicorn.Config(
            create_app(settings),
            log_config=None,
            access_log=False,  # ours leaves queries and tokens out
            proxy_headers=False,  # who is on loopback is decided by the connection, never by a header
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            http=prompt(settings.request_timeout_s),
            timeout_graceful_shutdown=max(1, round(settings.shutdown_s)),
            lifespan="on",
        ),
        lambda: say(settings.url),
    )
    settle()
    sys.setswitchinterval(SWITCH_S)
    try:
        server.run(sockets=[door])
    finally:
        door.close()
    return 0 if server.started else 3


def prepare(settings: Settings) -> None:
    """Logging as the service's processes want it, the rule pack read and the database migrated. Raises `StartError`."""
    log_lines(settings.log_level)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    try:
        PackFile(settings.rules_path)
        open_store(settings).close()
    except (StoreError, Unprotected, PackError) as error:
        raise StartError(str(error)) from None
    except SQLAlchemyError as error:
        # Its text may hold the connection string.
        raise StartError(f"the database does not answer as it should ({type(error).__name__})") from None
    except OSError as error:
        raise StartError(f"the database cannot be opened: {error}") from None


class _Server(uvicorn.Server):
    """Says when it listens, and wakes the long-polls as soon as it is told to stop."""

    def __init__(self, config: uvicorn.Config, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._say = started

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn's own keeps the signal and raises it again after a graceful stop, whose status would then not be 0.
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._say()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        rooms = getattr(getattr(self.config.app, "state", None), "rooms", None)
        if rooms is not None:
            rooms.hub.close()  # else every stop would wait for the longest long-poll
        await super().shutdown(sockets)


def _bound(settings: Settings) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        door = socket.socket(family, socket.SOCK_STREAM)
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind((settings.host, settings.port))
        door.listen(BACKLOG)
    except OSError as error:
        raise StartError(f"cannot listen on {settings.host} port {settings.port}: {error.strerror or error}") from None
    door.set_inheritable(True)
    return door
