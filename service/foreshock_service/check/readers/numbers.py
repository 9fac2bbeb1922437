"""Numbers as logs spell them, nested mappings flattened, and step numbers found among them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

MAX_NAMES: Final = 2048
"""Names of one row; what is beyond is dropped."""
MAX_DEPTH: Final = 4
WRAPPED: Final = re.compile(r"^(?:np\.\w+|numpy\.\w+|tensor|torch\.tensor|array)\(\[?\s*([^,\s\]\)]+)")
WRAPPERS: Final = frozenset({"metrics", "data", "values", "logs", "log", "row", "summary", "scalars"})
"""Mappings of this name are packaging: what is inside keeps its own name."""
STEPS: Final = (
    "step", "global_step", "train/global_step", "training/global_step", "trainer/global_step", "system/step",
    "train/step", "training_step", "global_steps", "Step", "iteration", "iter", "_step",
)  # fmt: skip
"""Names under which a step number is logged, the most trusted first."""
_NOT_SERIES: Final = frozenset(
    {*STEPS, "rollout/step", "rollout_id", "epoch", "train/epoch", "training/epoch", "total_steps", "episode",
     "timestamp", "train_runtime", "train/train_runtime", "num_tokens", "train/num_tokens"}
)  # fmt: skip


def number(said: object) -> float | None:
    """A number, or None for what is none: NaN and infinities in any spelling are numbers, booleans are not."""
    if isinstance(said, bool):
        return None
    if isinstance(said, (int, float)):
        try:
            return float(said)
        except OverflowError:
            return math.inf if said > 0 else -math.inf
    if not isinstance(said, str) or not said or len(said) > 64:
        return None
    text = said.strip()
    if wrapped := WRAPPED.match(text):
        text = wrapped[1]
    try:
        return float(text)
    except ValueError:
        return None


def flat(said: Mapping[str, Any]) -> dict[str, float]:
    """Every number of a mapping; inner names are joined by a slash."""
    found: dict[str, float] = {}
    _flatten(said, "", found, MAX_DEPTH)
    return found


def split_step(values: Mapping[str, float]) -> tuple[int | None, dict[str, float]]:
    """The step number among the values, and the values that are series."""
    step = None
    for name in STEPS:
        value = values.get(name)
        if value is not None and 0 <= value < 2**53:
            step = int(value)
            break
    return step, {n: v for n, v in values.items() if n not in _NOT_SERIES and not n.startswith("_")}


def parsed_json(text: str | bytes) -> Any:
    """JSON, with bare NaN and Infinity as Python writes them. Raises ValueError."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        try:
            return json.loads(text)
        except RecursionError as error:
            raise ValueError("nested too deep") from error


def _flatten(said: Mapping[str, Any], prefix: str, found: dict[str, float], depth: int) -> None:
    for key, inner in said.items():
        if len(found) >= MAX_NAMES:
            return
        name = f"{prefix}{key}"
        if isinstance(inner, Mapping):
            if depth > 1:
                _flatten(inner, prefix if key in WRAPPERS else f"{name}/", found, depth - 1)
            continue
        value = number(inner[0] if isinstance(inner, list) and len(inner) == 1 else inner)
        if value is not None:
            found.setdefault(name, value)
