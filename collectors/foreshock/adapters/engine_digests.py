"""Digests of tensors where they lie: two sums of their bytes each, one small copy to the host for all of them.

Not cryptographic: made to see that weights moved, at the speed of reading them once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from foreshock.adapters.engine_weights import EMPTY

if TYPE_CHECKING:
    import torch

PIECE = 1 << 22
"""Words that are looked at together: bounds the memory taken (64 MiB on the device)."""


def digests(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Tensor → digest of its bytes, the order of its elements included. Waits for the device once, at the end.

    A tensor without bytes (an engine packed them away) gets `engine_weights.EMPTY`.
    """
    import torch

    found: dict[str, str] = {}
    sums: dict[torch.device, list[tuple[str, Any]]] = {}
    with torch.no_grad():
        for name, tensor in named:
            found[name] = EMPTY
            if tensor.numel():
                sums.setdefault(tensor.device, []).append((name, _sums(tensor)))
    for pairs in sums.values():
        for (name, _), (plain, weighted) in zip(pairs, torch.stack([p for _, p in pairs]).tolist(), strict=True):
            found[name] = f"{plain & 0xFFFFFFFFFFFFFFFF:016x}{weighted & 0xFFFFFFFFFFFFFFFF:016x}"
    return found


def of_worker(worker: Any) -> dict[str, str]:
    """Digests of the model of a vLLM worker; what `collective_rpc` runs in each."""
    rank = getattr(worker, "rank", 0)
    model = worker.model_runner.get_model()
    return {f"{rank}:{name}": digest for name, digest in digests(model.named_parameters()).items()}


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """[sum of words, sum of words times place], int64, wrapping."""
    import torch

    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    words = flat.view(torch.int32) if flat.numel() % 4 == 0 else flat
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for start, piece in enumerate(torch.split(words, PIECE)):
        wide = piece.to(torch.int64)
        place = torch.arange(piece.numel(), device=tensor.device) + start * PIECE
        total += torch.stack([wide.sum(), (wide * (place % 65521 + 1)).sum()])
    return total
