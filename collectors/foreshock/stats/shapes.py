"""What `observe` was handed, checked by metadata alone: shapes, dtypes, devices; never a value, which would
synchronise.

Legend: S sequences, T positions, N packed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from foreshock.stats.layout import SENTINEL

SequenceSums = Callable[[torch.Tensor], torch.Tensor]
Ids = Sequence[int] | torch.Tensor


@dataclass(slots=True)
class Batch:
    """One call's tensors, detached and on one device: padded [S, T], or packed [N] with `cu_seqlens` [S + 1]."""

    a: torch.Tensor
    b: torch.Tensor
    mask: torch.Tensor | None
    """bool, or None where every token counts"""
    cu_seqlens: torch.Tensor | None
    seq_ids: Ids | None
    token_ids: torch.Tensor | None
    positions: torch.Tensor | None
    clip_range: tuple[float, float] | None
    """bounds of δ: the logarithms of the host's bounds of e^δ"""
    lengths: torch.Tensor | None
    """sampled tokens of each whole response [S], where rows are pieces of it"""
    placed: bool
    """whether each token's position within its response is known"""

    @property
    def sequences(self) -> int:
        return self.a.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1


def batch_of(
    a: torch.Tensor,
    b: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    clip_range: tuple[float, float] | None,
    seq_ids: Ids | None,
    cu_seqlens: Ids | None,
    token_ids: torch.Tensor | None,
    positions: torch.Tensor | None,
    lengths: Ids | None,
    pieces: bool,
) -> Batch:
    """The batch, or ValueError naming the tensor whose shape or dtype does not fit. Costs no look at any value.

    `pieces`: rows are parts of sequences, whose positions are known only from `positions` and `lengths` together.
    """
    shape, device = a.shape, a.device
    for name, tensor in (("a", a), ("b", b)):
        if not tensor.is_floating_point():
            raise ValueError(f"{name} must hold floating-point log-probs, got {tensor.dtype}")
    for name, extra in (("b", b), ("mask", mask), ("token_ids", token_ids), ("positions", positions)):
        if extra is not None and extra.shape != shape:
            raise ValueError(f"{name} has shape {tuple(extra.shape)}, a has {tuple(shape)}")
    edges = None if cu_seqlens is None else _edges(cu_seqlens, a)
    if edges is None and len(shape) != 2:
        raise ValueError(f"a must be [sequences, positions], or packed with cu_seqlens; got {tuple(shape)}")
    sequences = shape[0] if edges is None else edges.shape[0] - 1
    if seq_ids is not None and len(seq_ids) != sequences:
        raise ValueError(f"{len(seq_ids)} seq_ids for {sequences} sequences")
    if lengths is not None and len(lengths) != sequences:
        raise ValueError(f"{len(lengths)} lengths for {sequences} sequences")

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            tensor = tensor.detach()
        if tensor.device != device:
            tensor = tensor.to(device, non_blocking=True)
        return tensor if edges is None else tensor.reshape(-1)

    keep = None
    if mask is not None:
        keep = _as_bool(placed(mask))
    return Batch(
        a=placed(a),
        b=placed(b),
        mask=keep,
        cu_seqlens=edges,
        seq_ids=seq_ids,
        token_ids=None if token_ids is None else placed(token_ids),
        positions=None if positions is None else placed(positions),
        clip_range=_log_range(clip_range),
        lengths=None if lengths is None else integers(lengths, device),
        placed=not pieces or (positions is not None and lengths is not None),
    )


def _as_bool(mask: torch.Tensor) -> torch.Tensor:
    """Non-zero as a bool; on the host by numpy, which is ten times quicker where it knows the dtype."""
    if not mask.is_cpu or mask.dtype in (torch.bool, torch.bfloat16):
        return mask.bool()
    return torch.from_numpy(mask.numpy().astype(bool))


def integers(values: Ids, device: torch.device) -> torch.Tensor:
    """A list or tensor of integers as int64 on `device`, not waited for."""
    tensor = values.detach() if isinstance(values, torch.Tensor) else torch.tensor(list(values), device="cpu")
    return tensor.to(device, torch.int64, non_blocking=True)


def _edges(cu_seqlens: Ids, a: torch.Tensor) -> torch.Tensor:
    if a.dim() not in (1, 2) or (a.dim() == 2 and a.shape[0] != 1):
        raise ValueError(f"packed rows are [tokens] or [1, tokens], got {tuple(a.shape)}")
    if len(cu_seqlens) < 2 or (isinstance(cu_seqlens, torch.Tensor) and cu_seqlens.dim() != 1):
        raise ValueError(f"cu_seqlens must be [sequences + 1] integers, got {len(cu_seqlens)} rows")
    return integers(cu_seqlens, a.device)


def _log_range(clip_range: tuple[float, float] | None) -> tuple[float, float] | None:
    if clip_range is None:
        return None
    low, high = clip_range
    if not 0.0 <= low <= 1.0 <= high:
        raise ValueError(f"clip_range bounds the ratio e^δ, so 0 ≤ low ≤ 1 ≤ high; got {clip_range}")
    return (math.log(low) if low > 0 else -math.inf, math.log(high) if math.isfinite(high) else math.inf)


# −9999 as the narrow dtypes round it; looked up, since to compute it would read a tensor.
_ROUNDED_SENTINEL = {torch.bfloat16: -9984.0, torch.float16: -10000.0}


def sentinel_of(dtype: torch.dtype) -> float:
    """−9999 as that dtype rounds it."""
    return _ROUNDED_SENTINEL.get(dtype, SENTINEL)
