"""A worker's side: a thread that listens to the run's Controller, and the waiting at a boundary until it has decided.

The training thread never speaks to the actor. Where the actor is gone the worker trains on, and joins again when there
is one.
"""

from __future__ import annotations

import threading
import time
from logging import getLogger
from typing import Any, Final

import msgspec

from foreshock.control.gathering import Answer, Outcome
from foreshock.control.inbox import Pending
from foreshock.monitor import Monitor
from foreshock.ray.controller import LISTEN_S, NAMESPACE, PATIENCE_S, Controller, actor_name
from foreshock.transport.clock import boot_s
from foreshock.wire import commands as wire

_log = getLogger("foreshock")
ANSWER_S: Final = 15.0
"""Longest wait for the actor's answer."""


def join(*, rank: int, world: int, run: str | None = None, patience_s: float = PATIENCE_S, **arguments: Any) -> Monitor:
    """`foreshock.init` of one worker of a Ray job, which takes its commands from the run's Controller.

    The Controller is started where there is none; start it in the driver, so that no worker's death ends it. Raises
    what `init` raises.
    """
    import foreshock

    monitor = foreshock.init(run=run, rank=rank, world=world, controller=False, **arguments)
    if monitor.enabled:
        told = ("url", "token", "project", "spool_dir", "mode")
        given: dict[str, Any] = {name: arguments[name] for name in told if name in arguments}
        member = Member(monitor, rank, world, patience_s, given)
        monitor.follow(member)
        member.start()
    return monitor


class Member:
    """`foreshock.control.relay.Relay` over a Ray actor."""

    def __init__(self, monitor: Monitor, rank: int, world: int, patience_s: float, arguments: dict[str, Any]) -> None:
        self._monitor = monitor
        self._rank = rank
        self._world = world
        self._patience_s = patience_s
        self._arguments = arguments
        self._decided = threading.Condition()
        self._promised: Pending | None = None
        self._step: int | None = None
        self._ended = 0
        self._actor: Any = None

    def start(self) -> None:
        """Starts the thread."""
        threading.Thread(target=self._run, name="foreshock-ray", daemon=True).start()

    # --- the training thread ---------------------------------------------------------------------------------------

    def hold(self, step: int) -> None:
        """At the end of `step`: waits while a command that this rank accepted is undecided, at most its patience."""
        until = time.monotonic() + self._patience_s + 2 * LISTEN_S
        with self._decided:
            self._step = step
            self._ended += 1
            while self._promised is not None and (left := until - time.monotonic()) > 0:
                self._decided.wait(left)
            self._promised = None

    def finished(self, command: wire.Command, state: str, detail: dict[str, Any], step: int | None) -> None:
        """What became of a command here."""
        if self._actor is not None:
            self._actor.outcome.remote(self._rank, command.id, Outcome(state=state, detail=detail, step=step))

    # --- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s = 0.2
        while self._monitor.enabled:
            try:
                self._listen()
            except Exception as error:
                self._actor = None
                _log.warning("foreshock: the controller of this run does not answer: %r", error)
                time.sleep(pause_s)
                pause_s = min(10.0, 2 * pause_s)

    def _listen(self) -> None:
        """Joins, then listens for as long as the actor answers."""
        import ray

        run = self._monitor.identity.run
        try:
            self._actor = ray.get_actor(actor_name(run), namespace=NAMESPACE)
        except ValueError:
            self._actor = Controller.start(run, self._world, patience_s=self._patience_s, **self._arguments)
        told = sorted(self._monitor.kinds())
        seen = ray.get(self._actor.join.remote(self._rank, told), timeout=ANSWER_S)
        while self._monitor.enabled:
            if told != sorted(self._monitor.kinds()):
                told = sorted(self._monitor.kinds())
                ray.get(self._actor.join.remote(self._rank, told), timeout=ANSWER_S)
            seen, messages = ray.get(self._actor.listen.remote(self._rank, seen, self._ended), timeout=ANSWER_S)
            for message in messages:
                self._hear(message)

    def _hear(self, message: dict[str, Any]) -> None:
        if "ask" in message:
            self._asked(msgspec.convert(message["ask"], wire.Command), float(message["left_s"]))
        elif "abort" in message:
            self._settle(message["abort"], None)
        elif "go" in message:
            self._settle(message["go"], message)

    def _asked(self, command: wire.Command, left_s: float) -> None:
        objection = self._monitor.willing.objection(command)
        with self._decided:
            if not objection and self._monitor._process.inbox.claim(command.id):
                self._promised = Pending(command, boot_s() + left_s)
            answer = Answer(objection=objection, step=self._step, paused=self._monitor.paused)
        self._actor.answer.remote(self._rank, command.id, answer)

    def _settle(self, command: str, go: dict[str, Any] | None) -> None:
        with self._decided:
            pending, self._promised = self._promised, None
            if go is not None and pending is not None and pending.command.id == command:
                at = msgspec.structs.replace(pending.command, at_step=go["at_step"])
                self._monitor._process.inbox.put(Pending(at, pending.expires_s))
                pending = None
            elif go is not None:
                outcome = Outcome(state="refused", detail={"reason": "the decision came too late"})
                self._actor.outcome.remote(self._rank, command, outcome)
            self._decided.notify_all()
