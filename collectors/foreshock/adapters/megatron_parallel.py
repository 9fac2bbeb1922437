"""What Megatron-core's parallel groups ask of a collector: log-probs over a split vocabulary, sequences split over
context-parallel ranks, one decision for all ranks, parameters equal over data-parallel ranks.

A collective must be met by every rank of its group. So whatever may fail on one rank alone is caught before it, and
NaN is what that rank brings; nothing here leaves a collective out.

Legend: B rows, S positions of this rank, V entries of this rank's share of the vocabulary, K columns of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from foreshock.guard import Guard
from foreshock.stats.layout import COLUMNS

T = TypeVar("T")
CHUNK = 2048
"""Tokens whose logits are held in float32 at a time, on a device."""
CHUNK_BYTES = 1 << 19
"""And in host memory, where what leaves the cache costs more than the arithmetic."""


class Group(NamedTuple):
    """A process group, and this process's place in it."""

    group: Any
    size: int
    rank: int

    def reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """All-reduces in place; nothing to do alone."""
        if self.size > 1:
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor


def groups() -> tuple[Group, Group]:
    """The tensor- and the context-parallel group; alone where Megatron's state was not initialised."""
    from megatron.core import parallel_state as state

    if not state.is_initialized():
        return Group(None, 1, 0), Group(None, 1, 0)
    tensor = Group(
        state.get_tensor_model_parallel_group(),
        state.get_tensor_model_parallel_world_size(),
        state.get_tensor_model_parallel_rank(),
    )
    context = Group(
        state.get_context_parallel_group(),
        state.get_context_parallel_world_size(),
        state.get_context_parallel_rank(),
    )
    return tensor, context


