"""`make bench-ingest`, `faults`, `attacks`, `soak`, `replicas`: a missed figure ends each non-zero, its table last."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

import benchmarks.attacks.__main__ as attacks
import benchmarks.faults.__main__ as faults
import benchmarks.ingest.__main__ as ingest
import benchmarks.replicas.__main__ as replicas
import benchmarks.soak.__main__ as soak
from benchmarks.attacks.target import Attack
from benchmarks.faults.count import Count
from benchmarks.faults.faults import Fault, NotPossibleError, Trial
from benchmarks.ingest import scaling
from benchmarks.soak.judge import Window, findings


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command's `main`; (exit status, what it printed)."""

    def run(main: Callable[[], int | None], *arguments: str) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", ["benchmark", *arguments])
        try:
            status = main() or 0
        except SystemExit as end:
            status = int(str(end.code))
        return status, capsys.readouterr().out.strip().splitlines()

    return run


def ingest_row(**changed: Any) -> dict[str, Any]:
    full = {"frames_per_s": 1e5, "requests_per_s": 1e4, "values_per_s": 1e6, "cpu_us_per_frame": 9.0, "p50_ms": 1.0,
            "p99_ms": 2.0, "health_p99_ms": 3.0, "wire_bytes_per_frame": 9, "disk_bytes_per_frame": 9,
            "steps_stored": 100, "steps_evaluated": 100, "frames_evaluated_per_s": 9.0}  # fmt: skip
    return full | changed


@pytest.mark.parametrize(
    ("changed", "status"),
    [({}, 0), ({"frames_per_s": 9.0}, 1), ({"p99_ms": 51.0}, 1), ({"p99_ms": None}, 1), ({"health_p99_ms": 11.0}, 1),
     ({"steps_evaluated": 94}, 1)],
)  # fmt: skip
def test_bench_ingest_ends_non_zero_for_a_missed_figure(
    changed: dict[str, Any], status: int, ended: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest, "service", lambda kind: nullcontext(None))
    monkeypatch.setattr(ingest, "load", lambda *_, **__: ingest_row(**changed))
    found, printed = ended(ingest.main, "--database", "sqlite", "--frames", "16")
    assert found == status
    assert sum(line.startswith("MISSED") for line in printed[-5:]) == status, "the verdicts are last"


@pytest.mark.parametrize(
    ("peers", "status"),
    [
        ([{"name": "mlflow", "scalars_per_s": 1e3}], 0),
        ([{"name": "mlflow", "scalars_per_s": 2e5}], 1),
        ([{"name": "mlflow", "error": "no module"}], 1),
        ([], 1),
    ],
)
def test_bench_ingest_has_not_beaten_a_peer_that_did_not_run(
    peers: list[dict[str, Any]], status: int, ended: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest, "service", lambda kind: nullcontext(None))
    monkeypatch.setattr(ingest, "load", lambda *_, **__: ingest_row())
    monkeypatch.setattr(ingest, "peers", lambda *_: peers)
    assert ended(ingest.main, "--database", "sqlite", "--frames", "16", "--peers-python", "python")[0] == status


class Stage:
    """A stage on which nothing happens."""

    service: Any = type("Service", (), {"start": lambda self: None})()

    def __init__(self, *_: Any) -> None: ...

    def begin(self, fault: str) -> None: ...

    def close(self) -> None: ...


def trial(count: Count, **slowed: float) -> Callable[[Any, bool], Trial]:
    return lambda stage, small: Trial(count, [], **slowed)


def not_possible(stage: Any, small: bool) -> Trial:
    raise NotPossibleError("needs root")


def late(stage: Any, small: bool) -> Trial:
    raise TimeoutError("a trainer's steps")


