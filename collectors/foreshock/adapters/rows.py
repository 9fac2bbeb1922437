"""A micro-batch as an adapter hands it on: what `Monitor.observe` compares, token by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Rows:
    """All of one shape, padded or packed; what the micro-batch does not hold is None."""

    current: Any
    old: Any
    rollout: Any
    reference: Any
    advantages: Any
    mask: Any
    """1 on sampled tokens, before any rejection."""
    token_ids: Any
    cu_seqlens: Any
    """Where packed rows begin and end; None where they are padded."""
