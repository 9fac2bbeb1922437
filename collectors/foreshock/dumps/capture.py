"""One observation's tensors, copied to host memory without waiting for their device. Runs on the training thread."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True)
class Observed:
    """One call of `observe`. Tensors are on the host once `ready`."""

    pair: str
    optimizer_step: int
    old_source: str
    clip_range: tuple[float, float] | None
    piece: bool
    tensors: dict[str, Any] = field(default_factory=dict)
    """`a`, `b`, and what else `observe` was given, by its argument's name; numbers stay numbers"""
    sentinels: dict[str, float] = field(default_factory=dict)
    size: int = 0
    """bytes held"""
    events: list[Any] = field(default_factory=list)

    def ready(self) -> bool:
        """Whether every copy has arrived."""
        return all(event.query() for event in self.events)


def size_of(a: Any, given: dict[str, Any]) -> int:
    """Bytes that a capture will hold, before it is made."""
    tensors = [v for v in given.values() if isinstance(v, torch.Tensor)]
    return sum(int(t.numel() * t.element_size()) for t in [a, *tensors])


def capture(
    pair: str,
    given: dict[str, Any],
    *,
    optimizer_step: int = 0,
    old_source: str = "same_weights",
    clip_range: tuple[float, float] | None = None,
    piece: bool = False,
) -> Observed:
    """Copies of the tensors in `given` (None values are left out); the host may reuse its own at once.

    Tensors in host memory cost a copy each; from a device one non-blocking copy to pinned memory each.
    """
    from foreshock.stats.shapes import sentinel_of

    if pair == "update":
        optimizer_step = max(1, optimizer_step)
    kept = Observed(pair, optimizer_step, old_source, clip_range, piece)
    devices = set()
    for name, value in given.items():
        if value is None:
            continue
        if not isinstance(value, torch.Tensor):
            kept.tensors[name] = value if isinstance(value, int | float) else list(value)
            continue
        tensor = value.detach()
        if name in ("a", "b"):
            kept.sentinels[name] = sentinel_of(tensor.dtype)
        kept.size += int(tensor.numel() * tensor.element_size())
        if tensor.device.type == "cpu":
            kept.tensors[name] = tensor.clone()
        else:
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            pinned.copy_(tensor, non_blocking=True)
            kept.tensors[name] = pinned
            devices.add(tensor.device)
    for device in devices:
        event = torch.get_device_module(device).Event()
        event.record()
        kept.events.append(event)
    return kept
