"""Loss closures of Megatron's forward steps, observed: where current log-probs come from, and each token once.

Legend: B rows, S positions of this rank.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from foreshock import Monitor
from foreshock.adapters import megatron_parallel as parallel
from foreshock.adapters import megatron_sync as sync
from foreshock.guard import guarded

LossFunction = Callable[..., Any]


class Losses:
    """One rank's closures. What fails of ours is caught by the monitor's guard; collectives are met whatever failed."""

    def __init__(self, monitor: Monitor, active: bool, chunks: list[Any]) -> None:
        self.monitor = monitor
        self.guard = monitor.guard
        self.active = active
        self.chunks = chunks
        self.tensor, self.context = parallel.groups()
        self.iteration = 0
        """Updates that succeeded since `attach`."""
        self.updates = 0
        """The same, since the last `end_step`."""
        self._hears: bool | None = None
        """Whether the host's own cross entropy is heard inside its loss function; None before the first."""

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
            share = sync.stale_share(chunk)
            if share is not None:
                self.monitor.log({"param_sync.stale_forward": share})


def _laid_as(labels: torch.Tensor, logps: torch.Tensor) -> Iterator[torch.Tensor]:
    """`logps` as `labels` lies, where its shape leaves no doubt: Megatron's own layout is [S, B]."""
    square = labels.dim() == 2 and labels.shape[0] == labels.shape[1]
    if logps.shape == labels.shape and not square:
        yield logps
    elif logps.dim() == labels.dim() == 2 and logps.shape == labels.t().shape and not square:
        yield logps.t()
