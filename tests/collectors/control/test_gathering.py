"""All ranks accept first, or nobody carries it out: among threads with a collective, and as pure decisions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from foreshock.control.gathering import Answer, Outcome, conclude, decide
from foreshock.monitor import Monitor
from foreshock.wire import Action, Command
from tests.fake_service import FakeService

MakeMonitor = Callable[..., Monitor]


def test_the_step_is_the_first_that_no_rank_has_ended() -> None:
    answers = {0: Answer(step=7), 1: Answer(step=8), 2: Answer(step=7)}
    assert decide(answers, range(3)) == ({}, 9)
    assert decide(answers, range(3), at_step=12) == ({}, 12)
    assert decide(answers, range(3), at_step=3) == ({}, 9)
    assert decide({0: Answer(), 1: Answer()}, range(2)) == ({}, None)
    paused = {0: Answer(step=7, paused=True), 1: Answer(step=7, paused=True)}
    assert decide(paused, range(2)) == ({}, None), "paused ranks pass no boundary"


def test_one_objection_or_one_silence_refuses_for_all() -> None:
    answers = {0: Answer(step=7), 2: Answer(objection="no such file")}
    assert decide(answers, range(3)).refused == {2: "no such file"}, "an objection decides before all have answered"
    assert decide({0: Answer(step=7), 2: Answer(step=7)}, range(3)).refused == {1: "did not answer"}


def test_it_is_done_where_every_rank_has_done_it() -> None:
    done = {0: Outcome(state="done", detail={"lr": 1}, step=9), 1: Outcome(state="done", detail={"lr": 1}, step=9)}
    assert conclude(done, range(2)) == Outcome(state="done", detail={"lr": 1}, step=9)
    unlike = done | {1: Outcome(state="done", detail={"lr": 2}, step=9)}
    assert conclude(unlike, range(2)).detail == {"ranks": {"0": {"lr": 1}, "1": {"lr": 2}}}
    half = {0: done[0], 1: Outcome(state="failed", detail={"error": "x"})}
    assert conclude(half, range(2)).state == "failed"
    assert conclude({0: done[0]}, range(2)).detail["ranks"]["1"]["state"] == "lost"
    assert conclude({0: Outcome(state="refused"), 1: Outcome(state="refused")}, range(2)).state == "refused"


class Collectives:
    """Broadcast and all-gather among threads."""

    def __init__(self, world: int) -> None:
        self._barrier = threading.Barrier(world, timeout=20.0)
        self._objects: list[Any] = [None] * world

    def broadcast(self, rank: int) -> Callable[[Any], Any]:
        return lambda value: self._all(rank, value)[0]

    def gather(self, rank: int) -> Callable[[Any], list[Any]]:
        return lambda value: self._all(rank, value)

    def _all(self, rank: int, value: Any) -> list[Any]:
        self._objects[rank] = value
        self._barrier.wait()
        everyone = list(self._objects)
        self._barrier.wait()
        return everyone


def test_a_rank_that_objects_keeps_all_of_them_from_it(service: FakeService, make_monitor: MakeMonitor) -> None:
    world, ran = 3, []
    together = Collectives(world)
    monitors = [
        make_monitor(rank=rank, world=world, broadcast=together.broadcast(rank), gather=together.gather(rank))
        for rank in range(world)
    ]
    for rank, monitor in enumerate(monitors):
        monitor.on(
            "rollback",
            lambda command, rank=rank: ran.append((rank, command.id)),
            accepts=lambda arguments, rank=rank: "not on this node" if (rank, arguments) == (2, {"step": 3}) else "",
        )
    monitors[0].notice("note", text="so that the attempt is known")

    def issue(name: str, step: int) -> None:
        service.wait_for(lambda: monitors[0]._process.acceptance.attempt == 1)  # type: ignore[union-attr]
        action = Action(kind="rollback", arguments={"step": step})
        with service.changed:
            service.commands = [Command(id=name, run="lab/x", attempt=1, actions=[action])]
        service.wait_for(lambda: len(monitors[0]._process.inbox) == 1)

    def loop(rank: int) -> None:
        for step in range(4):
            if rank == 0 and step in (1, 2):
                issue(f"c{step}", 3 if step == 1 else 4)
            monitors[rank].end_step(step)

    threads = [threading.Thread(target=loop, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40.0)
        assert not thread.is_alive(), "a rank waits for ever"
    assert sorted(ran) == [(rank, "c2") for rank in range(world)]
    service.wait_for(lambda: ("c1", "refused") in [(name, ack.state) for name, ack in service.acks])
    refused = next(ack for name, ack in service.acks if (name, ack.state) == ("c1", "refused"))
    assert refused.detail == {"reason": "not all ranks accept", "ranks": {"2": "not on this node"}}
