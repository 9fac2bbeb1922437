"""Puts a watch on what the host gave to `wrap`: an engine in this process, an HTTP client, or a server's URL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from foreshock.adapters.engine_asking import Asking
from foreshock.adapters.engine_commands import accept_resync
from foreshock.adapters.engine_http import HttpWatch, Routes
from foreshock.adapters.engine_plain import PlainClient
from foreshock.adapters.engine_watch import EngineWatch


class Inside(Protocol):
    """What watches an engine in this process."""

    def install(self) -> None:
        """Puts the watch on the engine's instance."""


def attach(
    watch: EngineWatch,
    engine: Any,
    inside: Callable[[Any], Inside | None],
    routes: Routes,
    ask: float,
    resync: Callable[[], Any] | None,
) -> EngineWatch:
    """`watch`, put on `engine`. `inside` answers None for what is no engine: a client then, whose `routes` are read.

    Without a service's url nothing is touched. Raises TypeError for an object of no known kind, ValueError for a share
    `ask` outside [0, 1].
    """
    watch.asking = Asking(ask)
    if isinstance(engine, str):
        engine = watch.client = PlainClient(engine)
    if not watch.monitor.enabled:
        return watch
    within = inside(engine)
    if within is not None:
        within.install()
    else:
        watch.http = HttpWatch(watch, routes)
        watch.http.install(engine)
    accept_resync(watch, resync)
    return watch
