"""The demo's own arithmetic: when a reward is broken, and when a demo has shown what it must."""

from __future__ import annotations

from typing import Any

import pytest

from foreshock_service.demo.expectations import judge
from foreshock_service.demo.report import broke_at


def rewards(values: list[float]) -> list[tuple[float, float]]:
    return [(float(i + 1), v) for i, v in enumerate(values)]


def test_a_reward_that_falls_for_good_broke_where_its_mean_left_the_margin() -> None:
    assert broke_at(rewards([0.8] * 30 + [0.2] * 20), onset=25) == 32


def test_a_reward_that_recovers_did_not_break() -> None:
    assert broke_at(rewards([0.8] * 30 + [0.2] * 5 + [0.8] * 20), onset=25) is None


def test_a_fall_before_the_onset_is_not_the_break() -> None:
    assert broke_at(rewards([0.8] * 5 + [0.2] * 45), onset=25) == 25


def report(**changes: Any) -> dict[str, Any]:
    score = {"final_reward": 0.9, "final_validation": 0.9, "steps": 85, "reward_broke_step": None}
    base: dict[str, Any] = {
        "illness": "stale_parameters",
        "seed": 0,
        "onset_step": 25,
        "healthy": dict(score),
        "untreated": {**score, "final_reward": 0.1, "reward_broke_step": 33},
        "treated": dict(score),
        "incidents": [
            {"run": run, "rule": "onpolicy_disagreement", "severity": "critical", "opened_step": 26}
            for run in ("untreated", "treated")
        ],
        "commands": [{"run": "treated", "kind": "resync_trainer", "state": "done", "done_step": 27}],
    }
    return base | changes


def failed(found: dict[str, Any], mode: str = "auto") -> list[str]:
    return [check.name for check in judge(found, mode) if not check.passed]


def test_a_detected_and_rescued_run_passes_every_check() -> None:
    assert failed(report()) == []


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"incidents": []}, "treated: seen in time"),
        ({"commands": []}, "treated: a command was carried out"),
        (
            {"treated": {"final_reward": 0.3, "final_validation": 0.3, "reward_broke_step": 33}},
            "treated: at least half-way back",
        ),
        (
            {"incidents": [{"run": "healthy", "rule": "x", "severity": "critical", "opened_step": 5}]},
            "the healthy run is left in peace",
        ),
    ],
)
def test_each_missing_piece_fails_its_check(change: dict[str, Any], name: str) -> None:
    assert name in failed(report(**change))


def test_a_late_incident_is_not_a_detection() -> None:
    late = [
        {"run": r, "rule": "onpolicy_disagreement", "severity": "critical", "opened_step": 29}
        for r in ("untreated", "treated")
    ]
    assert "treated: seen in time" in failed(report(incidents=late))


def test_a_harmless_illness_must_lead_to_no_command() -> None:
    harmless = report(illness="stale_scoring")
    assert "treated: harmless, so nothing was commanded" in failed(harmless)
    assert failed({**harmless, "commands": []}) == []


@pytest.mark.parametrize(("illness", "in_time"), [("quantised_engine", True), ("stale_engine", False)])
def test_a_sign_in_the_step_of_the_fall_is_in_time_only_where_none_can_come_before(illness: str, in_time: bool) -> None:
    seen = [
        {"run": r, "rule": "rollout_mismatch", "severity": "critical", "opened_step": 25}
        for r in ("untreated", "treated")
    ]
    fell = {"final_reward": 0.4, "final_validation": 0.8, "reward_broke_step": 25}
    wrong = failed(report(illness=illness, incidents=seen, untreated=fell, commands=[]))
    assert ("untreated: seen in time" not in wrong) == in_time


@pytest.mark.parametrize(
    ("state", "left_alone"), [("proposed", True), ("cancelled", True), ("done", False), ("failed", False)]
)
def test_what_was_only_proposed_to_a_person_was_not_commanded(state: str, left_alone: bool) -> None:
    pause = {"run": "treated", "kind": "pause", "state": state, "done_step": None}
    wrong = failed(report(illness="shifted_labels", commands=[pause]))
    assert ("treated: no command would cure it, so nothing was commanded" not in wrong) == left_alone
