"""The causal table: no illness causes itself, and every name is an illness of the design."""

from __future__ import annotations

from foreshock_service.incidents.causes import LEADS_TO, PRECURSORS, can_cause, upstream_first
from foreshock_service.rules import illnesses

DESIGNED = {
    "onpolicy_disagreement", "rollout_mismatch", "stale_weights", "stale_cache", "non_finite", "kl_blowup",
    "is_degeneracy", "outlier_sequences", "entropy_collapse", "entropy_blowup", "gradient_spike", "clip_saturation",
    "length_runaway", "length_collapse", "truncation_surge", "reward_collapse", "reward_hacking", "dead_groups",
    "mixed_groups", "frozen_update", "semantics_differ", "silent_run", "missing_ranks",
}  # fmt: skip


def test_every_name_in_the_table_is_an_illness() -> None:
    assert set(LEADS_TO) | {c for following in LEADS_TO.values() for c in following} <= DESIGNED
    assert set(illnesses.NAMES) <= DESIGNED


def test_the_two_early_signs_lead_to_the_collapse_and_never_the_other_way_round() -> None:
    for sign in ("onpolicy_disagreement", "rollout_mismatch"):
        assert can_cause(sign, "reward_collapse")
        assert not can_cause("reward_collapse", sign)


def test_causes_sort_before_what_they_cause() -> None:
    ordered = sorted(["reward_collapse", "gradient_spike", "rollout_mismatch"], key=upstream_first)
    assert ordered == ["rollout_mismatch", "gradient_spike", "reward_collapse"]


def test_silence_does_not_spoil_checkpoints() -> None:
    assert not {"silent_run", "missing_ranks", "reward_collapse"} & PRECURSORS
