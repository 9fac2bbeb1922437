"""Commands, end to end against a real HTTP service: accepted first, executed once, at the boundary, answered."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from foreshock import Command
from foreshock.monitor import Monitor
from foreshock.wire import Action
from foreshock.wire import commands as wire
from foreshock.wire.commands import Ack
from tests.fake_service import FakeService

MakeMonitor = Callable[..., Monitor]


def command(*kinds: str, id: str = "c1", **changes: Any) -> wire.Command:  # noqa: A002
    fields: dict[str, Any] = {"id": id, "run": "lab/x", "attempt": 1, "actions": [Action(kind=kind) for kind in kinds]}
    return wire.Command(**(fields | changes))


def ready(monitor: Monitor, service: FakeService) -> None:
    """The first step is there and the attempt known."""
    monitor.end_step(0)
    service.wait_for(lambda: monitor._process.acceptance is not None and monitor._process.acceptance.attempt == 1)


def queued(monitor: Monitor, service: FakeService, *commands: wire.Command) -> None:
    """Issues commands and waits until they lie in the inbox."""
    with service.changed:
        service.commands.extend(commands)
        service.changed.notify_all()
    service.wait_for(lambda: len(monitor._process.inbox) == len(commands))


def answers(service: FakeService, id: str = "c1") -> list[tuple[str, dict[str, Any]]]:  # noqa: A002
    return [(ack.state, ack.detail) for name, ack in service.acks if name == id]


def test_a_command_is_accepted_then_run_at_the_boundary_then_answered(
    service: FakeService, make_monitor: MakeMonitor
) -> None:
    seen: list[tuple[str, dict[str, Any], int | None, str]] = []

    def scale(asked: Command) -> str:
        seen.append((asked.kind, asked.arguments, asked.step, threading.current_thread().name))
        return "scaled"

    monitor = make_monitor()
    monitor.on("scale_lr", scale)
    ready(monitor, service)
    queued(monitor, service, command("scale_lr", actions=[Action(kind="scale_lr", arguments={"factor": 0.5})]))
    assert answers(service) == [("accepted", {})]
    assert seen == [], "nothing runs before the boundary"
    monitor.end_step(1)
    assert seen == [("scale_lr", {"factor": 0.5}, 1, threading.current_thread().name)]
    service.wait_for(lambda: len(answers(service)) == 2)
    assert answers(service)[1] == ("done", {"text": "scaled"})
    assert service.acks[-1][1].step == 1


def test_actions_run_in_order_and_stop_at_the_first_failure(service: FakeService, make_monitor: MakeMonitor) -> None:
    ran: list[str] = []

    def fail(asked: Command) -> None:
        ran.append(asked.kind)
        raise RuntimeError("digests differ")

    monitor = make_monitor()
    monitor.on("resync_engine", lambda asked: ran.append(asked.kind))
    monitor.on("resync_trainer", fail)
    monitor.on("scale_lr", lambda asked: ran.append(asked.kind))
    ready(monitor, service)
    queued(monitor, service, command("resync_engine", "resync_trainer", "scale_lr"))
    monitor.end_step(1)
    assert ran == ["resync_engine", "resync_trainer"]
    service.wait_for(lambda: len(answers(service)) == 2)
    state, detail = answers(service)[1]
    assert (state, detail["error"], detail["done_before"]) == (
        "failed", "RuntimeError: digests differ", ["resync_engine"],
    )  # fmt: skip


def test_several_actions_answer_with_each_ones_detail(service: FakeService, make_monitor: MakeMonitor) -> None:
    monitor = make_monitor()
    monitor.on("resync_engine", lambda asked: {"checksum": "ab"})
    monitor.on("scale_lr", lambda asked: None)
    ready(monitor, service)
    queued(monitor, service, command("resync_engine", "scale_lr"))
    monitor.end_step(1)
    service.wait_for(lambda: len(answers(service)) == 2)
    expected = {"actions": [{"kind": "resync_engine", "checksum": "ab"}, {"kind": "scale_lr"}]}
    assert answers(service)[1] == ("done", expected)


def test_a_handler_may_refuse(service: FakeService, make_monitor: MakeMonitor) -> None:
    monitor = make_monitor()
    monitor.on("rollback", lambda asked: asked.refused("no such checkpoint"))
    ready(monitor, service)
    queued(monitor, service, command("rollback"))
    monitor.end_step(1)
    service.wait_for(lambda: len(answers(service)) == 2)
    assert answers(service)[1] == ("refused", {"text": "no such checkpoint"})
    assert monitor.generation == 0


def test_without_a_handler_the_loop_gets_it_and_answers(service: FakeService, make_monitor: MakeMonitor) -> None:
    monitor = make_monitor(capabilities=["checkpoint_now"])
    ready(monitor, service)
    queued(monitor, service, command("checkpoint_now"))
    assert list(monitor.commands()) == [], "not before a boundary"
    monitor.end_step(1)
    for asked in monitor.commands():
        asked.done({"path": "/ckpt/1"})
    service.wait_for(lambda: len(answers(service)) == 2)
    assert answers(service)[1] == ("done", {"path": "/ckpt/1"})
    monitor.end_step(2)
    assert list(monitor.commands()) == []


@pytest.mark.parametrize(
    "changes", [{"run": "lab/other"}, {"attempt": 2}, {"actions": []}, {"expires_in_s": 0.0}, {"id": "../../etc"},
                {"actions": [Action(kind="format_disk")]}],
)  # fmt: skip
def test_what_is_not_for_us_is_ignored_and_counted(
    changes: dict[str, Any], service: FakeService, make_monitor: MakeMonitor
) -> None:
    ran: list[Command] = []
    monitor = make_monitor()
    monitor.on("stop", ran.append)
    ready(monitor, service)
    with service.changed:
        service.commands.append(command("stop", **changes))
    service.wait_for(lambda: monitor.losses.counts().get("command_ignored") == 1)
    monitor.end_step(1)
    assert (ran, service.acks) == ([], [])


def test_what_was_not_announced_is_refused(service: FakeService, make_monitor: MakeMonitor) -> None:
    monitor = make_monitor(capabilities=["stop"])
    ready(monitor, service)
    with service.changed:
        service.commands.append(command("rollback"))
    service.wait_for(lambda: answers(service) != [])
    assert answers(service) == [("refused", {"reason": "rollback was not announced"})]
    monitor.end_step(1)
    assert list(monitor.commands()) == []


@pytest.mark.parametrize("status", [404, 409, 410, 503])
def test_no_acceptance_no_execution(status: int, service: FakeService, make_monitor: MakeMonitor) -> None:
    ran: list[Command] = []
    asked: list[str] = []

    def ack_status(_: str, ack: Ack) -> int:
        asked.append(ack.state)
        return status if ack.state == "accepted" else 200

    service.ack_status = ack_status
    monitor = make_monitor()
    monitor.on("stop", ran.append)
    ready(monitor, service)
    with service.changed:
        service.commands.append(command("stop"))
    service.wait_for(lambda: len(asked) >= (3 if status == 503 else 1))
    time.sleep(0.05)
    monitor.end_step(1)
    assert ran == []
    if status == 503:
        service.wait_for(lambda: answers(service) == [("refused", {"reason": "the acceptance was not answered"})])


def test_an_acceptance_whose_answer_was_lost_is_asked_again_and_holds(
    service: FakeService, make_monitor: MakeMonitor
) -> None:
    lost = [True]

    def misbehave(request: Any) -> bool:
        if request.path.endswith("/ack") and lost[0]:
            lost[0] = False
            request.reset()
            return True
        return False

    service.misbehave = misbehave
    ran: list[Command] = []
    monitor = make_monitor()
    monitor.on("stop", ran.append)
    ready(monitor, service)
    queued(monitor, service, command("stop"))
    monitor.end_step(1)
    assert len(ran) == 1


def test_a_command_offered_twice_by_both_ways_runs_once(service: FakeService, make_monitor: MakeMonitor) -> None:
    ran: list[Command] = []
    monitor = make_monitor()
    monitor.on("scale_lr", ran.append)
    ready(monitor, service)
    queued(monitor, service, command("scale_lr"))
    for step in range(1, 6):
        with service.changed:
            service.commands = [command("scale_lr")]
        monitor.end_step(step)
        service.wait_for(lambda step=step: step in service.steps())
    assert len(ran) == 1


def test_an_expired_command_is_never_executed(service: FakeService, make_monitor: MakeMonitor) -> None:
    ran: list[Command] = []
    monitor = make_monitor(capabilities=["checkpoint_now"])
    monitor.on("stop", ran.append)
    ready(monitor, service)
    queued(monitor, service, command("stop", expires_in_s=0.2), command("checkpoint_now", id="c2", expires_in_s=0.4))
    time.sleep(0.25)
    monitor.end_step(1)
    time.sleep(0.2)
    assert list(monitor.commands()) == []
    assert ran == []
    service.wait_for(lambda: len(service.acks) == 4)
    assert answers(service)[1] == ("refused", {"reason": "expired"})
    assert answers(service, "c2")[1] == ("refused", {"reason": "expired"})


def test_at_step_waits_for_its_step_and_a_missed_one_is_refused(
    service: FakeService, make_monitor: MakeMonitor
) -> None:
    ran: list[tuple[str, int | None]] = []
    monitor = make_monitor()
    monitor.on("scale_lr", lambda asked: ran.append((asked.id, asked.step)))
    ready(monitor, service)
    queued(monitor, service, command("scale_lr", at_step=3), command("scale_lr", id="late", at_step=0))
    for step in (1, 2, 3, 4):
        monitor.end_step(step)
    assert ran == [("c1", 3)]
    service.wait_for(lambda: len(answers(service, "late")) == 2)
    assert answers(service, "late")[1] == ("refused", {"reason": "step 0 has passed"})


def test_a_rollback_begins_a_new_attempt_after_its_answer(service: FakeService, make_monitor: MakeMonitor) -> None:
    order: list[str] = []
    monitor = make_monitor()

    def rollback(asked: Command) -> None:
        monitor.new_attempt("rollback")
        order.append("handled")

    monitor.on("rollback", rollback)
    monitor.on("stop", lambda asked: None)
    ready(monitor, service)
    queued(monitor, service, command("rollback"))
    take, ack_status = service.take, service.ack_status

    def taking(envelope: Any) -> Any:
        order.extend(notice.kind for notice in envelope.notices)
        return take(envelope)

    def acking(name: str, ack: Ack) -> int:
        order.append(ack.state)
        return ack_status(name, ack)

    service.take, service.ack_status = taking, acking  # type: ignore[method-assign, assignment]
    monitor.end_step(1)
    monitor.new_attempt("the host says it again")
    service.attempt = 2
    monitor.end_step(1)
    service.wait_for(lambda: len(service.frames()) == 3)
    assert order == ["handled", "done", "attempt"]
    assert [frame.generation for frame in service.frames()] == [0, 0, 1]
    (told,) = service.notices("attempt")
    assert told.data == {"reason": "rollback", "command": "c1"}
    service.wait_for(lambda: monitor._process.acceptance is not None and monitor._process.acceptance.attempt == 2)
    with service.changed:
        service.commands.append(command("stop", id="old", attempt=1))
    service.wait_for(lambda: monitor.losses.counts().get("command_ignored") == 1)


def test_a_pause_blocks_until_resume_and_carries_out_what_comes_meanwhile(
    service: FakeService, make_monitor: MakeMonitor
) -> None:
    ran: list[str] = []
    monitor = make_monitor(capabilities=["pause", "resume"])
    monitor.on("scale_lr", lambda asked: ran.append(asked.kind))
    ready(monitor, service)
    queued(monitor, service, command("pause"))

    def operate() -> None:
        service.wait_for(lambda: ("done", {"paused": True}) in answers(service))
        with service.changed:
            service.commands = [command("scale_lr", id="c2")]
        service.wait_for(lambda: len(answers(service, "c2")) == 2)
        ran.append("still paused")
        with service.changed:
            service.commands = [command("resume", id="c3")]

    operator = threading.Thread(target=operate)
    operator.start()
    monitor.end_step(1)
    ran.append("went on")
    operator.join()
    assert ran == ["scale_lr", "still paused", "went on"]
    service.wait_for(lambda: len(answers(service, "c3")) == 2)


def test_a_pause_ends_with_stop_with_its_limit_and_with_the_keyboard(
    service: FakeService, make_monitor: MakeMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = make_monitor(capabilities=["pause"], pause_limit_s=0.05)
    monitor.on("stop", lambda asked: None)
    ready(monitor, service)
    monkeypatch.setattr("foreshock.control.executor.SLICE_S", 0.02)
    queued(monitor, service, command("pause"))
    monitor.end_step(1)  # the limit
    queued(monitor, service, command("pause", id="c2"), command("stop", id="c3"))
    monitor.end_step(2)  # the stop

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(monitor._process.inbox, "wait", interrupt)
    queued(monitor, service, command("pause", id="c4"))
    with pytest.raises(KeyboardInterrupt):
        monitor.end_step(3)


def test_a_stop_that_exits_is_done_and_an_interrupted_handler_failed(
    service: FakeService, make_monitor: MakeMonitor
) -> None:
    def leave(asked: Command) -> None:
        raise SystemExit(0)

    monitor = make_monitor()
    monitor.on("stop", leave)
    monitor.on("scale_lr", leave)
    ready(monitor, service)
    queued(monitor, service, command("scale_lr", id="c2"))
    with pytest.raises(SystemExit):
        monitor.end_step(1)
    queued(monitor, service, command("stop"))
    with pytest.raises(SystemExit):
        monitor.end_step(2)
    service.wait_for(lambda: len(service.acks) == 4)
    assert answers(service)[1][0] == "done"
    assert answers(service, "c2")[1][0] == "failed"


def test_what_waits_at_the_end_is_refused(service: FakeService, make_monitor: MakeMonitor) -> None:
    monitor = make_monitor(capabilities=["stop"])
    ready(monitor, service)
    queued(monitor, service, command("stop"))
    monitor.finish()
    assert answers(service)[1] == ("refused", {"reason": "the run has ended"})


def test_handlers_registered_after_init_are_announced(service: FakeService, make_monitor: MakeMonitor) -> None:
    monitor = make_monitor(capabilities=["stop"])
    monitor.on("rollback", lambda asked: None)
    monitor.end_step(0)
    service.wait_for(lambda: service.steps() == [0])
    monitor.on("scale_lr", lambda asked: None)
    service.wait_for(lambda: len(service.notices("started")) == 2)
    told = [notice.data["capabilities"] for notice in service.notices("started")]
    assert told == [["rollback", "stop"], ["rollback", "scale_lr", "stop"]]


def test_only_the_controller_asks_and_obeys(service: FakeService, make_monitor: MakeMonitor) -> None:
    monitor = make_monitor(rank=1, world=2, capabilities=["stop"])
    monitor.end_step(0)
    service.wait_for(lambda: service.steps() == [0])
    assert monitor._process.poller is None
    assert not service.envelopes[0].controller
    assert service.envelopes[0].expected_ranks == {"trainer": 2}
