"""Scores the same rows again under one change at a time, and says how far each change moves the log-probs.

Read it so: `repeat` is the floor of this machine. A variant that moves far above it names what the two passes of this
trainer differ by; a run whose `policy.kl_k2` is far above every variant has a fault that no numerics explain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

VARIANTS: Final[dict[str, str]] = {
    "repeat": "the same forward twice",
    "other_partition": "other micro-batches, same padding",
    "no_padding": "each row alone, unpadded",
    "other_mode": "train for eval (dropout, recomputation)",
    "fp32": "in float32",
    "after_resync": "after a forced synchronisation of parameters",
}
Score = Callable[[str], Any]
"""`score(variant)` → log-probs [rows, positions] of the same rows; `score("base")` is the unchanged forward. None: this
rank has no log-probs (another pipeline stage), but has taken part."""


def run(score: Score, mask: Any, variants: Sequence[str]) -> dict[str, Any]:
    """{variant: {kl_k2, abs_mean, abs_max, tokens, moved}} of each variant against the base, over masked tokens.

    `kl_k2` in nats; `moved` is the share of tokens that changed at all. A variant that raises is reported with `error`
    and the others still run. Raises ValueError for an unknown variant. Costs one forward each, and one for the base.
    """
    if unknown := [v for v in variants if v not in VARIANTS]:
        raise ValueError(f"unknown variant {unknown[0]!r}; known are {', '.join(VARIANTS)}")
    base = score("base")
    found: dict[str, Any] = {}
    for variant in variants:
        try:
            other = score(variant)
        except Exception as error:
            found[variant] = {"error": f"{type(error).__name__}: {error}"[:200]}
            continue
        if base is not None and other is not None:
            found[variant] = compared(base, other, mask)
    return {"variants": found}


def compared(a: Any, b: Any, mask: Any) -> dict[str, float]:
    """Differences over masked tokens; sums rather than means, so that ranks add up (`merged`)."""
    keep = (mask > 0).to(a.device)
    delta = (a.double() - b.to(a.device).double())[keep]
    return {
        "half_square": float(0.5 * (delta * delta).sum()), "abs": float(delta.abs().sum()),
        "abs_max": float(delta.abs().max()) if delta.numel() else 0.0,
        "moved": float((delta != 0).sum()), "tokens": float(delta.numel()),
    }  # fmt: skip


def merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of all ranks as one: what `Command.detail` carries and the diagnosis reads."""
    variants: dict[str, Any] = {}
    names = {name: None for part in parts for name in part.get("variants", {})}
    for name in names:
        every = [part["variants"][name] for part in parts if name in part.get("variants", {})]
        errors = [figures["error"] for figures in every if "error" in figures]
        tokens = sum(figures.get("tokens", 0.0) for figures in every)
        if errors or not tokens:
            variants[name] = {"error": errors[0] if errors else "no tokens"}
            continue
        variants[name] = {
            "kl_k2": sum(f["half_square"] for f in every) / tokens, "abs_mean": sum(f["abs"] for f in every) / tokens,
            "abs_max": _largest([f["abs_max"] for f in every]), "moved": sum(f["moved"] for f in every) / tokens,
            "tokens": tokens,
        }  # fmt: skip
    return {"probe": variants}


def _largest(values: Sequence[float]) -> float:
    """As max, but a NaN stays one."""
    return math.nan if any(math.isnan(v) for v in values) else max(values)
