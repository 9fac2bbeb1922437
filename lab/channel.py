"""How weights travel from the trainer to the engine.

The channel keeps a ring of the last pushes. Healthy, the engine loads the newest one at once. The version that the
engine reports is the one that was pushed: a channel that delivers an older buffer does not know that it did, which is
what makes a stale engine silent.
"""

from collections import deque

from .engine import Engine, checksum
from .model import Weights

PUSHES_KEPT = 24


class WeightChannel:
    """Trainer to engine, through a ring of buffers (`delay` pushes behind) until `direct`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.delay = 0
        self.delivering = True
        self.direct = False
        self._ring: deque[Weights] = deque(maxlen=PUSHES_KEPT)

    def push(self, weights: Weights, version: int) -> None:
        """Offers the weights of this version to the engine."""
        if self.direct:
            self.engine.load(weights, version)
            return
        self._ring.append({name: w.detach().clone() for name, w in weights.items()})
        if self.delivering:
            self.engine.load(self._ring[max(0, len(self._ring) - 1 - self.delay)], version)
        self.engine.version = version

    def resync(self, weights: Weights, version: int) -> None:
        """Loads the weights past the ring, flushes the KV cache, and does without the ring from now on.

        Raises RuntimeError when the engine's checksum is not the trainer's afterwards: an engine that stores its
        weights quantised cannot be cured by a push.
        """
        self._ring.clear()
        self.direct = True
        self.engine.load(weights, version)
        self.engine.flush()
        wanted, got = checksum(weights), self.engine.checksum
        if wanted != got:
            raise RuntimeError(f"engine checksum {got:08x} after the push, trainer {wanted:08x}")
