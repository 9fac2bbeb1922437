"""The ladder: deterministic, exact where nothing differs, and showing each fault where it belongs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lab.roll_onpolicy import ladder, summary
from lab.roll_onpolicy.ladder import Job, run_job
from lab.roll_onpolicy.rungs import IN_BF16, LADDER, SMALL, named
from lab.roll_onpolicy.train import Plan

PLAN = Plan(steps=4, prompts=8, warm_steps=60)


def steps_of(name: str, dtype: str = "fp32", plan: Plan = PLAN) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = run_job(Job(named(name), dtype, 0, plan, ""))["steps"]
    return steps


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["identical", "recompute"])
def test_with_one_partition_every_token_of_the_policy_pair_is_exactly_zero(name: str, dtype: str) -> None:
    for step in steps_of(name, dtype):
        assert step["policy"]["kl_k2"] == 0.0
        assert step["policy"]["abs_max"] == 0.0
        assert step["approxkl"] == 0.0
        assert step["mixed"] == 0.0


def test_a_numeric_rung_stays_at_rounding_and_weights_rows_and_dropout_do_not() -> None:
    names = ("other partition, split-K", "dropout 0.1", "old of another batch", "stale training, lag 1")
    largest = {name: max(s["policy"]["kl_k2"] for s in steps_of(name)) for name in names}
    assert 0 < largest["other partition, split-K"] < 1e-10
    assert largest["dropout 0.1"] > 1e-3
    assert largest["old of another batch"] > 0.1
    assert largest["stale training, lag 1"] > 1e-8


def test_mixed_groups_do_not_move_the_policy_pair() -> None:
    steps = steps_of("mixed groups")
    assert min(s["mixed"] for s in steps) > 0.5
    assert max(s["policy"]["kl_k2"] for s in steps) < 1e-10


def test_an_engine_fault_moves_the_mismatch_and_leaves_the_policy_pair_at_zero() -> None:
    steps = steps_of("bf16 engine")
    assert max(s["policy"]["kl_k2"] for s in steps) == 0.0
    assert min(s["mismatch"]["kl_k3"] for s in steps) > 1e-7


def test_frozen_parameters_leave_both_pairs_at_zero() -> None:
    steps = steps_of("frozen parameters")
    assert max(s["policy"]["kl_k2"] for s in steps) == 0.0
    assert max(s["mismatch"]["kl_k3"] for s in steps) < 1e-10


def test_the_same_small_ladder_twice_gives_the_same_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "SMALL", ("identical", "mixed groups"))
    monkeypatch.setattr(ladder, "jobs_of", lambda options: [Job(named(n), "fp32", 0, PLAN, "")
                                                            for n in ("identical", "mixed groups")])  # fmt: skip
    tables = []
    for place in ("one", "two"):
        assert ladder.main(["--out", str(tmp_path / place), "--small", "--jobs", "1", "--home", ""]) == 0
        tables.append(json.loads((tmp_path / place / "ladder.json").read_text()))
    assert tables[0] == tables[1]
    assert [row["rung"] for row in tables[0]["rungs"]] == ["identical", "mixed groups"]


def test_every_named_rung_exists_once_and_has_its_sentence() -> None:
    names = [rung.name for rung in LADDER]
    assert len(set(names)) == len(names)
    assert set(SMALL) | set(IN_BF16) <= set(names)
    assert all(rung.change for rung in LADDER)
    with pytest.raises(KeyError, match="no rung 'nothing'"):
        named("nothing")


def test_outcomes_are_judged_against_the_healthy_seeds() -> None:
    healthy = [0.9, 0.92, 0.95]
    assert summary.outcome(0.9, healthy) == "learns"
    assert summary.outcome(0.7, healthy) == "wobbles"
    assert summary.outcome(0.2, healthy) == "crashes"
    assert summary.outcome(0.2, []) == "not judged"
    assert summary.outcome(0.53, healthy, start=0.5, best=0.6) == "stands still"
    assert summary.outcome(0.66, healthy, start=0.5, best=0.95) == "wobbles"
    assert summary.outcome(0.2, healthy, start=0.5, best=0.6) == "crashes"


def test_a_crash_is_dated_by_the_first_ten_steps_below_half_of_the_best() -> None:
    rewards = [0.8] * 20 + [0.1] * 20
    assert summary.crash_step({"steps": [{"step": i, "reward": r} for i, r in enumerate(rewards)]}) == 25
    assert summary.crash_step({"steps": [{"step": i, "reward": 0.8} for i in range(40)]}) is None
