"""Inside an engine's own process: what sglang's and vLLM's plugins share. Never raises into the engine.

A plugin is loaded in every process of the engine and returns at once unless FORESHOCK_URL and FORESHOCK_RUN are set and
the launch is known (FORESHOCK_LAUNCH, or Ray's, Slurm's, torchrun's), since an engine under a launch of its own would
begin a new attempt of the run.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from logging import getLogger
from typing import Any

import foreshock
from foreshock import Monitor
from foreshock.adapters.engine_weights import Ask, WeightWatch
from foreshock.frames.identity import launch_id
from foreshock.guard import Guard, guarded

_log = getLogger("foreshock")


def wanted() -> bool:
    """Whether this process is to be watched. Says once why not, where a URL is set."""
    if not os.environ.get("FORESHOCK_URL"):
        return False
    try:
        launch = launch_id(None, os.environ)
    except ValueError:
        launch = ""
    if not os.environ.get("FORESHOCK_RUN") or not launch or launch.startswith("process-"):
        _log.warning("foreshock: the engine is not watched: set FORESHOCK_RUN and FORESHOCK_LAUNCH as for the trainer")
        return False
    return True


class Probe:
    """One engine process. The monitor is made by the first event, in the process that meets it."""

    def __init__(self, engine: str) -> None:
        self.engine = f"{engine}@{socket.gethostname()}/{os.getpid()}"
        self.weights: WeightWatch | None = None
        self.monitor: Monitor | None = None
        self.guard: Guard = Guard(50, False, lambda: None)
        """The monitor's own, once there is one."""

    def start(self, rank: int, world: int, ask: Ask, checksum_share: float = 0.01) -> None:
        """Begins to report, and takes the weights' digests; again it does nothing."""
        if self.weights is not None:
            return
        self.monitor = foreshock.init(
            role="rollout", rank=rank, world=world, expected_ranks={}, controller=False, raise_errors=False
        )
        self.guard = self.monitor.guard
        self.weights = WeightWatch(self.monitor, f"{self.engine}/{rank}", ask, checksum_share)
        self.weights.baseline()

    @guarded()
    def call(self, what: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs `what`; whatever it raises is counted and goes no further."""
        return what(*args, **kwargs)
