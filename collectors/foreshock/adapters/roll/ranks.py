"""Exchange between the trainer's ranks at step boundaries, over a gloo group of our own where there are several."""

from __future__ import annotations

from typing import Any


class Exchange:
    """Made on all ranks together, in `initialize`. Collective calls: every rank must come."""

    def __init__(self) -> None:
        import torch.distributed as dist

        ready = dist.is_available() and dist.is_initialized()
        self.world = dist.get_world_size() if ready else 1
        # Objects over NCCL would wait for the device; a group of its own does not disturb the host's order of calls.
        self.group: Any = dist.new_group(backend="gloo") if self.world > 1 else None

    def broadcast(self, value: Any) -> Any:
        """Rank 0's object on every rank."""
        import torch.distributed as dist

        if self.world == 1:
            return value
        held = [value]
        dist.broadcast_object_list(held, src=0, group=self.group)
        return held[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's object, by rank."""
        import torch.distributed as dist

        if self.world == 1:
            return [value]
        parts: list[Any] = [None] * self.world
        dist.all_gather_object(parts, value, group=self.group)
        return parts

    def agreed(self, value: bool) -> bool:
        """Whether all ranks say yes."""
        return all(self.gather(bool(value)))

    def total(self, *numbers: float) -> list[float]:
        """Sums over all ranks, in float64."""
        import torch
        import torch.distributed as dist

        held = torch.tensor(numbers, dtype=torch.float64)
        if self.world > 1:
            dist.all_reduce(held, group=self.group)
        return [float(x) for x in held]
