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

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from logging import getLogger
from typing import Any, Final

import torch

import foreshock
from foreshock import Command, Monitor
from foreshock.adapters import megatron_parallel as parallel
from foreshock.adapters.optimizer import asked_skips, scale_lr, scaled
from foreshock.guard import guarded

_log = getLogger("foreshock")
LossFunction = Callable[..., Any]

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


class MegatronAdapter:
    """One rank's part. What fails of ours is caught by the monitor's guard; collectives are met whatever failed."""

    def __init__(
        self, monitor: Monitor, active: bool, optimizer: Any, chunks: list[Any], save: Any = None, stop: Any = None
    ) -> None:
        self.monitor = monitor
        self.guard = monitor.guard
        self.active = active
        self.optimizer = optimizer
        self.chunks = chunks
        self.tensor, self.context = parallel.groups()
        self.iteration = 0
        """Updates that succeeded since `attach`."""
        self.updates = 0
        """The same, since the last `end_step`."""
        self.lr_factor = 1.0
        self.skips = 0
        self._save, self._stop = save, stop
        self._hears: bool | None = None
        """Whether the host's own cross entropy is heard inside its loss function; None before the first."""

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

    # --- the loss closure ----------------------------------------------------------------------------------------

    def loss(
        self,
        loss_func: LossFunction,
        *,
        labels: torch.Tensor,
        mask: torch.Tensor,
        old_log_probs: torch.Tensor | None = None,
        rollout_log_probs: torch.Tensor | None = None,
        reference_log_probs: torch.Tensor | None = None,
        temperature: float = 1.0,
        old_source: str = "same_weights",
        repeated: bool = False,
        **where: Any,
    ) -> LossFunction:
        """The same closure, observed; all tensors are this rank's, [B, S] as `labels`.

        Where the model's output is the loss per token (it was given labels), current log-probs are its negative; where
        the closure calls `tensor_parallel.vocab_parallel_cross_entropy`, what that gave; else they are computed from
        the logits at `temperature`. Without `old_log_probs` the pair `policy` is missing as `detached`. `repeated`:
        these tokens were trained on before in this step. `where`: see `Monitor.observe`. Without gradients (the
        schedule's `forward_only`) the closure is passed through.
        """
        if not self.active:
            return loss_func
        pairs = functools.partial(
            self._pairs, mask=mask, old=old_log_probs, rollout=rollout_log_probs, reference=reference_log_probs,
            old_source=old_source if old_log_probs is not None else "detached", repeated=repeated, where=where,
        )  # fmt: skip

        def observed(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self._check_sync()
            if not torch.is_grad_enabled():
                return loss_func(output, *args, **kwargs)
            scored = output.shape == labels.shape
            current = -output.detach() if scored else self._computed(output, labels, mask, temperature)
            heard: list[torch.Tensor] = []
            with contextlib.nullcontext() if scored or self._hears is False else self._listening(heard):
                result = loss_func(output, *args, **kwargs)
            if not scored:
                of_host = next((found for logps in reversed(heard) for found in _laid_as(labels, logps)), None)
                self._hears = of_host is not None
                current = current if of_host is None else of_host
            if self.tensor.rank == 0:
                pairs(current)
                self._log_loss(result)
            return result

        return observed

    def _computed(
        self, logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor, temperature: float
    ) -> torch.Tensor | None:
        """Before the closure runs, for it may overwrite the logits; None where its own cross entropy is heard."""
        if self._hears:
            return None
        return parallel.log_probs(
            logits, labels, temperature=temperature, tensor=self.tensor, guard=self.guard, mask=mask
        )

    @contextlib.contextmanager
    def _listening(self, heard: list[torch.Tensor]) -> Iterator[None]:
        """Within, log-probs that the host's cross entropy gives are kept. Megatron's package attribute is replaced
        only here, so that nothing else in the process meets a wrapper."""
        from megatron.core import tensor_parallel

        original = tensor_parallel.vocab_parallel_cross_entropy

        def kept(logits: torch.Tensor, target: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
            loss: torch.Tensor = original(logits, target, label_smoothing)
            if not label_smoothing:
                heard.append(-loss.detach())
            return loss

        tensor_parallel.vocab_parallel_cross_entropy = kept
        try:
            yield
        finally:
            tensor_parallel.vocab_parallel_cross_entropy = original

    def _pairs(
        self,
        current: torch.Tensor | None,
        *,
        mask: torch.Tensor,
        old: torch.Tensor | None,
        rollout: torch.Tensor | None,
        reference: torch.Tensor | None,
        old_source: str,
        repeated: bool,
        where: dict[str, Any],
    ) -> None:
        where = dict(where)
        sampled = where.pop("semantics", None)
        self.observe("policy", current, old, mask, optimizer_step=self.updates, old_source=old_source, **where)
        where.pop("advantages", None)
        if not repeated and (old is not None or self.updates == 0):
            self.observe("mismatch", old if old is not None else current, rollout, mask, semantics=sampled, **where)
        if self.updates == 0:
            self.observe("mismatch_current", current, rollout, mask, semantics=sampled, **where)
        if reference is not None:
            self.observe("reference", reference, current, mask, **where)

    def observe(self, pair: str, a: Any, b: Any, mask: torch.Tensor, **where: Any) -> None:
        """`Monitor.observe` for a loop that has its log-probs at hand, called on every rank alike.

        Ranks of the tensor-parallel group above 0 add nothing; over the context-parallel group the sums of sequences
        are completed (`positions` and `lengths` are worked out where the host does not say them).
        """
        if not self.active or self.tensor.rank > 0:
            return
        if self.context.size == 1:
            self.monitor.observe(pair, a, b, mask, **where)
            return
        completion = parallel.Completion(self.context)
        packed = where.get("cu_seqlens")
        if packed is None and "positions" not in where:
            placed = parallel.place(mask, self.context, self.guard)
            if placed is not None:
                where["positions"], where["lengths"] = placed
        self.monitor.observe(
            pair, a, b, mask, sequence_sums=completion, counts_sequences=self.context.rank == 0, **where
        )
        completion.settle(mask.shape[0] if packed is None else len(packed) - 1, mask.device)

    @guarded()
    def _log_loss(self, result: Any) -> None:
        """The micro-batch's loss per token or per micro-batch, as the host averages it."""
        if isinstance(result, tuple) and torch.is_tensor(result[0]):
            loss = result[0].detach().clone()
            if len(result) == 3:
                loss = loss / torch.as_tensor(result[1], device=loss.device).clamp(min=1)
            self.monitor.log({"loss": loss})

    @guarded()
    def _check_sync(self) -> None:
        """Whether the forward that just ran read parameters whose all-gather was never dispatched."""
        for chunk in self.chunks if self.iteration else ():
            config = getattr(chunk, "ddp_config", None)
            if config is None or not (config.use_distributed_optimizer and config.overlap_param_gather):
                continue
            stale = sum(not group.param_gather_dispatched for group in chunk.bucket_groups)
            self.monitor.log({"param_sync.stale_forward": stale / max(1, len(chunk.bucket_groups))})

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
        """Master weights to the model, a gather that trusts no cached view, and the bits compared."""
        for optimizer in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            if hasattr(optimizer, "_copy_main_params_to_model_params"):
                optimizer._copy_main_params_to_model_params()
        equal = True
        for chunk in self.chunks:
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                if group.param_gather_handle is not None:
                    group.param_gather_handle.wait()
                    group.param_gather_handle = None
                group.cached_param_buffer_shard_list = [None] * len(group.buckets)
            chunk.start_param_sync(force_sync=True)
            equal &= self.parameters_equal(chunk)
        if not equal:
            command.failed({"parameters_equal": False})
            return None
        return {"parameters_equal": True}

    @staticmethod
    def parameters_equal(chunk: Any) -> bool:
        """Whether all data-parallel ranks hold the same bits of a DDP chunk (experts aside). A collective."""
        shared = [p for p in chunk.parameters() if getattr(p, "allreduce", True)]
        return parallel.equal_over(shared, chunk.dp_cp_group)

    def _checkpoint_now(self, command: Command) -> Any:
        assert self._save is not None
        path = self._save()
        if path is not None and command.step is not None and self.monitor.identity.rank == 0:
            self.monitor.checkpoint(path, command.step)
        return {"path": str(path)}


def _laid_as(labels: torch.Tensor, logps: torch.Tensor) -> Iterator[torch.Tensor]:
    """`logps` as `labels` lies, where its shape leaves no doubt: Megatron's own layout is [S, B]."""
    square = labels.dim() == 2 and labels.shape[0] == labels.shape[1]
    if logps.shape == labels.shape and not square:
        yield logps
    elif logps.dim() == labels.dim() == 2 and logps.shape == labels.t().shape and not square:
        yield logps.t()


def _url(arguments: dict[str, Any]) -> str:
    from foreshock.settings import load

    return load({"url": arguments.get("url")}).url
