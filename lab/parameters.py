"""The trainer's parameters: a float32 master that the optimizer moves, and bfloat16 views that the passes read.

As in a sharded trainer, a pass does not read the master. `gather` rounds the master into a new *generation* of views
and a pass reads from the newest of them. Each pass (training, scoring) has a cache of its own.
"""

from collections import deque

import torch

from .engine import digests
from .model import Weights, rounded

GENERATIONS_KEPT = 40


class ViewCache:
    """Gathered views of one pass, newest last.

    `lag` generations behind are the names in `lagging`: nothing in a healthy run, and what a cache does that fills
    lazily at the gather and is not told that the parameters moved.
    """

    def __init__(self) -> None:
        self.generations: deque[Weights] = deque(maxlen=GENERATIONS_KEPT)
        self.lagging: frozenset[str] = frozenset()
        self.lag = 0
        self.bypassed = False

    def gather(self, master: Weights) -> None:
        """Adds a generation: the master as it is now, rounded to bfloat16."""
        self.generations.append({name: rounded(w.detach()) for name, w in master.items()})

    def views(self, master: Weights) -> Weights:
        """What the pass computes with. After `bypass` it is gathered on the spot and the cache is not read."""
        if self.bypassed or not self.generations:
            return {name: rounded(w.detach()) for name, w in master.items()}
        newest = self.generations[-1]
        old = self.generations[max(0, len(self.generations) - 1 - self.lag)]
        return {name: (old if name in self.lagging else newest)[name] for name in master}

    def drop(self) -> None:
        """Forgets every view; the next pass sees the next gather."""
        self.generations.clear()

    def bypass(self) -> None:
        """Drops the views, and gathers before every forward from now on."""
        self.drop()
        self.bypassed = True


class Parameters:
    """The master, the optimizer's references to it, and the two caches of views."""

    def __init__(self, weights: Weights, learning_rate: float) -> None:
        self.master: Weights = {name: w.clone() for name, w in weights.items()}
        self.optimizer = torch.optim.Adam(self.master.values(), lr=learning_rate)
        self.training_views, self.scoring_views = ViewCache(), ViewCache()
        self._digests: dict[str, int] = {}
        self.gather()

    def gather(self) -> None:
        """Both passes get the master as it is now."""
        for cache in (self.training_views, self.scoring_views):
            if not cache.bypassed:
                cache.gather(self.master)

    @property
    def optimized(self) -> list[torch.Tensor]:
        """The tensors that the optimizer moves: in a healthy trainer those of the master, in its order."""
        return list(self.optimizer.param_groups[0]["params"])

    def rebuild_references(self, tensors: list[torch.Tensor] | None = None) -> None:
        """Points the optimizer at the master (or at `tensors`, shaped alike), keeping its moments."""
        tensors = tensors if tensors is not None else list(self.master.values())
        for old, new in zip(self.optimized, tensors, strict=True):
            if old is not new and old in self.optimizer.state:
                self.optimizer.state[new] = self.optimizer.state.pop(old)
        self.optimizer.param_groups[0]["params"] = tensors

    def resync(self) -> None:
        """Master to model: references rebuilt, views dropped, a gather before every forward from now on.

        Raises RuntimeError when a pass would still read something other than the master.
        """
        self.rebuild_references()
        self.training_views.bypass()
        self.scoring_views.bypass()
        wanted = digests(self.master)
        for name, cache in (("training", self.training_views), ("scoring", self.scoring_views)):
            different = [n for n, digest in digests(cache.views(self.master)).items() if digest != wanted[n]]
            if different:
                raise RuntimeError(f"the {name} pass still differs from the master in {', '.join(different)}")

    def changed_share(self) -> float:
        """Share of tensors whose bfloat16 digest moved since the last call; 1.0 at the first."""
        before, self._digests = self._digests, digests(self.master)
        return sum(self._digests[name] != before.get(name) for name in self.master) / len(self.master)
