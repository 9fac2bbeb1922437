"""Mean, standard deviation and largest magnitude of advantages, over a step's micro-batches, without a device sync."""

from __future__ import annotations

from typing import Any


class Advantages:
    """Sums on the device that the advantages live on: count, Σx, Σx², max|x|, of masked tokens, in float64."""

    def __init__(self) -> None:
        self._sums: Any = None
        self._largest: Any = None

    def add(self, advantages: Any, mask: Any) -> None:
        """Adds a micro-batch: `advantages` of `mask`'s shape, or one per row."""
        import torch

        wide = torch.float32 if advantages.device.type == "mps" else torch.float64
        x = advantages.detach().to(wide)
        if mask is None:
            weight = torch.ones_like(x)
        else:
            weight = mask.detach().to(device=x.device, dtype=wide, non_blocking=True)
            if x.dim() == weight.dim() - 1:
                x = x.unsqueeze(-1)
            x = x.expand(weight.shape)
        x = torch.where(weight != 0, x, torch.zeros((), dtype=wide, device=x.device))
        sums = torch.stack([weight.sum(), (weight * x).sum(), (weight * x * x).sum()])
        largest = x.abs().max() if x.numel() else torch.zeros((), dtype=wide, device=x.device)
        self._sums = sums if self._sums is None else self._sums + sums
        self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)

    def scalars(self) -> dict[str, Any]:
        """Catalogue name → 0-d tensor; NaN where no token counted."""
        count, total, squares = self._sums.unbind()
        mean = total / count
        deviation = (squares / count - mean * mean).clamp(min=0).sqrt()
        return {"advantage.mean": mean, "advantage.std": deviation, "advantage.abs_max": self._largest}
