"""Links precursors to consequences and tells a run's illness in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from foreshock_service.check.judge import Incident
from foreshock_service.incidents.causes import can_cause, upstream_first

PHRASES: Final[dict[str, str]] = {
    "non_finite": "NaN or infinity from step {}",
    "mixed_groups": "advantage groups mixed from step {}",
    "frozen_update": "parameters frozen from step {}",
    "semantics_differ": "unlike log-probs compared from step {}",
    "onpolicy_disagreement": "step-0 disagreement from step {}",
    "rollout_mismatch": "trainer and engine apart from step {}",
    "stale_weights": "engine weights stale from step {}",
    "stale_cache": "KV cache stale from step {}",
    "is_degeneracy": "importance weights degenerate from step {}",
    "outlier_sequences": "outlier sequences from step {}",
    "kl_blowup": "KL blew up from step {}",
    "entropy_collapse": "entropy down from step {}",
    "entropy_blowup": "entropy up from step {}",
    "gradient_spike": "gradients spiked from step {}",
    "clip_saturation": "clipping saturated from step {}",
    "length_runaway": "length ran away from step {}",
    "length_collapse": "length collapsed from step {}",
    "truncation_surge": "responses cut from step {}",
    "reward_collapse": "reward broke at step {}",
    "reward_hacking": "reward hacked from step {}",
    "dead_groups": "groups without signal from step {}",
    "silent_run": "silent from step {}",
    "missing_ranks": "ranks missing from step {}",
}


def link(incidents: Sequence[Incident]) -> None:
    """Gives each incident the earliest one of its attempt that was open near its onset and can lead to it."""
    ordered = sorted(incidents, key=_in_order)
    for i, later in enumerate(ordered):
        later.precursor = None
        later.consequences.clear()
        for earlier in ordered[:i]:
            if earlier.attempt != later.attempt or not can_cause(earlier.rule, later.rule):
                continue
            if earlier.resolved_step is None or earlier.resolved_step >= later.onset_step:
                later.precursor = earlier
                earlier.consequences.append(later)
                break


def chains(incidents: Sequence[Incident]) -> list[list[Incident]]:
    """Each precursor with all that followed from it, in order of onset; incidents without either stand alone."""
    roots = sorted((i for i in incidents if i.precursor is None), key=_in_order)
    return [[root, *sorted(_following(root), key=_in_order)] for root in roots]


def told(chain: Sequence[Incident]) -> str:
    """`step-0 disagreement from step 26, entropy up from 31, reward broke at 34`."""
    parts = []
    for i, incident in enumerate(chain):
        phrase = PHRASES.get(incident.rule, incident.rule + " from step {}").format(incident.onset_step)
        parts.append(phrase if i == 0 else phrase.replace(" step ", " "))
    return ", ".join(parts)


def _following(root: Incident) -> list[Incident]:
    found: list[Incident] = []
    for incident in root.consequences:
        found.append(incident)
        found.extend(_following(incident))
    return found


def _in_order(incident: Incident) -> tuple[int, int, tuple[int, str]]:
    return incident.attempt, incident.onset_step, upstream_first(incident.rule)
