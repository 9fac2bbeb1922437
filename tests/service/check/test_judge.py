"""From steps to a story: incidents with their steps, precursors linked, diagnosis where a pair is logged."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from foreshock_service.check.advice import ADVICE
from foreshock_service.check.story import PHRASES, chains, told
from foreshock_service.rules.illnesses import NAMES
from tests.service.check import logs


def write(path: Path, rows: list[dict[str, float]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def engine_fault(count: int = 60, onset: int = 30) -> list[dict[str, float]]:
    """verl's names: mismatch grows fast while the trainer's passes agree, then entropy, then reward."""
    draw = random.Random(3)
    rows = []
    for r in logs.steps(count, break_at=onset + 6):
        since = r["step"] - onset
        rows.append(
            logs.verl(r)
            | {
                "step": r["step"],
                "rollout_corr/k3_kl": 5e-4 * draw.uniform(0.8, 1.25) * (1.0 if since < 0 else 3.0 ** min(since + 1, 6)),
                "actor/ppo_kl": 0.0,
            }
        )
    return rows


def test_every_rule_has_advice_and_a_phrase():
    assert set(ADVICE) == set(PHRASES) == set(NAMES)


def test_precursor_and_consequences_are_one_story(tmp_path):
    report = logs.judged(write(tmp_path / "x.jsonl", engine_fault()))
    story = next(chain for chain in chains(report.incidents) if chain[0].rule == "rollout_mismatch")
    assert [i.rule for i in story][-1] == "reward_collapse"
    sentence = told(story)
    assert sentence.startswith(f"trainer and engine apart from step {story[0].onset_step}, entropy up from ")
    assert "reward broke at " in sentence
    assert 30 <= story[0].onset_step <= 32
    assert story[0].opened_step < next(i for i in story if i.rule == "reward_collapse").opened_step


def test_an_incident_of_a_log_prob_pair_is_diagnosed_or_says_what_would_decide(tmp_path):
    report = logs.judged(write(tmp_path / "x.jsonl", engine_fault()))
    incident = next(i for i in report.incidents if i.rule == "rollout_mismatch")
    assert incident.diagnosis is not None
    assert incident.diagnosis.sentence


def test_an_incident_that_heals_has_its_end_and_leaves_a_warning(tmp_path):
    rows = [logs.trl(r) for r in logs.steps(90)]
    for row in rows[39:52]:
        row["reward"] = 0.0
    report = logs.judged(write(tmp_path / "x.jsonl", rows))
    incident = next(i for i in report.incidents if i.rule == "reward_collapse")
    assert incident.severity == "critical"
    assert incident.resolved_step is not None
    assert 52 < incident.resolved_step < 75
    assert report.verdict == "warning", "critical is what lasts to the end"


def test_two_runs_in_one_file_do_not_judge_each_other(tmp_path):
    """The second starts at a third of the first one's reward and a tenth of its length."""
    first = [logs.trl(r) for r in logs.steps(50)]
    second = [logs.trl(r) for r in logs.steps(50, seed=1)]
    for row in second:
        row["reward"] /= 3
        row["completions/mean_length"] /= 10
    report = logs.judged(write(tmp_path / "x.jsonl", first + second))
    assert (report.attempts, report.steps) == (2, 100)
    assert "reward_collapse" not in logs.rules(report)
    assert any("go back" in note for note in report.notes)


def test_a_restart_whose_steps_go_back_is_a_new_attempt_and_no_illness(tmp_path):
    rows = [logs.trl(r) for r in logs.steps(40)]
    report = logs.judged(write(tmp_path / "x.jsonl", rows[:30] + rows[20:]))
    assert (report.attempts, report.verdict, report.last_step) == (2, "healthy", 40)


def test_a_clip_fraction_that_is_always_zero_is_missing_and_not_health(tmp_path):
    rows = [logs.trl(r) | {"clip_ratio/low_mean": 0.0, "clip_ratio/high_mean": 0.0} for r in logs.steps(40)]
    report = logs.judged(write(tmp_path / "x.jsonl", rows))
    assert {"update.clip_low", "update.clip_high"} <= set(report.always_zero)
    assert "update.clip_high" not in report.signals


def test_coarse_and_short_logs_are_judged_too(tmp_path):
    rows = [logs.trl(r | {"step": 10 * r["step"]}) for r in logs.steps(24, break_at=15)]
    report = logs.judged(write(tmp_path / "x.jsonl", rows))
    entropy = next(i for i in report.incidents if i.rule == "entropy_blowup")
    assert 150 <= entropy.opened_step <= 190


def test_the_json_is_exactly_the_promised_one(tmp_path):
    report = logs.judged(write(tmp_path / "x.jsonl", engine_fault()))
    said = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert list(said) == ["verdict", "format", "steps", "incidents"]
    for incident in said["incidents"]:
        assert list(incident) == ["rule", "severity", "opened_step", "resolved_step", "explanation"]
        assert incident["severity"] in ("warning", "critical")
        assert isinstance(incident["opened_step"], int)
        assert incident["explanation"]


NAN = float("nan")
FRAGMENTS = [
    ({"step": 83, "actor/kl_loss": NAN, "actor/grad_norm": NAN, "critic/score/mean": -1.0}, "critical"),
    ({"step": 1, "critic/vf_loss": NAN, "actor/pg_loss": -0.01, "actor/grad_norm": 9.8}, "warning"),
    ({"step": 1, "Training Loss": -0.28, "reward": 13.4, "reward_std": 21.8, "kl": NAN, "entropy": 0}, "critical"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "verdict"), FRAGMENTS)
def test_one_pasted_row_is_enough_where_it_holds_a_nan(row, verdict, tmp_path):
    report = logs.judged(write(tmp_path / "x.jsonl", [row]))
    assert (report.steps, report.verdict) == (1, verdict)
    assert logs.rules(report) == {"non_finite"}


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "empty"),
        (b"\n\n  \n", "no training step"),
        (b"hello\nworld\n", "no training step"),
        (b"a,b\n1,2\n", "no training step"),
        (b'{"log_history": ', "none"),
        (b"SQLite format 3\x00" + bytes(100), "SQLite"),
        (bytes(1000), "binary"),
        (b'{"a": 1}\n{"b": 2}\n', "no training step"),
    ],
)
def test_what_cannot_be_judged_says_why(data, why, tmp_path):
    path = tmp_path / "log"
    path.write_bytes(data)
    report = logs.judged(path)
    assert (report.verdict, report.steps, report.incidents) == ("unreadable", 0, [])
    assert why in report.problem


def test_event_files_of_several_runs_are_not_taken_for_one(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "events.out.tfevents.1.host").write_bytes(b"")
    report = logs.judged(tmp_path)
    assert report.verdict == "unreadable"
    assert "several runs" in report.problem


def test_a_folder_with_several_logs_asks_which(tmp_path):
    for name in "ab":
        write(tmp_path / f"{name}.jsonl", [logs.trl(r) for r in logs.steps(3)])
    report = logs.judged(tmp_path)
    assert report.verdict == "unreadable"
    assert "several" in report.problem
    assert logs.judged(tmp_path / "nothing").verdict == "unreadable"
