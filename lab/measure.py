"""The lab's own record of a run: plain float64 figures of each pair, computed without the SDK.

They say what the trainer observed whether or not a monitor listens, and are what the determinism tests compare and
what README.md's table is made of.
"""

import math
from collections import defaultdict

import torch
from torch import Tensor


class PairSums:
    """Sums of one pair over micro-batches. Shapes: [rows, response positions]."""

    def __init__(self) -> None:
        self._a: list[Tensor] = []
        self._b: list[Tensor] = []

    def add(self, a: Tensor, b: Tensor, mask: Tensor) -> None:
        """Takes the masked tokens of a micro-batch."""
        counted = mask.bool()
        self._a.append(a.detach()[counted].double())
        self._b.append(b.detach()[counted].double())

    def figures(self) -> dict[str, float]:
        """`kl_k2`, `kl_k3`, `abs_max`, `zero_share`, `logp_pearson` as in the signal catalogue; NaN for no tokens."""
        a, b = torch.cat(self._a), torch.cat(self._b)
        if not a.numel():
            return dict.fromkeys(("kl_k2", "kl_k3", "abs_max", "zero_share", "logp_pearson"), math.nan)
        delta = a - b
        centred_a, centred_b = a - a.mean(), b - b.mean()
        scale = (centred_a.square().sum() * centred_b.square().sum()).sqrt()
        return {
            "kl_k2": float(0.5 * delta.square().mean()),
            "kl_k3": float((delta.exp() - 1 - delta).mean()),
            "abs_max": float(delta.abs().max()),
            "zero_share": float((delta == 0).double().mean()),
            "logp_pearson": float((centred_a * centred_b).sum() / scale),
        }


class StepRecord:
    """Everything that one step observed, by pair."""

    def __init__(self) -> None:
        self._pairs: defaultdict[str, PairSums] = defaultdict(PairSums)

    def add(self, pair: str, a: Tensor, b: Tensor, mask: Tensor) -> None:
        """One micro-batch of a pair."""
        self._pairs[pair].add(a, b, mask)

    def figures(self) -> dict[str, float]:
        """`<pair>.<statistic>` of every pair observed."""
        return {
            f"{pair}.{statistic}": value
            for pair, sums in self._pairs.items()
            for statistic, value in sums.figures().items()
        }
