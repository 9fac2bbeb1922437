"""Starts and stops the threads of one service process; a worker that crashes is logged, counted and started again."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable
from typing import Protocol

logger = logging.getLogger(__name__)

RESTART_MIN_S = 0.1
RESTART_MAX_S = 10.0
CALM_S = 60.0
"""A worker that ran so long before it crashed starts anew without extra delay."""


class Worker(Protocol):
    """One thread's work. `run` returns once `stop` is set and what it owed is done; `interrupt` wakes it to look."""

    name: str

    def run(self, stop: threading.Event) -> None: ...

    def interrupt(self) -> None: ...


class Supervisor:
    """Runs workers in threads of their own. They stop in the order given: put those that feed others first."""

    def __init__(self, workers: Iterable[Worker]) -> None:
        self._workers = list(workers)
        self._stops = [threading.Event() for _ in self._workers]
        self._threads: list[threading.Thread] = []
        self.crashes: Counter[str] = Counter()

    def start(self) -> None:
        """Starts every worker once."""
        if self._threads:
            raise RuntimeError("already started")
        for worker, stop in zip(self._workers, self._stops, strict=True):
            thread = threading.Thread(
                target=self._keep, args=(worker, stop), name=f"foreshock-{worker.name}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def alive(self) -> dict[str, bool]:
        """Worker → whether its thread lives; for `/readyz`."""
        return {w.name: t.is_alive() for w, t in zip(self._workers, self._threads, strict=False)}

    def stop(self, timeout: float = 10.0) -> list[str]:
        """Stops the workers one after another, letting each finish what it owes; returns those that did not in time."""
        deadline = time.monotonic() + timeout
        late = []
        for worker, stop, thread in zip(self._workers, self._stops, self._threads, strict=False):
            stop.set()
            worker.interrupt()
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                logger.warning("worker %s did not stop in time", worker.name)
                late.append(worker.name)
        return late

    def _keep(self, worker: Worker, stop: threading.Event) -> None:
        delay = RESTART_MIN_S
        while not stop.is_set():
            started = time.monotonic()
            try:
                worker.run(stop)
            except Exception:
                self.crashes[worker.name] += 1
                if time.monotonic() - started > CALM_S:
                    delay = RESTART_MIN_S
                logger.exception("worker %s crashed; again in %.1f s", worker.name, delay)
                stop.wait(delay)
                delay = min(RESTART_MAX_S, delay * 2)
