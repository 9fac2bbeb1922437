"""Rows become steps: joined, counted, restarted."""

from __future__ import annotations

import math

from foreshock_service.check.assemble import Assembler, RawStep
from foreshock_service.check.readers.base import Notes, Row


def assembled(rows: list[Row], interval: int = 1) -> list[RawStep]:
    assembler = Assembler(Notes(), interval)
    done = [raw for row in rows for raw in assembler.feed(row)]
    return [*done, *assembler.flush()]


def test_rows_of_one_step_are_joined():
    steps = assembled([Row(1, {"loss": 1.0}), Row(1, {"reward": 2.0}), Row(2, {"loss": 3.0})])
    assert [(s.step, s.values) for s in steps] == [(1, {"loss": 1.0, "reward": 2.0}), (2, {"loss": 3.0})]


def test_an_evaluation_that_comes_late_still_finds_its_step():
    steps = assembled([Row(1, {"loss": 1.0}), Row(2, {"loss": 1.0}), Row(1, {"eval_reward": 0.5})])
    assert steps[0].values == {"loss": 1.0, "eval_reward": 0.5}
    assert [s.attempt for s in steps] == [1, 1]


def test_steps_that_come_again_are_a_new_attempt():
    rows = [Row(s, {"loss": 1.0}) for s in (*range(1, 21), *range(11, 31))]
    steps = assembled(rows)
    assert len(steps) == 40
    assert [s.step for s in steps if s.attempt == 2] == list(range(11, 31))


def test_a_restart_by_one_step_is_seen():
    steps = assembled([Row(s, {"loss": 1.0}) for s in (1, 2, 3, 4, 3, 4, 5)])
    assert [(s.attempt, s.step) for s in steps] == [(1, 1), (1, 2), (1, 3), (1, 4), (2, 3), (2, 4), (2, 5)]


def test_a_step_logged_twice_keeps_what_was_not_finite():
    (step,) = assembled([Row(1, {"loss": math.nan}), Row(1, {"loss": 1.0})])
    assert math.isnan(step.values["loss"])


def test_missing_numbers_are_counted_by_interval_and_only_training_counts():
    rows = [Row(None, {name: 1.0}) for name in ("loss", "eval_runtime", "loss", "lr")]
    assert [s.step for s in assembled(rows, 5)] == [5, 10]


def test_a_rollout_line_belongs_to_the_step_that_follows():
    """slime numbers rollouts and optimizer steps apart; two steps a rollout here."""
    rows = [
        Row(None, {"rollout/raw_reward": 0.4}),
        Row(0, {"train/loss": 0.0}), Row(1, {"train/loss": 0.1}),
        Row(None, {"rollout/raw_reward": 0.5}), Row(2, {"train/loss": 0.2}), Row(3, {"train/loss": 0.3}),
    ]  # fmt: skip
    steps = assembled(rows)
    assert [s.step for s in steps] == [0, 1, 2, 3]
    assert [("rollout/raw_reward" in s.values) for s in steps] == [True, False, True, False]
