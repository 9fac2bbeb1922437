"""A small `make faults`: a real service on SQLite, real trainers, real kills; nothing lost, nothing doubled."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from benchmarks.faults.__main__ import attempt
from benchmarks.faults.faults import FAULTS, NotPossibleError
from benchmarks.faults.stage import Stage

SMALL = (
    "service_killed", "service_stopped", "connection_cut", "deliveries_repeated", "client_killed", "disk_full",
    "spool_corrupt",
)  # fmt: skip


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """One service for all faults, as `python -m benchmarks.faults` has it."""
    made = Stage(tmp_path_factory.mktemp("faults"), None)
    made.service.start()
    yield made
    made.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SMALL)
def test_nothing_is_lost_or_doubled_and_the_run_ends_normally_when(name: str, stage: Stage) -> None:
    (fault,) = (fault for fault in FAULTS if fault.name == name)
    try:
        trials, wrong = attempt(stage, fault, trials=1, small=True)
    except NotPossibleError as error:
        pytest.skip(str(error))
    assert wrong == []
    assert trials[0].count.sealed > 0


def test_a_ledger_that_does_not_match_the_database_is_noticed(stage: Stage) -> None:
    """The count itself can fail: what was never sent is lost, what is stored and was never sealed is doubled."""
    stage.begin("honesty")
    trainer = stage.train(steps=3)
    assert trainer.wait() == ""
    lines = trainer.path.read_text().splitlines()

    def seal(items: int) -> None:
        last = json.loads(lines[-1]) | {"sealed": items}
        trainer.path.write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n")

    seal(100)
    found, _ = stage.conclude()
    assert (found.lost, found.doubled) == (100 - found.stored, 0)
    seal(1)
    found, _ = stage.conclude()
    assert (found.lost, found.doubled) == (0, found.stored - 1)
