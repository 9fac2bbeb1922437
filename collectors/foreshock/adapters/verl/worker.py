"""An actor worker's part: the log-probs per token of every micro-batch, gradient norm, rate and number of updates.

Functions that begin with a worker run there, sent by the driver. Whatever of ours fails is caught by the monitor's
guard; the host's loss and optimizer step are called as they are and their results passed on.
"""

from __future__ import annotations

import functools
import math
import os
from logging import getLogger
from typing import Any

import foreshock
from foreshock import Monitor
from foreshock.adapters.optimizer import on_instance, scaled, scaled_factor
from foreshock.adapters.rows import Rows
from foreshock.adapters.verl import settings
from foreshock.adapters.verl.pairs import rows
from foreshock.guard import guarded

_log = getLogger("foreshock")


def watch(worker: Any, note: dict[str, Any]) -> dict[str, Any]:
    """Begins to watch; the answer is the heartbeat. `note`: run, launch, bypass, and settings of the connection."""
    try:
        begun = worker._foreshock = Watch(worker, note)
        return begun.answer()
    except Exception as error:
        if os.environ.get("FORESHOCK_RAISE") == "1":
            raise
        _log.error("foreshock: this worker is not watched: %r", error, exc_info=error)
        return {"error": repr(error)}


def seal(worker: Any, step: int) -> None:
    """At the driver's boundary."""
    found = _watch(worker)
    if found is not None:
        found.updates = 0
        found.monitor.end_step(step)


def scale(worker: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Every later update of this worker takes the rate times the factor. Answers with it, or with `refused`."""
    found = _watch(worker)
    if found is None:
        return {"refused": "not watched"}
    try:
        found.lr_factor = scaled_factor(found.lr_factor, arguments)
    except ValueError as why:
        return {"refused": str(why)}
    found.monitor.notice("settings", lr_factor=found.lr_factor)
    return {"lr_factor": found.lr_factor}


def new_attempt(worker: Any, reason: str) -> None:
    """After a rollback, which nobody else tells this rank of."""
    found = _watch(worker)
    if found is not None:
        found.monitor.new_attempt(reason)


def finish(worker: Any, status: str) -> None:
    """When `fit` has ended."""
    found = _watch(worker)
    if found is not None:
        found.monitor.finish(status)


def _watch(worker: Any) -> Watch | None:
    found: Watch | None = worker.__dict__.get("_foreshock")
    return found


class Watch:
    """One worker's. Of the ranks that hold the same rows, the one whose outputs verl collects reports them."""

    def __init__(self, worker: Any, note: dict[str, Any]) -> None:
        self.actor = worker.actor
        self.engine = engine = worker.actor.engine
        self.reporting = bool(engine.is_mp_src_rank_with_outputs())
        self.monitor: Monitor = foreshock.init(
            note["run"],
            config={"host": "verl"},
            role="trainer",
            rank=int(engine.get_data_parallel_rank()),
            world=int(engine.get_data_parallel_size()),
            launch=note["launch"],
            controller=False,
            **(note["settings"] if self.reporting else {"url": ""}),
        )
        self.guard = self.monitor.guard
        self.updates = 0
        """Since the last boundary."""
        self.lr_factor = 1.0
        self._old_source = "rollout" if note["bypass"] else "same_weights"
        self._clip_range = settings.clip_range(worker.config)
        self._semantics = settings.semantics(worker.config)
        self._first_epoch = 1
        self._in_call = 0
        self.actor.train_mini_batch = self._around(self.actor.train_mini_batch, self._training)
        engine.optimizer_step = self._around(engine.optimizer_step, self._optimizing)

    @staticmethod
    def _around(original: Any, ours: Any) -> Any:
        return functools.wraps(original)(functools.partial(ours, original))

    def answer(self) -> dict[str, Any]:
        """What the driver learns of this worker."""
        groups = getattr(getattr(self.engine, "optimizer", None), "param_groups", None)
        rank = self.monitor.identity.rank if self.reporting else None
        return {"rank": rank, "scale_lr": isinstance(groups, list)}

    # --- around verl's own -------------------------------------------------------------------------------------------

    def _training(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._begin(args[0] if args else kwargs.get("data"))
        with on_instance(self.actor, "loss_fn", functools.partial(self._loss, self.actor.loss_fn)):
            return original(*args, **kwargs)

    def _loss(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if "model_output" in kwargs:  # with other arguments it is a distillation's logits processor
            self._trained(kwargs["model_output"], kwargs["data"])
        return result

    def _optimizing(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        with scaled(self.engine.optimizer, self.lr_factor):
            norm = original(*args, **kwargs)
        self._stepped(norm)
        return norm

    # --- measuring ---------------------------------------------------------------------------------------------------

    @guarded()
    def _begin(self, data: Any) -> None:
        """Rows are trained on once per epoch; old and engine log-probs are compared in the first alone."""
        self._in_call = 0
        epochs = _plain(data, "epochs") or 1
        parts = _plain(data, "num_mini_batch")
        size = _plain(data, "mini_batch_size")
        if size:
            parts = len(data) // max(1, int(size) // int(self.engine.get_data_parallel_size()))
        self._first_epoch = max(1, int(parts or 1)) if int(epochs) > 1 else 1 << 30

    @guarded()
    def _trained(self, model_output: Any, data: Any) -> None:
        import torch

        if not self.reporting or not torch.is_grad_enabled():
            return
        found = rows(model_output["log_probs"], data)
        where: dict[str, Any] = {"token_ids": found.token_ids}
        if found.cu_seqlens is not None:
            where["cu_seqlens"] = found.cu_seqlens
        self.monitor.observe(
            "policy", found.current, found.old, found.mask, optimizer_step=self.updates, clip_range=self._clip_range,
            old_source=self._old_source, advantages=found.advantages, **where,
        )  # fmt: skip
        self._observe_engine(found, where)
        if found.reference is not None:
            self.monitor.observe("reference", found.reference, found.current, found.mask, **where)

    def _observe_engine(self, found: Rows, where: dict[str, Any]) -> None:
        where = where | {"semantics": self._semantics}
        if self._in_call < self._first_epoch:
            # Where old is the engine's own, `mismatch` would be zero and prove nothing.
            trainer = found.current if self._old_source == "rollout" else found.old
            if self._old_source != "rollout" or self.updates == 0:
                self.monitor.observe("mismatch", trainer, found.rollout, found.mask, **where)
        if self.updates == 0:
            self.monitor.observe("mismatch_current", found.current, found.rollout, found.mask, **where)

    @guarded()
    def _stepped(self, norm: Any) -> None:
        self.updates += 1
        self._in_call += 1
        groups = getattr(self.engine.optimizer, "param_groups", None)
        scalars: dict[str, Any] = {"lr": float(groups[0]["lr"]) * self.lr_factor} if groups else {}
        if isinstance(norm, int | float):
            bad = float(not math.isfinite(norm))  # then verl's FSDP engine leaves the update out
            scalars |= {"grad.norm": norm, "grad.nonfinite": bad, "update.skipped": bad}
        elif norm is not None:
            scalars["grad.norm"] = norm
        self.monitor.log(scalars)


def _plain(data: Any, key: str) -> Any:
    """A value that is no tensor of a TensorDict; None where there is none."""
    from verl.utils import tensordict_utils

    return tensordict_utils.get_non_tensor_data(data=data, key=key, default=None)
