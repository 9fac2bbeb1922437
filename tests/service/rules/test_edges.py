"""The three edges name the odd pass, or say that they cannot."""

from __future__ import annotations

import pytest

from foreshock_service.rules.edges import odd_pass
from tests.service.rules.streams import view


@pytest.mark.parametrize(
    ("policy", "mismatch", "current", "edge"),
    [
        (0.05, 1e-4, 0.05, "training_pass"),
        (0.05, 0.05, 1e-4, "scoring_pass"),
        (0.05, 1.0, 1.05, "undecided"),
        (1e-5, 0.5, 0.5, "undecided"),
        (0.05, 0.04, 0.045, "undecided"),
        (5e-5, 1.2e-3, 1e-7, "scoring_pass"),
        (0.0, 0.1, 0.1, "undecided"),
        (float("nan"), 0.1, 0.1, "undecided"),
        (0.05, float("inf"), 0.05, "undecided"),
    ],
)
def test_the_odd_pass(policy: float, mismatch: float, current: float, edge: str) -> None:
    values = {"policy.kl_k2": policy, "mismatch.kl_k2": mismatch, "mismatch_current.kl_k2": current}
    assert odd_pass(view(0, values))[0] == edge


def test_two_edges_decide_nothing() -> None:
    assert odd_pass(view(0, {"policy.kl_k2": 0.05, "mismatch.kl_k2": 1e-4})) == ("undecided", None)


def test_kl_k3_serves_where_kl_k2_is_missing() -> None:
    values = {"policy.kl_k2": 0.05, "mismatch.kl_k3": 1e-4, "mismatch_current.kl_k3": 0.05}
    assert odd_pass(view(0, values))[0] == "training_pass"
