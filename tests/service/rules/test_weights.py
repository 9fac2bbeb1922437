"""stale_weights and stale_cache: what versions, checksums and flushes prove."""

from __future__ import annotations

from typing import Any

import pytest

from foreshock_service.rules.interface import StepView
from tests.service.rules.streams import healthy, opened, view


def weights(side: str, **data: Any) -> dict[str, Any]:
    return {"kind": "weights", "step": 1, "role": "driver", "rank": 0, "data": {"side": side, **data}}


def step(i: int, *notices: dict[str, Any], **values: float) -> StepView:
    return view(i, values, notices=notices)


def test_the_same_checksum_on_both_sides_is_healthy() -> None:
    views = [
        step(i, weights("trainer", version=i, checksum=f"c{i}"), weights("engine", version=i, checksum=f"c{i}"))
        for i in range(9)
    ]
    assert opened(views, "stale_weights") == []


@pytest.mark.parametrize(
    ("trainer", "engine", "severity"),
    [
        ({"version": 3, "checksum": "a"}, {"version": 3, "checksum": "b"}, "critical"),
        ({"version": 3}, {"version": 3, "ok": False}, "critical"),
        ({"changed_share": 1.0}, {"changed_share": 0.0}, "critical"),
        ({"changed_share": 1.0}, {"changed_share": 0.6}, "warning"),
    ],
)
def test_what_a_notice_proves(trainer: dict[str, Any], engine: dict[str, Any], severity: str) -> None:
    (incident,) = opened([step(1, weights("trainer", **trainer), weights("engine", **engine))], "stale_weights")
    assert (incident.severity, incident.first.edge) == (severity, "engine")


def test_checksums_of_different_versions_are_not_compared() -> None:
    views = [step(1, weights("trainer", version=4, checksum="a"), weights("engine", version=3, checksum="b"))]
    assert opened(views, "stale_weights") == []


def test_staleness_above_the_runs_own_warns_and_asynchronous_staleness_is_normal() -> None:
    calm = [step(i, **{"staleness.max": float(2 + i % 3)}) for i in range(60)]
    assert opened(calm, "stale_weights") == []
    (incident,) = opened([*calm, step(60, **{"staleness.max": 11.0})], "stale_weights")
    assert (incident.opened, incident.severity) == (60, "warning")


def test_a_push_without_a_flush_warns_once_a_flush_was_seen() -> None:
    flush = {"kind": "flush", "data": {"engine": "x"}}
    good = [step(i, weights("engine", version=i), flush, **{"mismatch.kl_k3": 1e-4}) for i in range(20)]
    assert opened(good, "stale_cache") == []
    bad = [step(20 + i, weights("engine", version=20 + i), **{"mismatch.kl_k3": 1e-4}) for i in range(3)]
    assert opened(good + bad, "stale_cache")[0].severity == "warning"
    ill = [step(20 + i, weights("engine", version=20 + i), **{"mismatch.kl_k3": 0.4}) for i in range(3)]
    assert opened(good + ill, "stale_cache")[0].severity == "critical"


def test_a_host_that_tells_of_no_flush_is_not_accused() -> None:
    assert opened([step(i, weights("engine", version=i)) for i in range(9)], "stale_cache") == []


def test_runs_without_notices_are_unknown() -> None:
    assert opened(healthy(30), "stale_weights") == []
    assert opened(healthy(30), "stale_cache") == []


def engine(version: str, checksum: str, **data: Any) -> dict[str, Any]:
    return weights("engine", engine="e", version=version, checksum=checksum, ok=True, **data)


def test_a_label_that_moves_while_the_weights_stand_still_is_critical() -> None:
    (incident,) = opened([step(1, engine("v1", "a")), step(2, engine("v2", "a"))], "stale_weights")
    assert (incident.opened, incident.severity) == (2, "critical")


def test_weights_that_move_under_the_old_label_warn() -> None:
    (incident,) = opened([step(1, engine("v1", "a")), step(2, engine("v1", "b"))], "stale_weights")
    assert (incident.opened, incident.severity) == (2, "warning")


def test_a_push_that_the_engine_labels_otherwise_warns() -> None:
    (incident,) = opened([step(1, engine("v1", "a", pushed="v7"))], "stale_weights")
    assert incident.severity == "warning"


@pytest.mark.parametrize(
    "views",
    [
        [step(1, engine("v1", "a", pushed="v1")), step(2, engine("v2", "b", pushed="v2"))],
        # The same weights again, and a checksum that is the trainer's own, are what they should be.
        [step(1, engine("v1", "a")), step(2, engine("v1", "a"))],
        [step(1, engine("v1", "a")), step(2, weights("trainer", version="v1", checksum="b"), engine("v1", "b"))],
        # Weights that return after a push that was not looked at.
        [step(1, engine("v1", "a")), step(2, engine("v2", "")), step(3, engine("v3", "a"))],
        # Nobody labels.
        [step(1, engine("default", "a")), step(2, engine("default", "b"))],
        # Nothing of the trainer moved either.
        [step(1, engine("v1", "a")), step(2, weights("trainer", version="v2", changed_share=0.0), engine("v2", "a"))],
    ],
)
def test_what_a_healthy_push_looks_like(views: list[StepView]) -> None:
    assert opened(views, "stale_weights") == []


def test_a_flush_of_one_engine_excuses_no_other() -> None:
    both = [weights("engine", engine=name, version=1) for name in ("e1", "e2")]
    flushes = [{"kind": "flush", "data": {"engine": name}} for name in ("e1", "e2")]
    good = [step(i, *both, *flushes) for i in range(3)]
    assert opened(good, "stale_cache") == []
    assert opened([*good, step(3, *both, flushes[0])], "stale_cache")[0].opened == 3


def test_an_engine_that_found_tokens_in_its_cache_and_never_flushes_is_seen() -> None:
    first = step(0, weights("engine", engine="e", clean=True))
    views = [first, *(step(i, weights("engine", engine="e", clean=False, caching=True)) for i in range(1, 3))]
    assert opened(views, "stale_cache")[0].opened == 1
    # Without a cache there is nothing to flush; and where nothing was generated in between, nothing old is in it.
    without = [first, *(step(i, weights("engine", engine="e", clean=False)) for i in range(1, 3))]
    assert opened(without, "stale_cache") == []
    clean = [step(i, weights("engine", engine="e", clean=True, caching=True)) for i in range(3)]
    assert opened(clean, "stale_cache") == []
