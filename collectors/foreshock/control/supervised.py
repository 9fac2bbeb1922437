"""The job's side of `foreshock launch`: what the job cannot do itself is handed to the process that supervises it.

The launcher leaves a Unix socket in FORESHOCK_LAUNCHER and says in FORESHOCK_LAUNCHER_KINDS what it can carry out. A
message is one line of JSON on a connection of its own. After a restart the environment tells where to go on
(`resumed`), and which command that completes.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from logging import getLogger
from typing import Any, Final, NamedTuple

from foreshock.control.command import Command

_log = getLogger("foreshock")
SOCKET: Final = "FORESHOCK_LAUNCHER"
KINDS: Final = "FORESHOCK_LAUNCHER_KINDS"
LAUNCH: Final = "FORESHOCK_LAUNCH"
RESUME_FROM: Final = "FORESHOCK_RESUME_FROM"
RESUME_STEP: Final = "FORESHOCK_RESUME_STEP"
SKIP_STEPS: Final = "FORESHOCK_SKIP_STEPS"
RESTARTS: Final = "FORESHOCK_RESTARTS"
COMPLETES: Final = "FORESHOCK_COMPLETES"
"""JSON {id, run, attempt, detail} of the command that this launch carries out."""
ANSWER_S: Final = 2.0
"""Longest wait for the launcher's answer."""


class Resumed(NamedTuple):
    """Where this launch goes on. `skip_steps` batches after `step` belong to the steps that were rolled back."""

    checkpoint: str
    step: int | None
    skip_steps: int
    restarts: int


def resumed(environment: Mapping[str, str] | None = None) -> Resumed | None:
    """What `foreshock launch` says of this start; None at the first one, and without a launcher."""
    given = os.environ if environment is None else environment
    if not given.get(RESUME_FROM):
        return None
    step = given.get(RESUME_STEP, "")
    return Resumed(
        given[RESUME_FROM], int(step) if step.isdigit() else None, _count(given, SKIP_STEPS), _count(given, RESTARTS)
    )


def completes(run: str, environment: Mapping[str, str] | None = None) -> dict[str, Any] | None:
    """The command of `run` that this launch carries out: {id, attempt, detail}."""
    given = os.environ if environment is None else environment
    try:
        found = json.loads(given.get(COMPLETES, ""))
        ours = found.get("run") in (None, "", run)
        return found if ours and isinstance(found["id"], str) and isinstance(found["attempt"], int) else None
    except (ValueError, KeyError, TypeError):
        return None


def _count(given: Mapping[str, str], name: str) -> int:
    text = given.get(name, "")
    return int(text) if text.isdigit() else 0


class Launcher:
    """A line to the launcher. Every call is bounded and raises nothing; a launcher that has gone is as none."""

    def __init__(self, path: str, kinds: frozenset[str], controller: bool) -> None:
        self.kinds = kinds
        self.leaving = ""
        """The kind of the command for which this process is to end."""
        self._path = path
        self._controller = controller
        self._hold_s = 0.0
        self._gone = False

    @classmethod
    def found(cls, controller: bool, environment: Mapping[str, str] | None = None) -> Launcher | None:
        """The launcher that supervises this process, if any."""
        given = os.environ if environment is None else environment
        if not given.get(SOCKET):
            return None
        kinds = frozenset(kind for kind in given.get(KINDS, "").split(",") if kind)
        return cls(given[SOCKET], kinds, controller)

    def carry_out(self, command: Command) -> None:
        """A handler: asks the launcher, which may refuse; else this process ends at this boundary."""
        about = {
            "id": command.id,
            "kind": command.kind,
            "arguments": command.arguments,
            "attempt": command.command.attempt,
        }
        answer = self._ask({"command": about, "step": command.step})
        if not answer.get("taken"):
            command.refused(str(answer.get("reason", "no launcher answers")))
            return
        self.leaving = command.kind
        self._hold_s = float(answer.get("hold_s", 60.0))
        if command.kind != "stop":
            command.hand_over()

    def tell(self, **message: Any) -> None:
        """Something that the launcher should know; not answered."""
        if not self._gone:
            self._ask(message, wait=False)

    def leave(self) -> None:
        """Says that this process may be ended, and waits for it; goes on where the launcher does not come."""
        self.tell(leave=True, controller=self._controller)
        until = time.monotonic() + self._hold_s
        while time.monotonic() < until and not self._gone:
            time.sleep(0.1)
        _log.error("foreshock: the launcher did not end this process; training goes on unwatched")

    def _ask(self, message: dict[str, Any], wait: bool = True) -> dict[str, Any]:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
                line.settimeout(ANSWER_S)
                line.connect(self._path)
                line.sendall(json.dumps(message).encode() + b"\n")
                answer = json.loads(line.makefile("rb").readline() or b"{}") if wait else {}
        except (OSError, ValueError, TypeError) as error:
            self._gone = isinstance(error, OSError)
            _log.warning("foreshock: the launcher does not answer: %s", error)
            return {}
        return answer if isinstance(answer, dict) else {}
