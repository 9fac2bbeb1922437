"""The ladder of each fault, as a pure function."""

from __future__ import annotations

import itertools

import pytest

from foreshock.wire.commands import COMMAND_KINDS
from foreshock_service.commands.routes import NEEDS_PERSON, Facts, correction_allowed, ladder, next_kind

EVERYTHING = frozenset(COMMAND_KINDS)
NO_RESYNC = EVERYTHING - {"resync_engine"}


def facts(**more: object) -> Facts:
    return Facts(**{"rule": "onpolicy_disagreement", "announced": EVERYTHING, "checkpoint": True, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (facts(edge="training_pass"), "resync_trainer"),
        (facts(edge="training_pass", reward_gone=True), "rollback"),
        (facts(edge="training_pass", reward_gone=True, checkpoint=False), "resync_trainer"),
        (facts(edge="training_pass", trials={"resync_trainer": "over"}), "rollback"),
        (facts(edge="training_pass", trials={"resync_trainer": "waiting"}), None),
        (facts(edge="training_pass", trials={"resync_trainer": "stop"}), None),
        (facts(edge="training_pass", trials={"resync_trainer": "again"}), "resync_trainer"),
        (facts(edge="scoring_pass"), None),
        (facts(edge="scoring_pass", reward_gone=True, wrong_rows=True), None),
        (facts(edge="undecided"), "probe"),
        (facts(edge="undecided", announced=EVERYTHING - {"probe"}), None),
        (facts(edge=None), None),
        (facts(rule="rollout_mismatch", edge="engine"), "resync_engine"),
        (facts(rule="rollout_mismatch", edge="engine", announced=NO_RESYNC), "enable_is_correction"),
        (facts(rule="rollout_mismatch", edge="engine", announced=NO_RESYNC, stale_engine=True), None),
        (facts(rule="rollout_mismatch", edge="engine", stale_engine=True, trials={"resync_engine": "over"}),
         "enable_is_correction"),
        (facts(rule="rollout_mismatch", edge="engine", wrong_rows=True), "pause"),
        (facts(rule="stale_weights"), "resync_engine"),
        (facts(rule="is_degeneracy", edge="engine", upstream="rollout_mismatch", upstream_active=True), None),
        (facts(rule="is_degeneracy", edge="engine", upstream="rollout_mismatch"), "resync_engine"),
        (facts(rule="frozen_update"), "resync_trainer"),
        (facts(rule="mixed_groups"), "pause"),
        (facts(rule="mixed_groups", announced=EVERYTHING - {"pause"}), None),
        (facts(rule="non_finite"), "rollback"),
        (facts(rule="non_finite", only_gradients=True), "skip_update"),
        (facts(rule="non_finite", checkpoint=False), "skip_update"),
        (facts(rule="reward_collapse"), None),
        (facts(rule="reward_collapse", upstream="onpolicy_disagreement"), "rollback"),
        (facts(rule="reward_collapse", upstream="onpolicy_disagreement", upstream_active=True), None),
        (facts(rule="reward_collapse", upstream="onpolicy_disagreement", upstream_edge="scoring_pass"), None),
        (facts(rule="entropy_collapse"), None),
        (facts(rule="gradient_spike"), None),
        (facts(rule="silent_run"), None),
    ],
)  # fmt: skip
def test_each_fault_asks_for_its_own_command(known: Facts, expected: str | None) -> None:
    assert next_kind(known) == expected


def test_a_training_pass_fault_never_asks_for_correction_whatever_else_is_known() -> None:
    for gone, stale, wrong, checkpoint in itertools.product([True, False], repeat=4):
        for rule in ("onpolicy_disagreement", "rollout_mismatch", "is_degeneracy", "outlier_sequences"):
            known = facts(
                rule=rule, edge="training_pass", reward_gone=gone, stale_engine=stale, wrong_rows=wrong,
                checkpoint=checkpoint,
            )  # fmt: skip
            assert "enable_is_correction" not in ladder(known)


def test_only_what_was_announced_is_asked_for() -> None:
    for kind in COMMAND_KINDS:
        for edge in ("training_pass", "engine", "undecided"):
            asked = next_kind(facts(edge=edge, announced=frozenset({kind})))
            assert asked in (None, kind)


def test_correction_is_allowed_again_once_a_resync_has_excluded_staleness() -> None:
    assert not correction_allowed(facts(stale_engine=True))
    assert correction_allowed(facts(stale_engine=True, trials={"resync_engine": "over"}))
    assert correction_allowed(facts())


def test_every_rung_is_a_command_kind() -> None:
    for edge in ("training_pass", "scoring_pass", "engine", "undecided", None):
        for rule in ("rollout_mismatch", "non_finite", "frozen_update", "reward_collapse"):
            for gone in (True, False):
                assert set(ladder(facts(rule=rule, edge=edge, reward_gone=gone, upstream="kl_blowup"))) <= EVERYTHING
    assert NEEDS_PERSON <= EVERYTHING
