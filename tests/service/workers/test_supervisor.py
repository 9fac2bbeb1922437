from __future__ import annotations

import threading
import time

import pytest

from foreshock_service.workers import supervisor as module
from foreshock_service.workers.supervisor import Supervisor


class Crashing:
    """Crashes twice, then works until told to stop."""

    name = "crashing"

    def __init__(self) -> None:
        self.starts = 0
        self.working = threading.Event()
        self.finished = False

    def run(self, stop: threading.Event) -> None:
        self.starts += 1
        if self.starts < 3:
            raise OSError("the disk is full")
        self.working.set()
        stop.wait()
        self.finished = True

    def interrupt(self) -> None:
        pass


class Stuck:
    name = "stuck"

    def __init__(self) -> None:
        self.free = threading.Event()

    def run(self, _stop: threading.Event) -> None:
        self.free.wait()

    def interrupt(self) -> None:
        pass


def test_a_worker_that_crashes_is_counted_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESTART_MIN_S", 0.01)
    worker = Crashing()
    supervisor = Supervisor([worker])
    supervisor.start()
    assert worker.working.wait(10)
    assert supervisor.crashes == {"crashing": 2}
    assert supervisor.alive() == {"crashing": True}
    assert supervisor.stop() == []
    assert worker.finished
    assert supervisor.alive() == {"crashing": False}


def test_a_worker_that_does_not_stop_is_named_and_not_waited_for() -> None:
    worker = Stuck()
    supervisor = Supervisor([worker])
    supervisor.start()
    began = time.monotonic()
    assert supervisor.stop(timeout=0.2) == ["stuck"]
    assert time.monotonic() - began < 5.0
    worker.free.set()


def test_it_starts_once() -> None:
    supervisor = Supervisor([])
    supervisor.start()
    supervisor.stop()
    worker = Stuck()
    worker.free.set()
    busy = Supervisor([worker])
    busy.start()
    with pytest.raises(RuntimeError, match="already"):
        busy.start()
    busy.stop()
