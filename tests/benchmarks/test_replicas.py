"""A small `python -m benchmarks.replicas`: three real services on one PostgreSQL, one killed and one stopped midway."""

from __future__ import annotations

import pytest

from benchmarks.replicas.__main__ import jobs_of, run
from benchmarks.replicas.count import OPENED, findings
from benchmarks.replicas.load import RULE

pytestmark = pytest.mark.postgres


def test_three_replicas_of_which_one_is_killed_and_one_stopped_do_everything_once() -> None:
    found = run(3, jobs_of(runs=3, ranks=2, frames=8, envelopes=6), faults=True)
    assert found["kept"] == dict.fromkeys(found["kept"], True)
    assert len(found["kept"]) == 7
    assert found["sent_again"] > 0, "no replica was ever missed"


def test_the_count_finds_what_is_missing_and_what_is_double() -> None:
    (job,) = jobs_of(runs=1, ranks=2, frames=2, envelopes=2)
    stored = {"frames": 8, "doubled": 0, "steps": 4, "failed": 0, "incidents": 1, "commands": 1}
    alert = {"event": OPENED, "run": job.name, "incident": {"id": "i", "rule": RULE}}

    def broken(stored: dict[str, int], taken: int = 1, alerts: int = 1, old: int = 0) -> set[str]:
        kept = findings([job], {job.name: stored}, {"c": taken}, [alert] * alerts, old)
        return {promise for promise, good in kept.items() if not good}

    assert broken(stored) == set()
    assert broken(stored | {"frames": 7}) == broken(stored | {"doubled": 1}) == {"each acknowledged frame there once"}
    assert broken(stored | {"steps": 3}) == {"each step evaluated once"}
    assert broken(stored | {"incidents": 2}) == {"each incident once"}
    assert broken(stored | {"commands": 0}) == {"each command once"}
    assert broken(stored, taken=2) == {"each command accepted once"}
    assert broken(stored, alerts=2) == broken(stored, alerts=0) == {"each alert sent once"}
    assert broken(stored, old=1) == {"old frames gone"}
