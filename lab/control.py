"""Commands, really carried out: each by a method that a healthy trainer has.

Handlers run at a step boundary, on the trainer's own thread, inside `monitor.end_step`. What one returns is the
acknowledgement's detail; what it raises makes the command `failed`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import checkpoints
from .engine import NAME as ENGINE
from .monitoring import Command, Monitor
from .trainer import IS_CAP

if TYPE_CHECKING:
    from .train import Job

Arguments = Mapping[str, Any]
Detail = dict[str, Any]


class Control:
    """The commands of one job. `carried_out` keeps, in order, what was asked, at which step, and what came of it."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.carried_out: list[dict[str, Any]] = []
        self._actions: dict[str, Callable[[Arguments], Detail]] = {
            "enable_is_correction": self._enable_correction,
            "disable_is_correction": self._disable_correction,
            "rollback": self._rollback,
            "resync_trainer": self._resync_trainer,
            "resync_engine": self._resync_engine,
            "scale_lr": self._scale_lr,
            "skip_update": self._skip_update,
            "pause": self._pause,
            "resume": self._resume,
            "stop": self._stop,
            "checkpoint_now": self._checkpoint_now,
        }

    @property
    def kinds(self) -> list[str]:
        """The capabilities: what the job can carry out."""
        return list(self._actions)

    def bind(self, monitor: Monitor, kinds: Collection[str] | None = None) -> None:
        """Registers a handler for each of `kinds`, by default all."""
        for kind in self._actions if kinds is None else kinds:
            monitor.on(kind, self.carry_out)

    def carry_out(self, command: Command) -> Detail:
        """Does what is asked and returns the detail. Raises what the action raises, having kept it."""
        entry: dict[str, Any] = {"kind": command.kind, "step": self._job.step, "attempt": self._job.attempt}
        self.carried_out.append(entry)
        try:
            entry["detail"] = self._actions[command.kind](command.arguments)
        except Exception as error:
            entry["error"] = str(error)
            raise
        detail: Detail = entry["detail"]
        return detail

    def _enable_correction(self, arguments: Arguments) -> Detail:
        """Truncated importance sampling, per token: the loss times min(e^(old − rollout), cap)."""
        cap = float(arguments.get("cap", IS_CAP))
        if not 0 < cap < math.inf:
            raise ValueError(f"cap must be a positive number, not {cap}")
        self._job.trainer.is_cap = cap
        return {"is_correction": True, "cap": cap}

    def _disable_correction(self, _: Arguments) -> Detail:
        self._job.trainer.is_cap = None
        return {"is_correction": False}

    def _resync_trainer(self, _: Arguments) -> Detail:
        detail = self._job.trainer.resync_trainer()
        self._job.monitor.notice("weights", self._job.step, side="trainer", ok=True, **detail)
        return {"trainer": detail}

    def _resync_engine(self, _: Arguments) -> Detail:
        detail = self._job.trainer.resync_engine()
        self._job.monitor.notice("weights", self._job.step, side="engine", ok=True, **detail)
        self._job.monitor.notice("flush", self._job.step, engine=ENGINE)
        return {"engine": detail}

    def _rollback(self, arguments: Arguments) -> Detail:
        """Weights, optimizer, schedule, random state, data position; past the offending batches; both re-syncs.

        No rollout is in flight in a synchronous loop. An engine that cannot hold the trainer's weights does not undo
        the rollback: the detail says so.
        """
        trainer = self._job.trainer
        position = trainer.data_position
        step = checkpoints.restore(trainer, Path(arguments["checkpoint"]))
        skip_until = arguments.get("skip_until_step")
        if skip_until is not None:
            trainer.data_position = max(trainer.data_position, trainer.data_position + int(skip_until) - step)
        else:
            trainer.data_position = max(trainer.data_position, position)
        detail: Detail = {"step": step, "data_position": trainer.data_position} | self._resync_trainer({})
        try:
            detail |= self._resync_engine({})
        except RuntimeError as error:
            detail["engine_differs"] = str(error)
        self._job.rolled_back_to(step)
        return detail

    def _scale_lr(self, arguments: Arguments) -> Detail:
        factor = float(arguments["factor"])
        if not 0 < factor < math.inf:
            raise ValueError(f"factor must be a positive number, not {factor}")
        self._job.trainer.schedule.factor *= factor
        rate = self._job.trainer.schedule.rate
        self._job.monitor.notice("settings", self._job.step, lr=rate)
        return {"lr": rate}

    def _skip_update(self, arguments: Arguments) -> Detail:
        """The next updates leave parameters, moments and schedule as they are; the passes still run and observe."""
        steps = int(arguments.get("steps", 1))
        if steps < 1:
            raise ValueError(f"steps must be at least 1, not {steps}")
        self._job.trainer.skips_left = steps
        return {"steps": steps}

    def _pause(self, _: Arguments) -> Detail:
        """The waiting is the monitor's: its `end_step` does not return before `resume`, `stop` or the limit."""
        return {"paused": True}

    def _resume(self, _: Arguments) -> Detail:
        return {"paused": False}

    def _stop(self, _: Arguments) -> Detail:
        self._job.stopping = True
        return {"last_step": self._job.step}

    def _checkpoint_now(self, _: Arguments) -> Detail:
        return {"checkpoint": str(self._job.save_checkpoint()), "step": self._job.step}