@pytest.mark.parametrize(
    ("of_trial", "status"),
    [
        (trial(Count(sealed=9, stored=9)), 0),
        (trial(Count(sealed=9, stored=8, lost=1)), 1),
        (trial(Count(sealed=9, stored=9, doubled=1)), 1),
        (trial(Count(sealed=9, stored=9, executed=1, executed_twice=1)), 1),
        (trial(Count()), 1),
        (trial(Count(sealed=9, stored=9), wall=0.2, cpu=0.0), 1),
        (not_possible, 1),
        (late, 1),
    ],
)
def test_faults_ends_non_zero_for_a_missed_figure(
    of_trial: Any, status: int, ended: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "FAULTS", (Fault("f", "something breaks", of_trial),))
    monkeypatch.setattr(faults, "Stage", Stage)
    monkeypatch.setattr(faults, "postgres", lambda: nullcontext(None))
    found, printed = ended(faults.main, "--database", "sqlite")
    assert found == status
    assert "\n".join(printed).startswith(faults.HEADER)
    if of_trial is not not_possible:
        assert printed[-1].startswith("| something breaks | sqlite | " + ("0" if of_trial is late else "3"))


def test_faults_that_tried_nothing_have_not_passed(ended: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "FAULTS", ())
    monkeypatch.setattr(faults, "Stage", Stage)
    monkeypatch.setattr(faults, "postgres", lambda: nullcontext(None))
    assert ended(faults.main, "--database", "sqlite")[0] == 1


@pytest.mark.parametrize(("got", "status"), [("401", 0), ("200", 1), (None, 1)])
def test_attacks_ends_non_zero_where_one_does_not_end_as_expected(
    got: str | None, status: int, ended: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Target:
        def __init__(self, folder: Any) -> None: ...

        def start(self) -> Target:
            return self

        def stop(self) -> None: ...

    def run(target: Any) -> str:
        if got is None:
            raise ConnectionError("the service is gone")
        return got

    monkeypatch.setattr(attacks, "ATTACKS", [Attack("doors", "no token", "401", run)])
    monkeypatch.setattr(attacks, "Target", Target)
    found, printed = ended(attacks.main)
    assert found == status
    assert printed[-3].startswith("| doors | no token | 401 |")
    assert printed[-1] == f"1 attacks, {status} not as expected"


@pytest.mark.parametrize("p99_ms", [9.0, 500.0, None])
def test_soak_ends_non_zero_for_a_broken_promise(
    p99_ms: float | None, ended: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = [Window(10.0 * n, 1000 * n, 200 << 20, 2.0, 8.0, 900, 500 * n, 9 << 20) for n in range(1, 7)]
    windows = [*calm[:-1], dataclasses.replace(calm[-1], p99_ms=p99_ms)]
    figures = {"runs": 1, "frames_per_s": 100.0, "refused": 0}
    monkeypatch.setattr(soak, "soak", lambda *_: (windows, findings(windows, 20.0, 100.0, 0, 0), figures))
    found, printed = ended(soak.main, "--database", "sqlite")
    assert found == (0 if p99_ms == 9.0 else 1)
    assert all(line.startswith(("kept", "BROKEN")) for line in printed[-7:]), "the table is last"


@pytest.mark.parametrize("kept", [True, False])
def test_replicas_ends_non_zero_where_something_did_not_happen_once(
    kept: bool, ended: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = dict.fromkeys(("frames", "frames_per_s", "evaluated_per_s", "p50_ms", "p99_ms", "sent_again", "reads"), 1)
    row = {**figures, "replicas": 2, "faults": False, "planted": 1, "kept": {"each alert sent once": kept}}
    monkeypatch.setattr(replicas, "run", lambda *_: row)
    found, printed = ended(replicas.main, "--replicas", "2", "--no-faults")
    assert found == (0 if kept else 1)
    assert printed[-1].startswith("kept" if kept else "BROKEN")


@pytest.mark.parametrize(("costs", "good"), [([200.0, 239.0], True), ([200.0, 241.0], False), ([200.0], False)])
def test_a_cost_that_grows_by_more_than_a_fifth_is_missed(costs: list[float], good: bool) -> None:
    rows = [{"cpu_us": cost} for cost in costs]
    assert scaling.judged(rows, "stored") is good
    # A run whose steps are evaluated one by one is told beside, and is no measure of the others.
    assert scaling.judged([*rows, {"cpu_us": 900.0, "alone": True}], "runs") is good


@pytest.mark.parametrize(("p95_ms", "good"), [(99.0, True), (101.0, False), (None, False)])
def test_a_series_that_takes_too_long_or_never_came_is_missed(p95_ms: float | None, good: bool) -> None:
    assert scaling.judged([{"p95_ms": p95_ms}], "series") is good
    assert not scaling.judged([], "series")
