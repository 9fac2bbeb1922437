"""The side-by-side benchmark: the protocol between the two processes, the restated rules, the tables' arithmetic."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.detection.peers import contest, feed, rules
from benchmarks.detection.peers.__main__ import main
from benchmarks.detection.peers.table import CASE_HEAD, STREAM_HEAD, Heard, case_figures, markdown, stream_figures


class Threshold(feed.Tool):
    """A tool that says each step's loss when it is above one, and information at step 0."""

    def feed(self, step: int, values: Mapping[str, float]) -> list[feed.Alarm]:
        words = ["info"] * (step == 0) + ["HIGH"] * (values["loss"] > 1)
        return [alarm for word in words for alarm in self.new(step, (step,), word, "loss")]


@pytest.fixture
def threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(feed.TOOLS, "threshold", Threshold)


def _run(name: str, losses: list[float], kind: str = "healthy") -> contest.Run:
    return contest.Run(name, kind, [(step, {"loss": loss}) for step, loss in enumerate(losses)])


@pytest.mark.usefixtures("threshold")
def test_each_run_that_is_written_comes_back_with_its_own_alarms() -> None:
    runs = [_run("a", [0.0, 2.0, 0.0, 3.0]), _run("b", [0.0, 0.0], "collapse")]

    answers = feed.answers(contest.lines(runs, raw=False), "threshold", raw=False, every=None)
    heard = contest.heard_from([json.dumps(answer) + "\n" for answer in answers], runs)

    assert [(h.run, h.kind, h.alarms, h.steps) for h in heard] == [
        ("a", "healthy", ((1, "critical"), (3, "critical")), 4),
        ("b", "collapse", (), 2),
    ]
    assert all(h.cpu_seconds >= 0 for h in heard)


@pytest.mark.usefixtures("threshold")
@pytest.mark.parametrize("line", ['{"run": "a", "step": 1}', "[1, 2]"])
def test_a_line_that_is_not_a_step_is_refused_in_words(line: str) -> None:
    with pytest.raises(ValueError, match="not a step"):
        list(feed.answers(iter([line]), "threshold", raw=False, every=None))


@pytest.mark.usefixtures("threshold")
def test_a_run_in_two_parts_is_refused() -> None:
    runs = [_run("a", [0.0]), _run("b", [0.0]), _run("a", [0.0])]
    with pytest.raises(ValueError, match="two parts"):
        list(feed.answers(contest.lines(runs, raw=False), "threshold", raw=False, every=None))


def test_an_answer_cut_short_is_left_out_and_one_about_a_stranger_refused() -> None:
    whole = json.dumps({"run": "a", "alarms": [], "steps": 1, "cpu_seconds": 0.5}) + "\n"
    assert len(contest.heard_from([whole, whole[:20]], [_run("a", [0.0])])) == 1
    with pytest.raises(ValueError, match="not asked about"):
        contest.heard_from([whole], [_run("b", [0.0])])


def test_a_tool_that_is_not_installed_is_reported_with_the_reason() -> None:
    with pytest.raises(contest.CannotRunError, match="No module named 'rlwatch'"):
        contest.peer(Path(sys.executable), "rlwatch", [_run("a", [0.0])])


@pytest.mark.parametrize(
    ("word", "meant"), [("critical", "critical"), ("Severity.ERROR", "critical"), ("med", "warning"), ("info", None)]
)
def test_every_tools_severity_becomes_one_of_ours_or_none(word: str, meant: str | None) -> None:
    assert feed.severity(word) == meant


