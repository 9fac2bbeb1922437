"""The loop of `foreshock launch`: starts the job, hears its words and signals, and decides what its end means.

start → run ─┬→ ended with 0, or by a signal that was passed on  → its exit code
             ├→ asked for `stop`                                 → stopped, 0
             ├→ asked for `rollback`                             → stopped, start at the checkpoint
             └→ crashed → wait → start at the newest checkpoint, or its exit code once the budget is spent
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

from foreshock_service.launch.child import Child, adopt_orphans
from foreshock_service.launch.line import Line
from foreshock_service.launch.plan import Plan

FORWARDED: Final = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT,
    signal.SIGWINCH,
)  # fmt: skip
ENDING: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
"""After one of these the job's end is no crash."""
LOOK_S: Final = 0.2


class Supervisor:
    """`run` returns the exit code. Only on the main thread, for signals go there."""

    def __init__(self, command: Sequence[str], plan: Plan, grace_s: float) -> None:
        self._command = command
        self._plan = plan
        self._grace_s = grace_s
        self._line = Line()
        self._child: Child | None = None
        self._ending = False
        self._stop_at: float | None = None
        """When the job that handed a command over is stopped at the latest."""
        self._wake, self._woken = socket.socketpair()

    def run(self) -> int:
        """Supervises to the end. 127 where the command cannot be started at all."""
        adopt_orphans()
        before = self._take_signals()
        try:
            while True:
                words, environment = self._plan.start(self._command, os.environ, self._line.path)
                try:
                    self._child = Child(words, environment)
                except OSError as error:
                    self._say(f"cannot start {words[0]!r}: {error}")
                    return 127
                code = self._watch(self._child)
                if not self._again(self._child, code):
                    stopped = self._plan.command is not None and not self._ending
                    return 0 if stopped else code if code >= 0 else 128 - code
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(-1)
            self._line.close()

    # --- while it runs ---------------------------------------------------------------------------------------------

    def _watch(self, child: Child) -> int:
        """Until the job's first process has ended; its code as Popen has it."""
        while True:
            code = child.code()
            if code is not None:
                self._hear()
                return code
            if self._stop_at is not None and time.monotonic() >= self._stop_at:
                self._stop_at = None
                child.end(self._grace_s)
                continue
            self._wait(LOOK_S)

    def _wait(self, seconds: float) -> None:
        """Sleeps until a signal, a word of the job, or `seconds`."""
        ready, _, _ = select.select([self._woken, self._line.socket], [], [], seconds)
        if self._woken in ready:
            self._woken.recv(4096)
        if self._line.socket in ready:
            self._hear()

    def _hear(self) -> None:
        self._line.serve(self._answer)

    def _answer(self, message: dict[str, Any]) -> dict[str, Any] | None:
        if message.get("leave"):
            if message.get("controller") and self._plan.command is not None:
                self._stop_at = time.monotonic()
            return None
        command = message.get("command")
        if not isinstance(command, dict):
            self._plan.hear(message)
            return None
        new = self._plan.command is None
        answer = self._plan.asked(command)
        if answer["taken"] and new:
            self._say(f"{command.get('kind')} of step {message.get('step')} ({command.get('id')})")
            self._stop_at = time.monotonic() + self._grace_s
        elif not answer["taken"]:
            self._say(f"{command.get('kind')} refused: {answer['reason']}")
        return answer

    # --- when it has ended -----------------------------------------------------------------------------------------

    def _again(self, child: Child, code: int) -> bool:
        """Whether the job is started again; by then nothing of it is left."""
        self._stop_at = None
        command = self._plan.command
        if command is not None and command["kind"] == "rollback" and not self._ending:
            child.end(self._grace_s)
            self._plan.rolled_back()
            assert self._plan.checkpoint is not None
            self._say(f"starting again at {self._plan.checkpoint.path}")
            return True
        if self._ending or command is not None or code in (0, -signal.SIGINT, 128 + signal.SIGINT):
            if code != 0:
                child.end(self._grace_s)
            return False
        child.end(self._grace_s)
        how = f"was ended by signal {-code}" if code < 0 else f"ended with {code}"
        if not self._plan.crashed():
            self._say(f"the job {how}; no restart is left")
            return False
        pause_s = self._plan.pause_s()
        at = self._plan.checkpoint.path if self._plan.checkpoint is not None else "its beginning"
        self._say(f"the job {how}; starting again at {at} in {pause_s:.0f} s")
        until = time.monotonic() + pause_s
        while time.monotonic() < until and not self._ending:
            self._wait(max(0.0, min(LOOK_S, until - time.monotonic())))
        return not self._ending

    # --- signals ---------------------------------------------------------------------------------------------------

    def _take_signals(self) -> dict[signal.Signals, Any]:
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        before = {number: signal.signal(number, self._signalled) for number in FORWARDED}
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        return before

    def _signalled(self, number: int, _: Any) -> None:
        self._ending = self._ending or number in ENDING
        if self._child is not None:
            self._child.signal(number)

    @staticmethod
    def _say(text: str) -> None:
        """On standard error, since standard output is the job's."""
        sys.stderr.write(f"foreshock launch: {text}\n")
        sys.stderr.flush()
