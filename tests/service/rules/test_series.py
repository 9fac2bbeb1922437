"""Of several series the gravest speaks."""

from __future__ import annotations

import math

from foreshock_service.rules.interface import QUIET, UNKNOWN, Verdict
from foreshock_service.rules.series import judged_each
from tests.service.rules.streams import view

WARNING, CRITICAL = Verdict(firing=True), Verdict(firing=True, severity="critical")


def judge(state: int, value: float, signal: str) -> tuple[int, Verdict]:
    return state + 1, {0.0: QUIET, 1.0: WARNING, 2.0: CRITICAL}[value]


def test_the_gravest_speaks_and_only_what_was_there_is_folded() -> None:
    names = ("a", "b", "c")
    assert judged_each((0, 0, 0), names, view(1, {"a": 0.0, "b": 1.0}), judge) == ([1, 1, 0], WARNING)
    assert judged_each((0, 0, 0), names, view(1, {"a": 1.0, "c": 2.0}), judge) == ([1, 0, 1], CRITICAL)
    assert judged_each((0, 0, 0), names, view(1, {"a": 0.0}), judge) == ([1, 0, 0], QUIET)


def test_what_is_missing_or_not_finite_decides_nothing() -> None:
    assert judged_each((0,), ("a",), view(1, {"a": math.nan}), judge) == ([0], UNKNOWN)