def log_probs(
    logits_V: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float,
    tensor: Group,
    guard: Guard,
    mask: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Log-probs of `labels` [B, S] from logits [B, S, V] split over the tensor-parallel group; float32 [B, S].

    Step for step what `vocab_parallel_cross_entropy` does, whose negative it equals to the bit, but its input is left
    as it is. Three all-reduces of the labels' shape. In host memory only tokens of `mask` [B, S] are computed, the
    others are 0; on a device to choose would be to wait. None where this rank could not compute its part.
    """
    size = logits_V.shape[-1]
    chosen = _or(lambda: _chosen(mask, labels), guard)
    count = labels.numel() if chosen is None else chosen.numel()
    blank = torch.full((2, count), torch.nan, device=logits_V.device)
    alone = tensor.size == 1
    copied = chosen is not None or logits_V.dtype != torch.float32 or temperature != 1.0

    def parts() -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, slice]]:
        """Logits [n, V] in float32; where in them the labels are, which are another rank's, and whose they are."""
        own = labels.reshape(-1) - tensor.rank * size
        own = own if chosen is None else own[chosen]
        elsewhere = (own < 0) | (own >= size)
        own, flat = own.masked_fill(elsewhere, 0), logits_V.detach().reshape(-1, size)
        step = max(1, CHUNK_BYTES // (4 * size)) if flat.is_cpu else CHUNK
        # Rows that are picked go into the same memory chunk after chunk: fresh pages cost as much as the arithmetic.
        held = None if chosen is None else flat.new_empty(min(step, count), size)
        for start in range(0, count, step):
            at = slice(start, start + step)
            if chosen is None or held is None:
                exact = flat[at].float()
            else:
                exact = torch.index_select(flat, 0, chosen[at], out=held[: len(chosen[at])]).float()
            yield exact if temperature == 1.0 else exact / temperature, own[at], elsewhere[at], at

    def tops() -> torch.Tensor:
        found = torch.empty_like(blank[0])
        for part, _, _, at in parts():
            found[at] = part.amax(-1)
        return found

    def sums() -> torch.Tensor:
        both = torch.empty_like(blank)
        for part, index, elsewhere, at in parts():
            top = (part.amax(-1) if alone else tops_N[at])[:, None]
            shifted = part.sub_(top) if copied else part - top
            both[0, at] = shifted.gather(1, index[:, None])[:, 0].masked_fill(elsewhere, 0.0)
            both[1, at] = shifted.exp_().sum(-1)
        return both

    with torch.no_grad():
        if not alone:
            mine = _or(tops, guard)
            tops_N = tensor.reduce(blank[0].clone() if mine is None else mine, dist.ReduceOp.MAX)
        mine = _or(sums, guard)
        found_N, total_N = (blank if mine is None else mine).unbind()
        # Apart, because the order of a reduction's additions depends on its shape.
        found_N, total_N = tensor.reduce(found_N.contiguous()), tensor.reduce(total_N.contiguous())
        if mine is None:
            return None
        logps = found_N - total_N.log()
        if chosen is not None:
            logps = torch.zeros(labels.numel()).index_copy_(0, chosen, logps)
        return logps.view(labels.shape)


def _chosen(mask: torch.Tensor | None, labels: torch.Tensor) -> torch.Tensor | None:
    """Indices of the masked tokens in host memory; None: all."""
    if mask is None or not mask.is_cpu or not labels.is_cpu or mask.numel() != labels.numel():
        return None
    return mask.reshape(-1).nonzero()[:, 0]


def _or(compute: Callable[[], T], guard: Guard) -> T | None:
    """What it computes, or None where that failed here."""
    try:
        return compute()
    except Exception as error:
        if guard.raise_errors:
            raise
        guard.caught("megatron_parallel", error)
        return None


def place(mask_BS: torch.Tensor, context: Group, guard: Guard) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Each token's index among its response's sampled tokens [B, S], and the responses' lengths [B].

    Under context parallelism each rank holds two chunks of every row, the `rank`-th from either end (Megatron's
    `get_batch_on_this_cp_rank`). One small all-reduce. None where this rank could not count.
    """
    held = [context.rank, 2 * context.size - 1 - context.rank]
    counts = torch.zeros(mask_BS.shape[0], 2 * context.size, dtype=torch.int64, device=mask_BS.device)

    def count() -> torch.Tensor:
        chunks = mask_BS.ne(0).view(mask_BS.shape[0], 2, -1).long()
        counts[:, held] = chunks.sum(-1)
        return chunks

    chunks = _or(count, guard)
    context.reduce(counts)
    if chunks is None:
        return None
    before = counts.cumsum(1) - counts
    positions = chunks.cumsum(-1) - 1 + before[:, held, None]
    return positions.view(mask_BS.shape), counts.sum(1)


class Completion:
    """Completes a table of sums per sequence [B, K] over the context-parallel group: `observe`'s `sequence_sums`."""

    def __init__(self, context: Group) -> None:
        self.context = context
        self.met = False

    def __call__(self, table_BK: torch.Tensor) -> torch.Tensor:
        self.met = True
        return self.context.reduce(table_BK)

    def settle(self, rows: int, device: torch.device) -> None:
        """Comes to the collective where `observe` did not; the sequences concerned then count nowhere."""
        if not self.met:
            self(torch.full((rows, len(COLUMNS)), torch.nan, dtype=torch.float64, device=device))


def agree(enabled: bool) -> tuple[bool, Callable[[Any], Any] | None]:
    """Whether all ranks of the world are enabled, and the first one's broadcast over CPU memory; called by all.

    A group of its own, on gloo: objects over NCCL would have every step wait for the device.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return enabled, None
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, enabled)
    if not all(said):
        return False, None
    group = dist.new_group(backend="gloo")

    def broadcast(value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, src=0, group=group)
        return box[0]

    return True, broadcast


def digest(parameters: list[torch.Tensor]) -> torch.Tensor:
    """A fingerprint [1] of the parameters' bits and their places; int64, wrapping around."""
    total = torch.zeros(1, dtype=torch.int64, device=parameters[0].device)
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    for parameter in parameters:
        flat = parameter.detach().reshape(-1)
        bits = flat.view(integer[flat.element_size()])
        for start in range(0, bits.numel(), 1 << 24):
            part = bits[start : start + (1 << 24)].long()
            odd = torch.arange(start, start + part.numel(), device=part.device) * 2 + 1
            total = total * 1_000_003 + (part * odd).sum()
    return total


def equal_over(parameters: list[torch.Tensor], group: Any) -> bool:
    """Whether all ranks of `group` hold the same bits. A collective, and it waits for the device."""
    own = digest(parameters)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, own, group=group)
    return all(bool(torch.equal(own, other)) for other in every)
