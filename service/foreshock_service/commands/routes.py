"""Which commands an illness asks for, in order: routed by the three edges, pure.

| fault | ladder |
|---|---|
| training pass | `resync_trainer`, then `rollback`; the other way round once the reward has gone |
| scoring pass | nothing: mostly harmless, it warns |
| engine | `resync_engine`, then `enable_is_correction`; `rollback` if the reward has gone nevertheless |
| undecided | `probe` (score again) where announced, else nothing |
| non-finite | `skip_update` while only gradients are, else `rollback` |
| groups mixed across prompts | `pause`: no weights are at fault, only a person can mend the data path |
| reward collapsed after a known cause that is over | `rollback` |

`rollback` includes both re-syncs. IS correction is never an answer to a training-pass fault: it does nothing there
(measured in the lab: final reward .08 with it, .06 without).
The last rung, `pause`, is only ever proposed: it waits for a person in every mode.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from foreshock_service.rules.interface import Edge

Trial = Literal["waiting", "helped", "over", "again", "stop"]
"""What became of a kind on this evidence: open · it helped · tried in vain · may be tried again · a person said no."""

NEEDS_PERSON: Final = frozenset({"pause", "stop"})
"""Never approved by policy, in any mode."""
EDGE_RULES: Final = frozenset(
    {"onpolicy_disagreement", "rollout_mismatch", "stale_weights", "stale_cache", "is_degeneracy", "outlier_sequences"}
)
ENGINE_RULES: Final = frozenset({"stale_weights", "stale_cache"})
"""Illnesses that name the engine by themselves."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """All that routing knows of an incident."""

    rule: str
    edge: Edge | None = None
    announced: frozenset[str] = frozenset()
    reward_gone: bool = False
    """The reward has left its range, or the rewards tie at the bottom, where no gradient is left."""
    stale_engine: bool = False
    """A stale-weights signature is present: correction would only hide it."""
    wrong_rows: bool = False
    """The signature says shifted labels or misaligned rows: no weights are at fault."""
    only_gradients: bool = False
    """Nothing but gradients is non-finite: the weights may still be whole."""
    checkpoint: bool = False
    """A healthy checkpoint before the onset exists."""
    upstream: str | None = None
    """The rule of the incident that led here."""
    upstream_edge: Edge | None = None
    upstream_active: bool = False
    trials: Mapping[str, Trial] = {}


def ladder(facts: Facts) -> tuple[str, ...]:
    """The kinds to try, in order, before what was announced or tried is considered."""
    if facts.rule in EDGE_RULES:
        # A consequence of another edge's incident has no ladder of its own while that one is open.
        return () if facts.upstream_active and facts.upstream in EDGE_RULES else _by_edge(facts)
    if facts.rule == "frozen_update":
        return ("resync_trainer", "rollback", "pause")
    if facts.rule == "mixed_groups":
        return ("pause",)
    if facts.rule == "non_finite":
        return ("skip_update", "rollback", "pause") if facts.only_gradients else ("rollback", "skip_update", "pause")
    if facts.rule == "reward_collapse" and facts.upstream is not None:
        # While the cause is open its own ladder decides, knowing that the reward has gone.
        if facts.upstream_active or facts.upstream_edge == "scoring_pass":
            return ()
        return ("rollback", "pause")
    return ()


def next_kind(facts: Facts) -> str | None:
    """The next command, or None: nothing to do, nothing left, or something is still being tried."""
    if any(trial in ("waiting", "stop") for trial in facts.trials.values()):
        return None
    for kind in ladder(facts):
        trial = facts.trials.get(kind)
        if trial in ("over", "helped") or kind not in facts.announced:
            continue
        if kind == "rollback" and not facts.checkpoint:
            continue
        if kind == "enable_is_correction" and not correction_allowed(facts):
            continue
        return kind
    return None


def correction_allowed(facts: Facts) -> bool:
    """False while a stale-weights signature is present, unless a re-sync has been carried out and excluded that."""
    return not facts.stale_engine or facts.trials.get("resync_engine") == "over"


def _by_edge(facts: Facts) -> tuple[str, ...]:
    edge: Edge | None = "engine" if facts.edge is None and facts.rule in ENGINE_RULES else facts.edge
    if facts.wrong_rows and edge != "scoring_pass":
        return ("pause",)
    if edge == "training_pass":
        if facts.reward_gone:
            return ("rollback", "resync_trainer", "pause")
        return ("resync_trainer", "rollback", "pause")
    if edge == "engine":
        last = ("rollback", "pause") if facts.reward_gone else ()
        return ("resync_engine", "enable_is_correction", *last)
    if edge == "undecided":
        return ("probe",)
    return ()
