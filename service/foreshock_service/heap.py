"""The garbage collector told what to leave alone: a full collection of everything imported costs 100 ms and more."""

from __future__ import annotations

import gc

YOUNG, MIDDLE, OLD = 50_000, 20, 50
"""An envelope of 16 frames makes some 2,000 containers, all gone after its commit: nothing to look for so soon."""


def settle() -> None:
    """Call once a process has made what lives as long as it does: none of that is ever looked at again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, OLD)
