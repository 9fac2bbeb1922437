"""Truncated importance weights between the trainer's old log-prob and the engine's: w = min(exp(old − engine), cap).

Where ROLL has `train_infer_correction` (≥ v0.2.0) its own switch is turned, on this worker's copy of the settings, and
the weight that its driver would have sent is filled in; before, the advantages are weighted for the length of the loss,
which is the same for every loss that is linear in them (w > 0 leaves PPO's choice of branch as it is).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foreshock.adapters.roll.watch import Watch


class Correction:
    """Off until enabled; what was set before comes back when disabled."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.cap: float | None = None
        self._before: tuple[bool, Any] | None = None

    @property
    def _native(self) -> Any:
        """ROLL's own switch, or None."""
        said = getattr(self.watch.worker.pipeline_config, "train_infer_correction", None)
        return getattr(said, "is_weight", None)

    def enable(self, cap: float) -> dict[str, Any]:
        native = self._native
        if native is not None and self._before is None:
            self._before = (native.enabled, getattr(native, "upper_bound", None))
        if native is not None:
            native.enabled, native.upper_bound = True, cap
        self.cap = cap
        return {"cap": cap, "how": "train_infer_correction" if native is not None else "weighted advantages"}

    def disable(self) -> dict[str, Any]:
        native, self.cap = self._native, None
        if native is not None and self._before is not None:
            native.enabled, native.upper_bound = self._before
        self._before = None
        return {"enabled": bool(native.enabled) if native is not None else False}

    def before_loss(self, data: Any) -> Callable[[], None] | None:
        """Puts the weights where the loss will find them; returns what takes them away again."""
        batch = data.batch
        if self.cap is None or "infer_logprobs" not in batch.keys():  # noqa: SIM118 - a TensorDict iterates over rows
            return None
        if self.watch.exact.reuses and self._native is not None:
            return None  # ROLL computes it in the loss itself
        weights_BT = (batch["old_log_probs"] - batch["infer_logprobs"]).exp().clamp(max=self.cap).detach()
        key = "train_infer_is_weight" if self._native is not None else "advantages"
        kept = batch[key] if key in batch.keys() else None  # noqa: SIM118
        batch[key] = weights_BT if self._native is not None else batch["advantages"] * weights_BT

        def restore() -> None:
            if kept is not None:
                batch[key] = kept

        return restore
