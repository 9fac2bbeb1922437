"""The three edges locate a fault; what cannot be told stays undecided."""

from __future__ import annotations

import math

import pytest

from foreshock_service.diagnosis.edges import locate, settled

BANDS = {"policy.kl_k2": (1e-6, 1e-5, 1e-4), "mismatch.kl_k3": (1e-4, 5e-4, 2e-3)}
FLOOR = {"policy.kl_k2": 1e-5, "mismatch.kl_k2": 5e-4, "mismatch.kl_k3": 5e-4,
         "mismatch_current.kl_k2": 5e-4, "mismatch_current.kl_k3": 5e-4}  # fmt: skip


def values(policy: float = 1e-5, mismatch: float = 5e-4, current: float = 5e-4) -> dict[str, float]:
    return {"policy.kl_k2": policy, "mismatch.kl_k2": mismatch, "mismatch.kl_k3": mismatch,
            "mismatch_current.kl_k2": current, "mismatch_current.kl_k3": current}  # fmt: skip


@pytest.mark.parametrize(
    ("seen", "edge"),
    [
        (values(), None),
        (values(policy=0.02, current=0.02), "training_pass"),
        (values(policy=0.02, mismatch=0.02), "scoring_pass"),
        (values(mismatch=0.1, current=0.1), "engine"),
        (values(policy=0.02, mismatch=0.1, current=0.1), "undecided"),
        (values(policy=2e-4, mismatch=0.1, current=0.1), "engine"),
        (values(policy=1e-3, mismatch=5e-4, current=1.5e-3), "training_pass"),
    ],
)
def test_the_pass_opposite_to_the_edge_at_its_floor_is_at_fault(seen: dict[str, float], edge: str | None) -> None:
    assert locate(seen, BANDS).edge == edge


def test_a_missing_third_edge_is_made_up_for_by_the_triangle() -> None:
    seen = {k: v for k, v in values(mismatch=0.1).items() if not k.startswith("mismatch_current")}
    assert locate(seen, BANDS).edge == "engine"


@pytest.mark.parametrize("reason", ["detached", "older_weights", "rollout", "interpolated"])
def test_without_a_second_look_at_the_same_weights_an_engine_fault_is_undecided(reason: str) -> None:
    seen = {k: v for k, v in values(mismatch=0.1, current=0.1).items() if not k.startswith("policy")}
    found = locate(seen, BANDS, {"policy.kl_k2": reason, "policy.kl_k3": reason})
    assert found.edge == "undecided"
    assert "no second look" in found.sentence
    assert found.level("policy") == "missing"


def test_policy_up_without_any_engine_edge_is_undecided() -> None:
    assert locate({"policy.kl_k2": 0.02}, BANDS).edge == "undecided"


def test_without_baselines_only_the_certain_is_said() -> None:
    assert locate(values(), {}).edge is None
    assert locate(values(policy=0.02, current=0.02, mismatch=0.0), {}).edge == "training_pass"
    assert locate(values(policy=0.0, mismatch=0.2, current=0.2), {}).edge == "engine"


def test_a_nan_is_missing_and_not_up() -> None:
    found = locate({"policy.kl_k2": math.nan, "mismatch.kl_k3": 5e-4}, BANDS)
    assert (found.level("policy"), found.edge) == ("missing", None)


def test_zero_is_a_measurement_at_its_floor() -> None:
    assert locate({"policy.kl_k2": 0.0}, {}).level("policy") == "floor"


def test_one_step_out_of_range_is_no_fault_and_a_jump_is_one_at_once() -> None:
    calm, odd = values(), values(mismatch=4e-3, current=4e-3)
    assert locate(settled([calm, calm, odd]), BANDS).edge is None
    assert locate(settled([calm, odd, odd]), BANDS).edge == "engine"
    assert locate(settled([calm, calm, values(mismatch=0.1, current=0.1)]), BANDS).edge == "engine"
    assert locate(settled([odd]), BANDS).edge == "engine"


def test_what_the_last_step_lacks_is_missing_whatever_came_before() -> None:
    assert locate(settled([values(), values(), {"reward.mean": 1.0}]), BANDS).level("policy") == "missing"


def test_a_figure_that_no_rule_would_speak_of_must_be_far_out_of_its_range() -> None:
    bands = {"policy.kl_k2": (1e-6, 1e-5, 2e-5)}
    assert locate({"policy.kl_k2": 3e-5}, bands).edge is None
    assert locate({"policy.kl_k2": 4e-9}, {"policy.kl_k2": (0.0, 1e-13, 3e-13)}).edge == "undecided"


def test_a_range_made_wide_by_heavy_tails_excuses_nothing_that_rounding_cannot_explain() -> None:
    wide = {"policy.kl_k2": (1e-6, 1e-5, 1e-4), "mismatch.kl_k3": (1e-13, 1e-5, 1e3)}
    assert locate(values(mismatch=0.1, current=0.1), wide).edge == "engine"
