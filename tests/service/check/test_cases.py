"""The promise: early and quiet on 155 real labelled runs, where the folder with them is at hand."""

from __future__ import annotations

import json

import pytest

from benchmarks.detection import cases
from foreshock_service.check.run import check
from foreshock_service.rules.pack import default_pack

ABSENT = not (cases.folder() / "index.json").is_file()


@pytest.fixture(scope="module")
def measured() -> list[cases.Case]:
    return cases.measure(cases.folder(), default_pack())


@pytest.mark.labelled_cases
@pytest.mark.skipif(ABSENT, reason="no labelled runs: FORESHOCK_CASES names the folder with index.json")
class TestLabelledRuns:
    """All 155; the figures are in benchmarks/detection/README.md."""

    def test_every_run_is_read(self, measured):
        assert [c.id for c in measured if c.verdict == "unreadable"] == []

    def test_healthy_runs_are_left_alone(self, measured):
        told = cases.summary(measured)
        assert told["quiet_critical_share"] <= 0.02
        assert told["quiet_critical_per_1000_steps"] <= 0.2
        assert told["quiet_warned_share"] <= 0.15

    def test_what_healed_is_not_critical_at_the_end(self, measured):
        assert cases.summary(measured)["recovered_critical_open_share"] <= 0.1

    def test_failures_are_caught_and_half_of_them_in_time(self, measured):
        told = cases.summary(measured)
        assert told["failed_caught_share"] >= 0.9
        assert told["failed_early_share"] >= 0.5

    def test_what_a_signal_contributes_is_seen_by_hiding_it(self, measured):
        told = cases.by_signal(measured, cases.folder(), default_pack())
        failed = [c for c in measured if c.label in cases.FAILED_LABELS]
        assert sum(row["speaks_first"] for row in told.values()) == len(failed)
        assert told["entropy.mean"]["early_without_it"] < sum(c.early() for c in failed)
        assert all(row["caught_without_it"] >= 0.8 * len(failed) for row in told.values())


PASTED = ("critical", "critical", "warning", "critical", "warning", "critical")


@pytest.mark.labelled_cases
@pytest.mark.skipif(ABSENT, reason="no labelled runs: FORESHOCK_CASES names the folder with index.json")
def test_fragments_pasted_into_issues_get_a_sensible_verdict(tmp_path):
    told = []
    for line in (cases.folder() / "issue_snippets.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        log = tmp_path / f"{len(told)}.jsonl"
        log.write_text("\n".join(json.dumps(row) for row in entry.get("rows") or [entry["row"]]), encoding="utf-8")
        report = check(log, default_pack())
        told.append(report.verdict)
        # A critic that is NaN beside a sound actor, and a gradient of exactly 0, warn; NaN in the actor is critical.
        assert {i.rule for i in report.incidents} == {"frozen_update" if "grad_norm and kl" in line else "non_finite"}
    assert tuple(told) == PASTED
