"""Which illness leads to which: a small table, read to link a precursor to its consequence.

Sources: the lab's collapses (a training-pass fault breaks the reward 7–9 steps after `policy.kl_k2` rose, an engine
fault 5–24 steps after `mismatch.kl_k3`), and the order of events in published collapses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

LEADS_TO: Final[Mapping[str, frozenset[str]]] = {
    "semantics_differ": frozenset({"rollout_mismatch", "is_degeneracy"}),
    "missing_ranks": frozenset({"silent_run"}),
    "mixed_groups": frozenset(
        {"reward_collapse", "entropy_collapse", "length_runaway", "length_collapse", "kl_blowup"}
    ),
    "stale_weights": frozenset({"rollout_mismatch", "is_degeneracy", "clip_saturation", "reward_collapse"}),
    "stale_cache": frozenset({"rollout_mismatch", "outlier_sequences", "is_degeneracy", "reward_collapse"}),
    "frozen_update": frozenset({"reward_collapse"}),
    "onpolicy_disagreement": frozenset(
        {"clip_saturation", "kl_blowup", "gradient_spike", "entropy_collapse", "entropy_blowup", "length_runaway",
         "length_collapse", "non_finite", "reward_collapse", "dead_groups"}
    ),
    "rollout_mismatch": frozenset(
        {"is_degeneracy", "outlier_sequences", "clip_saturation", "kl_blowup", "gradient_spike", "entropy_collapse",
         "entropy_blowup", "length_runaway", "length_collapse", "non_finite", "reward_collapse", "dead_groups"}
    ),
    "is_degeneracy": frozenset({"gradient_spike", "entropy_collapse", "reward_collapse"}),
    "outlier_sequences": frozenset({"is_degeneracy", "gradient_spike"}),
    "gradient_spike": frozenset({"kl_blowup", "entropy_collapse", "entropy_blowup", "non_finite", "reward_collapse"}),
    "clip_saturation": frozenset({"kl_blowup", "reward_collapse"}),
    "kl_blowup": frozenset({"entropy_blowup", "entropy_collapse", "length_runaway", "reward_collapse", "non_finite"}),
    "non_finite": frozenset({"reward_collapse", "silent_run", "gradient_spike"}),
    "entropy_collapse": frozenset({"dead_groups", "reward_collapse"}),
    "entropy_blowup": frozenset({"length_runaway", "truncation_surge", "reward_collapse"}),
    "length_runaway": frozenset({"truncation_surge", "reward_collapse"}),
    "length_collapse": frozenset({"reward_collapse"}),
    "truncation_surge": frozenset({"reward_collapse"}),
    "reward_hacking": frozenset({"length_runaway", "entropy_collapse"}),
    "reward_collapse": frozenset({"dead_groups"}),
}  # fmt: skip

PRECURSORS: Final = frozenset(LEADS_TO) - {"reward_collapse", "missing_ranks", "semantics_differ", "reward_hacking"}
"""Illnesses of the training itself, after which a checkpoint is no longer trusted."""


def can_cause(rule: str, consequence: str) -> bool:
    """True where `rule` can lead to `consequence`, directly or over others."""
    seen, frontier = {rule}, [rule]
    while frontier:
        for following in LEADS_TO.get(frontier.pop(), frozenset()):
            if following == consequence:
                return True
            if following not in seen:
                seen.add(following)
                frontier.append(following)
    return False


def upstream_first(rule: str) -> tuple[int, str]:
    """Sort key: illnesses that can cause many others come before those that can cause few."""
    return -sum(can_cause(rule, other) for other in LEADS_TO), rule
