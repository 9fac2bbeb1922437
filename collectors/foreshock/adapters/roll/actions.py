"""Commands on a live ROLL worker. `attach` registers what this worker can really do, and nothing else."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from foreshock import Command
from foreshock.adapters.optimizer import asked_skips, scaled_factor
from foreshock.adapters.roll.correction import Correction
from foreshock.adapters.roll.probing import Probe
from foreshock.adapters.roll.updates import can_step

if TYPE_CHECKING:
    from foreshock.adapters.roll.watch import Watch


class RefusedError(Exception):
    """The worker will not do it; the message says why."""


class Actions:
    """Handlers by kind; the same code serves the worker's own commands and those that the driver hands on."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.correction = Correction(watch)
        self.probe = Probe(watch)
        self._by_kind = {"stop": self._stop}
        strategy = watch.worker.strategy
        if can_step(strategy):
            self._by_kind |= {"scale_lr": self._scale_lr, "skip_update": self._skip_update}
        if callable(getattr(strategy, "load_checkpoint", None)) and callable(getattr(strategy, "load_states", None)):
            self._by_kind["rollback"] = self._rollback
        if watch.options.probe and watch.exact.available:
            self._by_kind["probe"] = self.probe.run
        for kind in self._by_kind:
            watch.monitor.on(kind, self._handle)
        for kind in ("pause", "resume"):
            watch.monitor.on(kind, lambda command: None)

        self._by_kind["finish"] = self._finish  # asked for by the driver's half alone

    def engine_log_probs_seen(self) -> None:
        """From now on a correction is possible."""
        self._by_kind |= {"enable_is_correction": self._enable, "disable_is_correction": self._disable}
        for kind in ("enable_is_correction", "disable_is_correction"):
            self.watch.monitor.on(kind, self._handle)

    def _handle(self, command: Command) -> Any:
        state, detail = self.apply(command.kind, command.arguments)
        if state == "refused":
            command.refused(detail)
            return None
        return detail

    def apply(self, kind: str, arguments: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """(state, detail) of one action on this rank: done or refused. Collective where the action is."""
        action = self._by_kind.get(kind)
        if action is None:
            return "refused", {"reason": f"{kind} is not possible on this worker"}
        try:
            return "done", action(arguments)
        except RefusedError as why:
            return "refused", {"reason": str(why)}

    def _stop(self, arguments: dict[str, Any]) -> dict[str, Any]:
        self.watch.stop_reason = str(arguments.get("reason", "by command"))
        return {"how": "train_step raises at this boundary on every rank"}

    def _finish(self, arguments: dict[str, Any]) -> dict[str, Any]:
        self.watch.monitor.finish(str(arguments.get("status", "completed")))
        return {}

    def _scale_lr(self, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            self.watch.updates.factor = scaled_factor(self.watch.updates.factor, arguments)
        except ValueError as why:
            raise RefusedError(str(why)) from None
        self.watch.monitor.notice("settings", self.watch.step, lr_factor=self.watch.updates.factor)
        return {"factor": self.watch.updates.factor}

    def _skip_update(self, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            self.watch.updates.skips += asked_skips(arguments)
        except ValueError as why:
            raise RefusedError(str(why)) from None
        return {"updates_to_skip": self.watch.updates.skips}

    def _enable(self, arguments: dict[str, Any]) -> dict[str, Any]:
        cap = float(arguments.get("cap", 2.0))
        if cap <= 0:
            raise RefusedError(f"cap must be above 0, not {cap}")
        return self.correction.enable(cap)

    def _disable(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return self.correction.disable()

    def _rollback(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Loads weights, optimizer, schedule and RNG as ROLL does when it resumes. All ranks or none."""
        path = str(arguments.get("checkpoint", ""))
        if not self.watch.exchange.agreed(os.path.isdir(path)):
            raise RefusedError(f"not every rank finds a checkpoint at {path!r}")
        strategy = self.watch.worker.strategy
        strategy.load_states()
        schedule: Any = getattr(strategy, "scheduler", None)
        if hasattr(schedule, "num_steps"):
            schedule.num_steps = 0  # Megatron's loader adds the saved count to the schedule's own, meant for a new one
        strategy.load_checkpoint(load_dir=path, tag="checkpoint")
        strategy.offload_states()
        cache = getattr(self.watch.worker, "_logprobs_cache", None)
        if cache:
            cache.clear()
        self.watch.updates.skips = 0
        self.watch.monitor.new_attempt("rollback")  # where the driver is the controller, nobody else tells this rank
        return {
            "checkpoint": path, "scope": ["weights", "optimizer", "scheduler", "rng"],
            "data": "goes on: the batches since the checkpoint are not repeated",
        }  # fmt: skip
