"""Many ranks, one decision: with `broadcast` all carry out the same commands at the same step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from foreshock.monitor import Monitor
from foreshock.wire import Action, Command
from tests.fake_service import FakeService

MakeMonitor = Callable[..., Monitor]
WORLD = 3


class Collective:
    """A broadcast among threads, as a process group's: everybody comes, rank 0's object is everybody's."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(WORLD, timeout=20.0)
        self._object: Any = None

    def of(self, rank: int) -> Callable[[Any], Any]:
        def broadcast(value: Any) -> Any:
            if rank == 0:
                self._object = value
            self._barrier.wait()
            received = self._object
            self._barrier.wait()
            return received

        return broadcast


def train(monitors: list[Monitor], steps: int, between: Callable[[int], None] = lambda step: None) -> None:
    def loop(rank: int) -> None:
        for step in range(steps):
            if rank == 0:
                between(step)
            monitors[rank].end_step(step)

    threads = [threading.Thread(target=loop, args=(rank,)) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
        assert not thread.is_alive(), "a rank waits for ever"


def issue(service: FakeService, monitor: Monitor, *commands: Command) -> None:
    service.wait_for(lambda: monitor._process.acceptance is not None and monitor._process.acceptance.attempt == 1)
    with service.changed:
        service.commands = list(commands)
    service.wait_for(lambda: len(monitor._process.inbox) == len(commands))


def asked(kind: str, name: str = "c1") -> Command:
    return Command(id=name, run="lab/x", attempt=1, actions=[Action(kind=kind)])


def test_all_ranks_run_it_at_the_same_step_and_the_controller_answers(
    service: FakeService, make_monitor: MakeMonitor
) -> None:
    collective, ran = Collective(), []
    monitors = [make_monitor(rank=rank, world=WORLD, broadcast=collective.of(rank)) for rank in range(WORLD)]
    for rank, monitor in enumerate(monitors):
        monitor.on("rollback", lambda command, rank=rank: ran.append((rank, command.id, command.step)))
    monitors[0].notice("note", text="so that the attempt is known")

    def between(step: int) -> None:
        if step == 2:
            issue(service, monitors[0], asked("rollback"))

    train(monitors, 5, between)
    assert sorted(ran) == [(rank, "c1", 2) for rank in range(WORLD)]
    assert [monitor.generation for monitor in monitors] == [1, 1, 1]
    service.wait_for(lambda: len(service.acks) == 2)
    assert {ack.client for _, ack in service.acks} == {monitors[0].client}


def test_a_pause_holds_all_ranks_and_resume_frees_them(
    service: FakeService, make_monitor: MakeMonitor, monkeypatch: Any
) -> None:
    monkeypatch.setattr("foreshock.control.executor.SLICE_S", 0.02)
    collective = Collective()
    monitors = [
        make_monitor(rank=rank, world=WORLD, broadcast=collective.of(rank), capabilities=["pause", "resume"])
        for rank in range(WORLD)
    ]
    monitors[0].notice("note", text="so that the attempt is known")

    def operate() -> None:
        service.wait_for(lambda: any(ack.state == "done" for _, ack in service.acks))
        time.sleep(0.1)
        with service.changed:
            service.commands = [asked("resume", "c2")]

    operator = threading.Thread(target=operate)
    operator.start()

    def between(step: int) -> None:
        if step == 1:
            issue(service, monitors[0], asked("pause"))

    train(monitors, 4, between)
    operator.join()
    assert not any(monitor._executor.paused for monitor in monitors)


def test_a_rank_whose_handler_failed_tells_the_service(service: FakeService, make_monitor: MakeMonitor) -> None:
    def fail(command: Any) -> None:
        raise RuntimeError("no memory")

    collective = Collective()
    monitors = [make_monitor(rank=rank, world=WORLD, broadcast=collective.of(rank)) for rank in range(WORLD)]
    for monitor in monitors:
        monitor.on("scale_lr", fail if monitor is monitors[1] else lambda command: None)
    monitors[0].notice("note", text="so that the attempt is known")
    train(monitors, 3, lambda step: issue(service, monitors[0], asked("scale_lr")) if step == 1 else None)
    service.wait_for(lambda: any("failed on this rank" in n.data["text"] for n in service.notices("note")))


def test_a_collector_that_switched_itself_off_still_comes_to_the_meeting(
    service: FakeService, make_monitor: MakeMonitor
) -> None:
    collective = Collective()
    monitors = [make_monitor(rank=rank, world=WORLD, broadcast=collective.of(rank)) for rank in range(WORLD)]
    for monitor in (monitors[0], monitors[2]):
        monitor.guard.off = True
    train(monitors, 3)
