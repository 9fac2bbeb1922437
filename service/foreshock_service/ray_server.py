"""The application as a Ray Serve deployment: the same app in N replicas, one PostgreSQL, Serve's proxies in front.

Each replica is a service process like any other: its own lifespan, workers and leases. Serve routes, watches and
replaces. Needs the extra `[ray]`.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI

from foreshock_service.app import create_app
from foreshock_service.heap import settle
from foreshock_service.server import KEEP_ALIVE_S, SWITCH_S, StartError, prepare
from foreshock_service.settings import Settings
from foreshock_service.terminal import log_lines

log = logging.getLogger(__name__)

NAME = "foreshock"
"""Of the Serve application and of its deployment."""
ROOM = 1000
"""Requests that a replica takes beside those that wait. Ray's default is 5 for both: five trainers that poll would
shut out every frame."""
HEALTH_PERIOD_S = 5.0
HEALTH_TIMEOUT_S = 30.0
DRAIN_LOOK_S = 0.5
MARGIN_S = 10.0


class Doorman:
    """What Serve and the command line ask of a replica beside requests. Serve adds `app` and runs its lifespan."""

    app: FastAPI

    def check_health(self) -> None:
        """Raises where a worker's thread is dead: Serve then replaces the replica. A database that is away is no
        reason, for the next replica would not have it either."""
        alive = self.app.state.rooms.supervisor.alive()
        dead = [name for name, lives in alive.items() if not lives]
        if dead:
            raise RuntimeError(f"dead workers: {', '.join(dead)}")

    def hush(self) -> None:
        """Answers whoever waits, at once and from now on: else a stop takes as long as the longest long-poll."""
        rooms = self.app.state.rooms
        rooms.stopping = True
        rooms.hub.close()


def application(settings: Settings) -> Any:
    """The Serve application, for `serve.run`. Its settings travel with it, as Ray carries any argument.

    Raises `StartError` for more than one replica on SQLite, which is one process's.
    """
    check(settings)
    from ray import serve

    # Serve lets open requests end before a replica's lifespan does, and kills it when that takes too long.
    settings = settings.model_copy(update={"max_stream_s": min(settings.max_stream_s, max(1.0, settings.max_wait_s))})

    def build() -> FastAPI:
        return _in_replica(settings)

    deployment: Any = serve.deployment(
        serve.ingress(build)(Doorman),
        name=NAME,
        num_replicas=settings.replicas,
        # Long-polls and streams are capped by the service itself, so they never fill a replica.
        max_ongoing_requests=settings.max_waiters + ROOM,
        ray_actor_options={"num_cpus": 1 + (0 if settings.is_sqlite else settings.evaluator_processes)},
        graceful_shutdown_wait_loop_s=DRAIN_LOOK_S,
        graceful_shutdown_timeout_s=settings.max_wait_s + settings.shutdown_s + MARGIN_S,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        logging_config={"enable_access_log": False},  # ours leaves queries out
    )
    return deployment.bind()


def check(settings: Settings) -> None:
    """Raises `StartError` for what Ray could not serve."""
    if settings.is_sqlite and settings.replicas > 1:
        raise StartError(
            f"{settings.replicas} replicas need PostgreSQL: SQLite is held by one process. "
            "Set FORESHOCK_DATABASE_URL=postgresql://…, or ask for one replica"
        )
    if settings.port == 0:
        raise StartError("with --ray the port must be named: every node's proxy listens on the same one")


def _in_replica(settings: Settings) -> FastAPI:
    """The application in a replica's process, which is tuned like that of `foreshock serve`."""
    log_lines(settings.log_level)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    sys.setswitchinterval(SWITCH_S)
    app = create_app(settings)
    settle()
    return app


def deploy(settings: Settings) -> Any:
    """Starts Serve on the cluster where it does not run yet, and the application; returns the deployment's handle once
    every replica is healthy. An application that runs already is replaced, replica by replica."""
    from ray import serve

    serve.start(
        proxy_location="EveryNode",
        http_options={"host": settings.host, "port": settings.port, "keep_alive_timeout_s": KEEP_ALIVE_S},
        logging_config={"enable_access_log": False},
    )
    return serve.run(application(settings), name=NAME, route_prefix="/")


def withdraw(handle: Any, timeout_s: float) -> bool:
    """Ends the application: waiters are answered, queued envelopes stored, leases given back. Serve ends with it where
    no other application is on the cluster. False where replicas had to be left to Serve after `timeout_s`."""
    from ray import serve

    try:
        handle.broadcast("hush").results(timeout_s=5)
    except Exception as error:  # a replica that is gone, or a Ray that has no broadcast: the drain takes longer
        log.warning("waiting requests were not ended early: %s", error)
    serve.delete(NAME, _blocking=False)
    deadline = time.monotonic() + timeout_s
    while NAME in serve.status().applications:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    if not serve.status().applications:
        serve.shutdown()  # type: ignore[no-untyped-call]
    return True


def listen(settings: Settings, say: Callable[[str], None]) -> int:
    """Serves on the cluster at RAY_ADDRESS (or the one of this machine, or a new one) until SIGINT or SIGTERM.

    Returns the exit code; `say` gets the URL once every replica is healthy. Raises `StartError`.
    """
    try:
        import ray
        from ray import serve as _serve  # noqa: F401 - a Ray without Serve is common
    except ImportError as error:
        raise StartError(f'Ray Serve is not installed ({error.name}): pip install "foreshock[ray]"') from None
    check(settings)
    prepare(settings)
    stop = threading.Event()
    try:
        ray.init(ignore_reinit_error=True, logging_level=logging.WARNING)
        handle = deploy(settings)
    except (RuntimeError, ConnectionError, TimeoutError) as error:
        ray.shutdown()
        raise StartError(f"Ray could not serve it: {error}") from None
    # After `init`, which has handlers of its own.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    say(settings.url)
    stop.wait()
    try:
        if not withdraw(handle, settings.max_wait_s + settings.shutdown_s + 2 * MARGIN_S):
            log.warning("replicas did not stop in time; Serve ends them")
    finally:
        ray.shutdown()
    return 0