def test_stream_figures_count_alarms_per_healthy_run_and_the_window_without_its_end() -> None:
    heard = [
        Heard("h0", "healthy", ((10, "warning"), (95, "critical")), 200, 0.1),
        Heard("h1", "healthy", (), 200, 0.1),
        Heard("c0", "collapse", ((89, "warning"), (119, "warning")), 200, 0.1),
        Heard("c1", "collapse", ((120, "critical"),), 200, 0.1),
        Heard("a0", "approxkl_only", (), 200, 0.1),
    ]
    told = stream_figures(heard)
    assert told["false_alarms_per_healthy_run"] == 1.0
    assert told["healthy_runs_with_alarm"] == 0.5
    assert told["healthy_in_window"] == 0.5
    assert told["collapse_in_window"] == 0.5
    assert told["collapse_median_first"] == 119.5
    assert told["approxkl_only_in_window"] == 0.0
    assert told["approxkl_only_median_first"] is None
    assert told["ms_per_step"] == pytest.approx(0.5)


def test_case_figures_take_the_early_share_of_dated_failures_alone() -> None:
    heard = [
        Heard("q0", "healthy", ((3, "warning"),), 500, 0.0),
        Heard("q1", "no-learning", ((3, "critical"),), 500, 0.0),
        Heard("r0", "spike-recovered", ((3, "warning"),), 100, 0.0),
        Heard("f0", "collapsed", ((30, "critical"),), 100, 0.0, onset=30),
        Heard("f1", "diverging-KL", ((31, "critical"),), 100, 0.0, onset=30),
        Heard("f2", "collapsed", ((1, "critical"),), 100, 0.0, onset=None),
        Heard("f3", "length-runaway", (), 100, 0.0, onset=5),
    ]
    told = case_figures(heard)
    assert told["quiet_critical"] == 0.5
    assert told["quiet_any"] == 1.0
    assert told["quiet_alarms_per_1000_steps"] == 2.0
    assert told["recovered_critical"] == 0.0
    assert told["failed_caught"] == 0.75
    assert told["failed_early"] == pytest.approx(1 / 3)


def test_a_table_shows_what_was_not_measured_as_a_dash_and_why() -> None:
    shown = markdown({"x": stream_figures([])}, STREAM_HEAD, {"y": "no input"})
    assert "| x | 0 |" + " – |" * 8 in shown
    assert shown.endswith("- not run: y: no input")
    assert "| x | 0 |" in markdown({"x": case_figures([])}, CASE_HEAD, {})


def test_the_z_score_speaks_once_per_excursion_and_passes_over_holes() -> None:
    flat = [1.0, 1.1] * 20
    rows = [(step, {"x": value}) for step, value in enumerate([*flat, 9.0, 99.0, math.nan, 1.0, 1.0])]
    assert list(rules.z_score(rows, ("x", "absent"))) == [40]


def test_kill_loss_spike_needs_five_in_a_row_and_ends_the_run() -> None:
    quiet = [1.0] * 100
    four = [(step, {"loss": x}) for step, x in enumerate([*quiet, *[9.0] * 4, *quiet])]
    many = [(step, {"loss": x}) for step, x in enumerate([*quiet, *[9.0] * 20])]
    assert list(rules.kill_loss_spike(four)) == []
    assert list(rules.kill_loss_spike(many)) == [104]


def test_the_yardstick_needs_three_in_a_row_and_never_learns_from_them() -> None:
    quiet = [1.0, 1.1, 1.2, 1.3] * 10
    rows = [(step, {"x": x}) for step, x in enumerate([*quiet, 50.0, 50.0, 1.0, *[50.0] * 100])]
    assert list(rules.yardstick(rows, ("x",))) == [45]


def test_without_the_other_tools_the_rest_is_measured_and_they_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    written = tmp_path / "figures.json"
    chosen = ["Foreshock", "rlprobe"]
    monkeypatch.setattr(sys, "argv", ["peers", "--seeds", "1", "--json", str(written), "--only", *chosen])
    assert main() == 0
    shown = capsys.readouterr().out
    assert "| Foreshock | 6 | 0.00 |" in shown
    assert "- not run: rlprobe: " in shown
    told = json.loads(written.read_text(encoding="utf-8"))
    assert told["stream"]["Foreshock"]["collapse_in_window"] == 1.0
