"""What the launcher knows and decides: budget, checkpoints, where the next start goes on. No process, no clock."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from foreshock.control import supervised
from foreshock_service.launch.resume import resuming


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """`foreshock launch`'s options. `template` None: this host cannot be told where to go on."""

    template: tuple[str, ...] | None = None
    max_restarts: int = 3
    backoff_s: float = 5.0
    backoff_max_s: float = 300.0
    grace_s: float = 30.0


class Checkpoint(msgspec.Struct, frozen=True):
    """One that the job announced, or that a rollback named."""

    path: str
    step: int | None
    skip_steps: int = 0
    """Batches behind it that were rolled back."""


class Plan:
    """`quarantined()` names the paths that the service quarantined; empty where it does not answer."""

    def __init__(self, options: Options, quarantined: Callable[[str], Collection[str]] = lambda run: ()) -> None:
        self._options = options
        self._quarantined = quarantined
        self._known: list[Checkpoint] = []
        self._decided: dict[str, dict[str, Any]] = {}
        self._launch = os.environ.get(supervised.LAUNCH, "") or f"launch-{uuid.uuid4().hex[:12]}"
        self.run = ""
        self.restarts = 0
        self.command: dict[str, Any] | None = None
        """The command that is being carried out."""
        self.checkpoint: Checkpoint | None = None
        """Where the next start goes on."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """What the launcher announces that it can do."""
        return ("stop",) if self._options.template is None else ("rollback", "stop")

    def hear(self, message: Mapping[str, Any]) -> None:
        """What the job tells: its run, its checkpoints."""
        if isinstance(message.get("run"), str):
            self.run = self.run or message["run"]
        path, step = message.get("checkpoint"), message.get("step")
        if isinstance(path, str) and path:
            self._known = [c for c in self._known if c.path != path]
            self._known.append(Checkpoint(path, step if isinstance(step, int) else None))

    def asked(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a command that the job hands over; the same to every rank that asks."""
        name = str(command.get("id"))
        if name not in self._decided:
            reason = self._objection(command)
            self._decided[name] = {"taken": False, "reason": reason} if reason else {"taken": True}
            if not reason:
                self.command = dict(command)
        hold_s = 2 * self._options.grace_s + 30.0
        return self._decided[name] | {"hold_s": hold_s}

    def _objection(self, command: Mapping[str, Any]) -> str:
        kind = command.get("kind")
        if self.command is not None:
            return f"{self.command['kind']} is being carried out"
        if kind == "stop":
            return ""
        if kind != "rollback" or self._options.template is None:
            return f"the launcher cannot do {kind}"
        if self.restarts >= self._options.max_restarts:
            return f"all {self._options.max_restarts} restarts are spent"
        path = str((command.get("arguments") or {}).get("checkpoint") or "")
        if not _exists(path):
            return f"there is no checkpoint {path!r} on this machine"
        return ""

    def rolled_back(self) -> None:
        """The job has been stopped for a rollback: the next start goes on at its checkpoint; later ones are no more."""
        assert self.command is not None
        arguments = self.command.get("arguments") or {}
        step, until = arguments.get("step"), arguments.get("skip_until_step")
        skip = max(0, until - step) if isinstance(step, int) and isinstance(until, int) else 0
        self.checkpoint = Checkpoint(str(arguments["checkpoint"]), step if isinstance(step, int) else None, skip)
        self._known = [c for c in self._known if c.step is not None and isinstance(step, int) and c.step < step]
        self._known.append(self.checkpoint)
        self.restarts += 1

    def crashed(self) -> bool:
        """Whether to start again after a crash; goes on at the newest checkpoint that is there and not quarantined."""
        self.command = None
        if self.restarts >= self._options.max_restarts:
            return False
        self.restarts += 1
        bad = set(self._quarantined(self.run)) if self.run else set()
        good = [c for c in self._known if c.path not in bad and _exists(c.path)]
        self.checkpoint = good[-1] if good else None
        return True

    def pause_s(self) -> float:
        """How long to wait before a start after a crash."""
        return min(self._options.backoff_max_s, self._options.backoff_s * 2.0 ** max(0, self.restarts - 1))

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], line: str
    ) -> tuple[list[str], dict[str, str]]:
        """Command and environment of the next start."""
        words = list(command)
        told = {
            supervised.SOCKET: line,
            supervised.KINDS: ",".join(self.kinds),
            supervised.LAUNCH: f"{self._launch}-{self.restarts}"[:128],
            supervised.RESTARTS: str(self.restarts),
        }
        if self.checkpoint is not None and self._options.template is not None:
            words = resuming(command, self._options.template, self.checkpoint.path, self.checkpoint.step)
            told[supervised.RESUME_FROM] = self.checkpoint.path
            told[supervised.SKIP_STEPS] = str(self.checkpoint.skip_steps)
            if self.checkpoint.step is not None:
                told[supervised.RESUME_STEP] = str(self.checkpoint.step)
        if self.command is not None and self.checkpoint is not None:
            detail = {"checkpoint": self.checkpoint.path, "by": "foreshock launch", "restarts": self.restarts}
            about = {"id": self.command["id"], "run": self.run, "attempt": self.command["attempt"], "detail": detail}
            told[supervised.COMPLETES] = json.dumps(about)
        self.command = None
        ours = (supervised.RESUME_FROM, supervised.RESUME_STEP, supervised.SKIP_STEPS, supervised.COMPLETES)
        return words, {name: value for name, value in environment.items() if name not in ours} | told


def _exists(path: str) -> bool:
    """Of a path of another kind (s3://…) only the host can tell."""
    return bool(path) and ("://" in path or os.path.exists(path))
