"""What is done about TRL's GRPOTrainer: its optimizer step scaled or left out, and the handlers of commands."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from foreshock import Command, Monitor
from foreshock.adapters.optimizer import asked_skips, scale_lr
from foreshock.guard import guarded


class Updates:
    """Rates and skips of the updates to come, and a correction that waits for the next generation."""

    def __init__(self, trainer: Any, monitor: Monitor) -> None:
        self.trainer = trainer
        self.monitor = monitor
        self.guard = monitor.guard
        self.lr_factor = 1.0
        self.skips = 0
        """Updates still to be left out."""
        self.stopped = False
        self._correction: tuple[bool, float | None] | None = None
        self._lrs: list[Any] = []
        self._skipped: Any = None

    def handlers(self) -> dict[str, Callable[[Command], Any]]:
        """Command kind → what carries it out."""
        return {
            "enable_is_correction": functools.partial(self._set_correction, True),
            "disable_is_correction": functools.partial(self._set_correction, False),
            "scale_lr": functools.partial(scale_lr, self),
            "skip_update": self._skip_update,
            "checkpoint_now": self._checkpoint_now,
            "stop": self._stop,
        }

    # --- around one update -------------------------------------------------------------------------------------------

    @guarded()
    def before(self, optimizer: Any) -> None:
        groups = optimizer.param_groups
        self.monitor.log({"lr": float(groups[0]["lr"]) * self.lr_factor, "update.skipped": float(self.skips > 0)})
        if self.skips > 0:
            self.skips -= 1
            # Through the host's own word for a skipped step, so that it leaves the schedule alone as well.
            self._skipped = optimizer
            optimizer.step = functools.partial(_leave_out, optimizer)
        elif self.lr_factor != 1.0:
            self._lrs = [group["lr"] for group in groups]
            for group in groups:
                group["lr"] = group["lr"] * self.lr_factor

    def after(self, optimizer: Any) -> bool:
        """Whether the update was made."""
        # Schedulers must find the rates that they wrote, since some of them multiply. Not guarded: it must be undone.
        for group, lr in zip(optimizer.param_groups, self._lrs, strict=False):
            group["lr"] = lr
        self._lrs = []
        return self._skipped is None

    def forget_skipped(self) -> None:
        """After the step of a skipped update, whose schedule stood still too."""
        if self._skipped is not None:
            self._skipped._is_overflow = False
            self._skipped = None

    # --- commands ----------------------------------------------------------------------------------------------------

    def _set_correction(self, on: bool, command: Command) -> Any:
        """Samples that are already buffered carry the old choice: it changes with the next generation."""
        cap = command.arguments.get("cap") if on else None
        self._correction = (on, None if cap is None else float(cap))
        return {"vllm_importance_sampling_correction": on, "from": "the next generation"}

    @guarded()
    def apply_correction(self) -> None:
        if self._correction is None:
            return
        (on, cap), self._correction = self._correction, None
        self.trainer.vllm_importance_sampling_correction = on
        if cap is not None:
            self.trainer.vllm_importance_sampling_clip_max = cap
        self.monitor.notice("settings", vllm_importance_sampling_correction=on, cap=cap)

    def _skip_update(self, command: Command) -> Any:
        from accelerate.optimizer import AcceleratedOptimizer

        optimizer = self.trainer.optimizer
        if not isinstance(optimizer, AcceleratedOptimizer) or not hasattr(optimizer, "_is_overflow"):
            command.refused(f"{type(optimizer).__name__} cannot be made to skip")
            return None
        self.skips += asked_skips(command.arguments)
        return {"updates": self.skips}

    def _checkpoint_now(self, command: Command) -> Any:
        trainer = self.trainer
        trainer._save_checkpoint(trainer.model, trial=None)
        trainer.control = trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
        return {"step": int(trainer.state.global_step)}

    def _stop(self, command: Command) -> Any:
        self.stopped = True
        self.trainer.control.should_training_stop = True
        return {"step": int(self.trainer.state.global_step)}


def _leave_out(optimizer: Any, *_: Any, **__: Any) -> None:
    """Stands in for one `optimizer.step`, once."""
    del optimizer.step
    optimizer._is_overflow = True
