"""The illnesses that ship, in the order in which their evidence counts: invariants first, presets last.

Each is a module of this package that exports `RULE`. A new illness: its file, its page in docs/rules/, its line here.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, Final

from foreshock_service.rules.interface import Rule

NAMES: Final[tuple[str, ...]] = (
    "non_finite",
    "mixed_groups",
    "frozen_update",
    "semantics_differ",
    "onpolicy_disagreement",
    "rollout_mismatch",
    "stale_weights",
    "stale_cache",
    "is_degeneracy",
    "outlier_sequences",
    "kl_blowup",
    "entropy_collapse",
    "entropy_blowup",
    "gradient_spike",
    "clip_saturation",
    "length_runaway",
    "length_collapse",
    "truncation_surge",
    "reward_collapse",
    "reward_hacking",
    "dead_groups",
    "silent_run",
    "missing_ranks",
)


@cache
def rule_named(name: str) -> Rule[Any, Any]:
    """The rule of that name. Raises KeyError for a name that does not ship."""
    if name not in NAMES:
        raise KeyError(name)
    rule: Rule[Any, Any] = import_module(f"foreshock_service.rules.{name}").RULE
    return rule


def all_rules() -> tuple[Rule[Any, Any], ...]:
    """Every shipped rule, in order."""
    return tuple(rule_named(name) for name in NAMES)
