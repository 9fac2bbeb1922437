"""Carries out accepted commands at a step boundary, on the training loop's own thread.

In a multi-rank host `broadcast` hands the controller's list to every rank at every boundary, so that all ranks carry
out the same commands at the same step; without it only the controller's process does.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Iterator
from logging import getLogger
from typing import Any

import msgspec

from foreshock.control.command import HANDED_OVER, Command, as_detail
from foreshock.control.gathering import Answer, decide, refusal
from foreshock.control.inbox import Inbox, Pending
from foreshock.control.willing import BUILT_IN
from foreshock.guard import HostError
from foreshock.transport.clock import boot_s
from foreshock.wire import commands as wire

_log = getLogger("foreshock")
Handler = Callable[[Command], Any]
Broadcast = Callable[[Any], Any]
Gather = Callable[[Any], list[Any]]
SLICE_S = 1.0
"""A paused controller looks up at least this often; with `broadcast` each time all ranks meet."""


class Executor:
    """`finished(command, state, detail, step)` is told of every command's end."""

    def __init__(
        self,
        inbox: Inbox,
        handlers: dict[str, Handler],
        controller: bool,
        broadcast: Broadcast | None,
        pause_limit_s: float,
        finished: Callable[[wire.Command, str, dict[str, Any], int | None], None],
        objection: Callable[[wire.Command], str] = lambda command: "",
        gather: Gather | None = None,
    ) -> None:
        self.handlers = handlers
        self.follows = False
        """Somebody else decides and fills the inbox (`Monitor.follow`)."""
        self.in_handler = False
        self.paused = False
        self._inbox = inbox
        self._controller = controller
        self._broadcast = broadcast
        self._pause_limit_s = pause_limit_s
        self._finished = finished
        self._objection = objection
        self._gather = gather
        self._manual: deque[Pending] = deque()
        self._step: int | None = None

    def share(self, step: int | None) -> list[Pending]:
        """What is due at this boundary, the same on all ranks; with `broadcast` every rank comes here every time."""
        due = self._due(step) if self._controller or self.follows else []
        if self._broadcast is None:
            return due
        payload = None
        if self._controller:
            commands = [[msgspec.to_builtins(pending.command), pending.expires_s - boot_s()] for pending in due]
            payload = {"commands": commands, "paused": self.paused}
        try:
            received = self._broadcast(payload)
        except Exception as error:
            raise HostError(error) from error
        if not self._controller:
            self.paused = bool(received["paused"])
            now = boot_s()
            due = [Pending(msgspec.convert(c, wire.Command), now + left) for c, left in received["commands"]]
        return self._accepted_by_all(due, step) if self._gather is not None and due else due

    def _accepted_by_all(self, due: list[Pending], step: int | None) -> list[Pending]:
        """Those that every rank accepts; the controller refuses the others. All ranks come here with the same list."""
        assert self._gather is not None
        mine = {pending.command.id: self._objection(pending.command) for pending in due}
        try:
            every = self._gather(mine)
        except Exception as error:
            raise HostError(error) from error
        kept = []
        for pending in due:
            name = pending.command.id
            answers = {rank: Answer(objection=str(said.get(name, ""))) for rank, said in enumerate(every)}
            refused = decide(answers, range(len(every))).refused
            if not refused:
                kept.append(pending)
            elif self._controller:
                self._finished(pending.command, "refused", refusal(refused), step)
        return kept

    def carry_out(self, due: list[Pending], step: int | None) -> None:
        """Runs handlers, in order; commands without a handler for each of their kinds wait for `commands()`."""
        self._step = step
        for pending in due:
            kinds = [action.kind for action in pending.command.actions]
            if all(kind in self.handlers or kind in BUILT_IN for kind in kinds):
                self._run(pending.command, step)
            else:
                self._manual.append(pending)

    def wait_while_paused(self, step: int | None) -> None:
        """Blocks until `resume`, `stop` or the limit; carries out what comes meanwhile. KeyboardInterrupt passes."""
        limit_s = boot_s() + self._pause_limit_s
        while self.paused:
            if self._controller or self._broadcast is None:
                self._inbox.wait(SLICE_S)
                if boot_s() >= limit_s:
                    _log.warning("foreshock: paused for %.0f s, going on", self._pause_limit_s)
                    self.paused = False
            due = self.share(step)
            self.carry_out(due, step)
            if self._manual:
                return  # only the host's own loop can carry these out; it may call end_step or commands() again

    def by_hand(self) -> Iterator[Command]:
        """Yields, action by action, the commands that no handler took. An expired one is refused instead."""
        while self._manual:
            pending = self._manual.popleft()
            if pending.expired:
                self._finished(pending.command, "refused", {"reason": "expired"}, self._step)
                continue
            yield from self._actions_by_hand(pending.command)

    def refuse_rest(self, why: str) -> None:
        """Answers what is still waiting, at the end of the run."""
        for pending in (*self._inbox.take(None), *self._manual):
            self._finished(pending.command, "refused", {"reason": why}, self._step)
        self._manual.clear()

    def _due(self, step: int | None) -> list[Pending]:
        due = []
        for pending in self._inbox.take(step):
            at = pending.command.at_step
            if pending.expired:
                self._finished(pending.command, "refused", {"reason": "expired"}, step)
            elif at is not None and step is not None and at < step:
                self._finished(pending.command, "refused", {"reason": f"step {at} has passed"}, step)
            else:
                due.append(pending)
        return due

    def _run(self, command: wire.Command, step: int | None) -> None:
        details: list[dict[str, Any]] = []
        for index in range(len(command.actions)):
            action = Command(command, index, step)
            try:
                self._act(action)
            except BaseException as error:
                action.failed({"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-2000:]})
                if not isinstance(error, Exception):
                    ended = action.kind == "stop" and isinstance(error, SystemExit)
                    self._finished(command, "done" if ended else "failed", {} if ended else action.detail, step)
                    raise
                _log.warning("foreshock: the handler of %s failed", action.kind, exc_info=error)
            if action.state == HANDED_OVER:
                return
            if action.state != "done":
                done = [command.actions[i].kind for i in range(index)]
                self._finished(command, action.state, action.detail | ({"done_before": done} if done else {}), step)
                return
            details.append(action.detail)
        self._finished(command, "done", _joined(command, details), step)

    def _act(self, action: Command) -> None:
        """Runs one action; leaves it answered. Raises what the handler raises."""
        handler = self.handlers.get(action.kind)
        if action.kind == "pause":
            self.paused = True
        if handler is not None:
            self.in_handler = True
            try:
                result = handler(action)
            finally:
                self.in_handler = False
            action.done(as_detail(result))
        action.done({"paused": self.paused} if action.kind == "pause" else None)
        if action.kind in ("resume", "stop") and action.state == "done":
            self.paused = False
        if action.kind == "pause" and action.state != "done":
            self.paused = False

    def _actions_by_hand(self, command: wire.Command) -> Iterator[Command]:
        details: list[dict[str, Any]] = []

        def answered(action: Command) -> None:
            if action.state != "done":
                self._finished(command, action.state, action.detail, self._step)
                return
            details.append(action.detail)
            if action.kind in ("resume", "stop"):
                self.paused = False
            if len(details) == len(command.actions):
                self._finished(command, "done", _joined(command, details), self._step)

        for index in range(len(command.actions)):
            action = Command(command, index, self._step, answered)
            yield action
            if action.state not in ("", "done"):
                return


def _joined(command: wire.Command, details: list[dict[str, Any]]) -> dict[str, Any]:
    """One action's detail as it is; of several, a list with their kinds."""
    if len(details) == 1:
        return details[0]
    kinds = [action.kind for action in command.actions]
    return {"actions": [{"kind": kind} | detail for kind, detail in zip(kinds, details, strict=True)]}
