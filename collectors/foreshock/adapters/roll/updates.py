"""One rollout's optimizer steps: counted, scaled, skipped or refused, just before the optimizer and on all ranks alike.

A skipped update leaves parameters, moments and schedule bit-identical: neither the optimizer nor the schedule steps,
and ROLL clears the gradients itself. For one call of `strategy.train_step` the two `step` methods are wrapped on their
instances, so a wrapper that someone else put there is called and left in place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from logging import getLogger
from typing import TYPE_CHECKING, Any

from foreshock.adapters.optimizer import on_instance, scaled

if TYPE_CHECKING:
    from foreshock.adapters.roll.watch import Watch

_log = getLogger("foreshock")


class Updates:
    """`index` of the current optimizer step of this rollout; `factor` on the learning rate; `skips` still to come."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.index = 0
        self.factor = 1.0
        self.skips = 0
        self.skipped = 0
        self.refused = ""
        self._half_square: Any = 0.0
        self._tokens: Any = 0.0

    def begin(self) -> None:
        self.index, self.skipped, self.refused = 0, 0, ""
        self._reset()

    def done(self) -> None:
        """After an optimizer step."""
        self.index += 1
        self._reset()

    def add(self, current_BT: Any, old_BT: Any, mask_BT: Any, source: str) -> None:
        """½δ² of a micro-batch, for the refusal; nothing where old proves nothing."""
        if not self.watch.options.refuse or self.index or source != "same_weights" or old_BT is None:
            return
        keep = mask_BT > 0
        delta = (current_BT - old_BT).double().masked_fill(~keep, 0.0)
        self._half_square = self._half_square + 0.5 * (delta * delta).sum()
        self._tokens = self._tokens + keep.sum()

    def values(self) -> dict[str, float]:
        return {"update.skipped": float(self.skipped)}

    @contextlib.contextmanager
    def on_optimizer(self, strategy: Any) -> Iterator[None]:
        """While one `strategy.train_step` runs."""
        optimizer, scheduler = getattr(strategy, "optimizer", None), getattr(strategy, "scheduler", None)
        if optimizer is None or not can_step(strategy):
            yield
            return
        held = False

        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal held
            held = self._leave_out()
            if held:
                # Megatron's optimizer answers (successful, gradient norm, zeros); others answer nothing.
                return (True, 0.0, 0) if hasattr(optimizer, "get_grad_norm") else None
            with scaled(optimizer, self.factor):
                return original_step(*args, **kwargs)

        def schedule(*args: Any, **kwargs: Any) -> Any:
            return None if held else original_schedule(*args, **kwargs)

        original_step: Any = optimizer.step
        original_schedule: Any = getattr(scheduler, "step", None)
        with on_instance(optimizer, "step", step), on_instance(scheduler, "step", schedule):
            yield

    def _leave_out(self) -> bool:
        """Whether this update is not to be made. Collective where refusal is on: every rank comes here."""
        try:
            reason = self._reason()
        except Exception as error:
            self.watch.guard.caught("refusal", error)
            return False
        if reason:
            self.skipped += 1
            self.refused = reason if reason != "asked" else ""
            _log.warning("foreshock: step %d: update left out: %s", self.watch.step, reason)
            if self.refused:
                self.watch.monitor.notice("note", self.watch.step, text=f"update refused: {reason}")
        return bool(reason)

    def _reason(self) -> str:
        if self.skips > 0:
            self.skips -= 1
            return "asked"
        if not self.watch.options.refuse or self.index:
            return ""
        if self.watch.exact.cause:
            return self.watch.exact.cause
        total, tokens = self.watch.exchange.total(float(self._half_square), float(self._tokens))
        if not tokens:
            return ""
        limit = self.watch.exact.limit
        found = total / tokens
        if found <= limit:
            return ""
        return f"policy.kl_k2 {found:.3g} at step 0 is above its limit {limit:.3g}: log-prob and old log-prob disagree"

    def _reset(self) -> None:
        self._half_square, self._tokens = 0.0, 0.0


def can_step(strategy: Any) -> bool:
    """Whether updates are the optimizer's own `step` (DeepSpeed's engine steps by itself)."""
    optimizer = getattr(strategy, "optimizer", None)
    return callable(getattr(optimizer, "step", None)) and not hasattr(getattr(strategy, "model", None), "backward")
