"""Checkpoints: what counts as a path, what becomes healthy, and which one a rollback goes to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foreshock_service.commands import checkpoints
from foreshock_service.commands.checkpoints import BadPath, checked_path
from foreshock_service.commands.limits import Limits
from foreshock_service.rules.interface import Finding
from foreshock_service.store.engine import Store
from foreshock_service.store.models import Checkpoint, Run
from tests.service.commands.simulation import TRAINING_FAULT, Simulation, closes, opens


def target(run: Simulation, before: int | None = None, **limits: Any) -> tuple[int, int] | None:
    with run.store.read() as session:
        row = session.get_one(Run, run.run_id)
        found = checkpoints.target(session, row, before=before, limits=Limits(**limits))
        return (found.attempt, found.step) if found else None


@pytest.mark.parametrize("path", ["", "  ", None, 7, "a\x00b", "a\nb", "x" * 4097, "\ud800"])
def test_what_cannot_be_a_path_is_refused(path: object) -> None:
    with pytest.raises(BadPath):
        checked_path(path)


@pytest.mark.parametrize("path", ["/ckpt/step-5", "s3://bucket/run/5", "C:\\runs\\5", "/données/5", "x" * 4096])
def test_any_other_word_of_the_trainer_is_kept_as_it_is(path: str) -> None:
    assert checked_path(path) == path


def test_a_bad_path_is_left_out_and_the_envelope_goes_on(store: Store) -> None:
    run = Simulation(store)
    run.checkpoint("a\x00b")
    assert run.checkpoints() == {}


def test_announcing_a_checkpoint_again_changes_nothing(store: Store) -> None:
    run = Simulation(store)
    run.checkpoint()
    run.steps(5)
    with store.write() as session:
        row = session.get_one(Run, run.run_id)
        assert checkpoints.register(session, row, 1, 0, {"path": "/ckpt/1/0"}, run.now) is False
    assert run.checkpoints() == {(1, 0): "healthy"}


def test_a_candidate_becomes_healthy_after_enough_clean_steps(store: Store) -> None:
    run = Simulation(store)
    run.steps(2)
    run.checkpoint()
    run.steps(4)
    assert run.checkpoints() == {(1, 2): "candidate"}
    run.step()
    assert run.checkpoints() == {(1, 2): "healthy"}


def test_what_was_saved_from_the_onset_minus_a_margin_on_is_quarantined_even_if_it_was_healthy(store: Store) -> None:
    run = Simulation(store)
    for _ in range(4):
        run.steps(3)
        run.checkpoint()
    run.step(opens("onpolicy_disagreement", "training_pass", onset=7), **TRAINING_FAULT)
    assert run.checkpoints() == {
        (1, 3): "healthy", (1, 6): "quarantined", (1, 9): "quarantined", (1, 12): "quarantined",
    }  # fmt: skip


def test_what_is_saved_during_an_illness_is_quarantined_and_after_it_trusted_again(store: Store) -> None:
    run = Simulation(store)
    run.step(opens("onpolicy_disagreement", "training_pass"), **TRAINING_FAULT)
    run.checkpoint()
    run.step(**TRAINING_FAULT)
    run.step(closes("onpolicy_disagreement"))
    run.checkpoint()
    run.steps(6)
    assert run.checkpoints() == {(1, 1): "quarantined", (1, 3): "healthy"}


SILENT = Finding(rule="silent_run", transition="open", severity="critical", step=None)


@pytest.mark.parametrize("finding", [opens("onpolicy_disagreement", "scoring_pass"), SILENT])
def test_an_illness_that_spoils_no_weights_quarantines_nothing(store: Store, finding: Finding) -> None:
    run = Simulation(store)
    run.checkpoint()
    run.step(finding)
    run.steps(5)
    assert run.checkpoints() == {(1, 0): "healthy"}


def test_a_rollback_goes_to_the_newest_healthy_checkpoint_before_the_bound(store: Store) -> None:
    run = Simulation(store)
    for _ in range(4):
        run.steps(3)
        run.checkpoint()
    assert target(run) == (1, 6)
    assert target(run, before=6) == (1, 3)
    assert target(run, before=3) is None


def test_the_lineage_leaves_out_what_was_rolled_back(store: Store) -> None:
    run = Simulation(store)
    for _ in range(4):
        run.steps(5)
        run.checkpoint()
    run.steps(5)
    assert target(run) == (1, 20)
    run.begin_attempt(10)
    assert target(run) == (1, 10)
    run.steps(3)
    run.checkpoint()
    run.steps(5)
    assert target(run) == (2, 13)
    run.begin_attempt(11)
    assert target(run) == (1, 10)


def test_existence_is_asked_for_only_where_that_is_enabled(store: Store, tmp_path: Path) -> None:
    run = Simulation(store)
    real = tmp_path / "step-1.pt"
    real.write_bytes(b"")
    run.steps(1)
    run.checkpoint(str(real))
    run.steps(2)
    run.checkpoint("/nowhere/step-3.pt")
    run.steps(5)
    assert target(run) == (1, 3)
    assert target(run, verify_checkpoints=True) == (1, 1)


def test_the_scope_is_what_the_trainer_said(store: Store) -> None:
    run = Simulation(store)
    run.checkpoint()
    with store.read() as session:
        assert session.query(Checkpoint).one().scope == ["weights", "optimizer"]
