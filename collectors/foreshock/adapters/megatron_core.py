"""Megatron-core: the loss closure that a forward step hands to the schedule, and the optimizer's `step`.

    watch = megatron_core.attach(run="project/name", optimizer=optimizer, model=model)   # every rank, before training

    def forward_step(data_iterator, model):
        batch = next(data_iterator)
        output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"])
        return output, watch.loss(partial(loss_func, batch), labels=batch["labels"], mask=batch["loss_mask"],
                                  old_log_probs=batch["old_log_probs"])

    watch.end_step(iteration)                                                             # every rank, after the update

The closure is called on the last pipeline stage only. There each token is counted once: tensor-parallel ranks above 0
observe nothing, context-parallel ranks observe their piece and complete the sums of its sequences, data-parallel ranks
have rows of their own.

Legend: B rows, S positions of this rank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from logging import getLogger
from typing import Any, Final

import torch

import foreshock
from foreshock import Command, Monitor
from foreshock.adapters import megatron_parallel as parallel
from foreshock.adapters import megatron_sync as sync
from foreshock.adapters.megatron_loss import Losses
from foreshock.adapters.optimizer import asked_skips, scale_lr, scaled
from foreshock.guard import guarded

_log = getLogger("foreshock")

CAPABILITIES: Final[dict[str, str]] = {
    "scale_lr": "with `optimizer`: every later update takes the scheduler's rate times the factor",
    "skip_update": "with `optimizer`: the next updates answer `(False, None, None)`, Megatron's own word for a skipped "
    "one; parameters, moments and loss scale stay as they are, and so does the schedule if the loop steps it only "
    "after a success",
    "resync_trainer": "with `optimizer`, and `model` wrapped in DDP with the distributed optimizer: master weights to "
    "model, shard views dropped, gather, bits compared over data-parallel ranks",
    "checkpoint_now": "with `save`",
    "stop": "with `stop`",
    "pause": "always",
    "resume": "always",
}
IMPOSSIBLE: Final[dict[str, str]] = {
    "rollback": "loading belongs to the loop: register it with `watch.monitor.on('rollback', …)` where it can",
    "enable_is_correction": "the loss belongs to the loop: `watch.monitor.on(…)`",
    "disable_is_correction": "the loss belongs to the loop: `watch.monitor.on(…)`",
    "resync_engine": "Megatron-core has no rollout engine",
    "probe": "no second scoring pass",
}


def attach(
    run: str | None = None,
    *,
    optimizer: Any = None,
    model: Any = None,
    save: Callable[[], Any] | None = None,
    stop: Callable[[], Any] | None = None,
    monitor: Monitor | None = None,
    **arguments: Any,
) -> MegatronAdapter:
    """Watches this rank; called on every rank, after Megatron's groups exist (it agrees over all of them).

    `optimizer` is what `get_megatron_optimizer` returned, `model` the DDP chunk or chunks. `save()` writes a full
    checkpoint and returns its path, `stop()` has the loop end at this boundary; both are called on every rank.
    `arguments` go to `foreshock.init`. Does nothing at all where any rank has no url.
    """
    chunks = [] if model is None else list(model) if isinstance(model, Sequence) else [model]
    kinds = capabilities(optimizer, chunks, save, stop)
    enabled = monitor.enabled if monitor is not None else bool(_url(arguments))
    active, broadcast = parallel.agree(enabled)
    if monitor is None:
        arguments = {"capabilities": kinds, "config": {"host": "megatron_core"}, "broadcast": broadcast} | arguments
        monitor = foreshock.init(run, **(arguments if active else arguments | {"url": ""}))
    if enabled and not active:
        _log.warning("foreshock: another rank has no FORESHOCK_URL, so none is watched")
    adapter = MegatronAdapter(monitor, active, optimizer, chunks, save, stop)
    if active:
        adapter.install(kinds)
    return adapter


def capabilities(optimizer: Any, chunks: Sequence[Any], save: Any = None, stop: Any = None) -> set[str]:
    """The command kinds that can really be carried out with what was handed over."""
    kinds = {"pause", "resume"}
    if optimizer is not None:
        kinds |= {"scale_lr", "skip_update"}
        configs = [getattr(chunk, "ddp_config", None) for chunk in chunks]
        if configs and all(getattr(config, "use_distributed_optimizer", False) for config in configs):
            kinds.add("resync_trainer")
    kinds |= {"checkpoint_now"} if save is not None else set()
    return kinds | ({"stop"} if stop is not None else set())


class MegatronAdapter(Losses):
    """One rank's part: its loss closures (`loss`, `observe`), its optimizer, and what is asked of both."""

    def __init__(
        self, monitor: Monitor, active: bool, optimizer: Any, chunks: list[Any], save: Any = None, stop: Any = None
    ) -> None:
        super().__init__(monitor, active, chunks)
        self.optimizer = optimizer
        self.lr_factor = 1.0
        self.skips = 0
        self._save, self._stop = save, stop

    def install(self, kinds: set[str]) -> None:
        """Wraps the optimizer's `step` and registers the handlers of `kinds`."""
        if self.optimizer is not None:
            original = self.optimizer.step
            self.optimizer.step = functools.wraps(original)(functools.partial(self._around_step, original))
        handlers: dict[str, Callable[[Command], Any]] = {
            "scale_lr": functools.partial(scale_lr, self),
            "skip_update": self._skip_update,
            "resync_trainer": self._resync_trainer,
            "checkpoint_now": self._checkpoint_now,
            "stop": lambda command: self._stop(),
        }
        for kind in kinds & set(handlers):
            self.monitor.on(kind, handlers[kind])

    # --- the update ----------------------------------------------------------------------------------------------

    def _around_step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        groups = self.optimizer.param_groups
        if self.skips > 0:
            self.skips -= 1
            result = (False, None, None)
        else:
            with scaled(self.optimizer, self.lr_factor):  # the scheduler must find the rates that it wrote
                result = original(*args, **kwargs)
        self._stepped(result, groups)
        return result

    @guarded()
    def _stepped(self, result: Any, groups: Sequence[dict[str, Any]]) -> None:
        success, norm = (bool(result[0]), result[1]) if isinstance(result, tuple) else (True, None)
        self.updates += success
        self.iteration += success
        scalars: dict[str, Any] = {"update.skipped": float(not success), "weights.version": float(self.iteration)}
        if groups:
            scalars["lr"] = float(groups[0]["lr"]) * self.lr_factor
        if norm is not None:
            scalars["grad.norm"] = norm
            if not torch.is_tensor(norm):
                scalars["grad.nonfinite"] = float(not math.isfinite(norm))
        self.monitor.log(scalars)

    def end_step(self, step: int) -> None:
        """Seals the step and carries out what is due; on every rank, at the same place of the loop."""
        if not self.active:
            return
        self.updates = 0
        self.monitor.end_step(step)

    # --- commands ------------------------------------------------------------------------------------------------

    def _skip_update(self, command: Command) -> Any:
        self.skips += asked_skips(command.arguments)
        return {"updates": self.skips}

    def _resync_trainer(self, command: Command) -> Any:
        equal = sync.resync(self.optimizer, self.chunks)
        if not equal:
            command.failed({"parameters_equal": False})
            return None
        return {"parameters_equal": True}

    def _checkpoint_now(self, command: Command) -> Any:
        assert self._save is not None
        path = self._save()
        if path is not None and command.step is not None and self.monitor.identity.rank == 0:
            self.monitor.checkpoint(path, command.step)
        return {"path": str(path)}


def _url(arguments: dict[str, Any]) -> str:
    from foreshock.settings import load

    return load({"url": arguments.get("url")}).url
