"""Series thinned with every bucket's extremes kept, single steps in full, and JSON that spells what is not finite."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshock_service.api.encoding import finite, iso, to_json
from foreshock_service.api.series import thin_values

SERIES = "/v1/runs/math/q/series"
values = st.floats(allow_nan=True, allow_infinity=True, width=32)


@given(st.lists(values, max_size=400), st.integers(5, 60))
def test_thinning_keeps_ends_order_bound_and_every_extreme(series: list[float], most: int) -> None:
    kept = thin_values(np.array(series, dtype=float), most).tolist()
    assert kept == sorted(set(kept))
    assert len(kept) <= most
    if not series:
        return
    assert (kept[0], kept[-1]) == (0, len(series) - 1)
    shown = [series[i] for i in kept]
    numbers = [v for v in series if not math.isnan(v)]
    if numbers:
        assert min(numbers) in shown
        assert max(numbers) in shown
    assert any(map(math.isnan, shown)) == any(map(math.isnan, series)), "a NaN is a finding and must stay to be seen"


@given(st.lists(st.floats(-1e3, 1e3), min_size=100, max_size=300))
def test_thinning_keeps_each_buckets_extremes(series: list[float]) -> None:
    kept = set(thin_values(np.array(series), 32).tolist())
    for b in range(10):
        bucket = range(b * len(series) // 10, (b + 1) * len(series) // 10)
        shown = [series[i] for i in bucket if i in kept]
        everything = [series[i] for i in bucket]
        assert (min(shown), max(shown)) == (min(everything), max(everything))


def test_json_spells_what_is_not_finite_wherever_it_stands() -> None:
    tree = {"a": [math.nan, {"b": math.inf}], "c": (-math.inf, 1.5), "d": None, "e": True}
    assert json.loads(to_json(tree)) == {"a": ["nan", {"b": "inf"}], "c": ["-inf", 1.5], "d": None, "e": True}
    assert finite(0.0) == 0.0


@pytest.mark.parametrize("absurd", [None, math.nan, math.inf, 1e300, -1e300])
def test_an_absurd_clock_has_no_date_and_breaks_nothing(absurd: float | None) -> None:
    assert iso(absurd) is None


@pytest.fixture
def steps(house_on_each) -> Any:
    """Sixty steps; NaN at 30, a spike at 41, `late` only from step 50 on."""
    house = house_on_each
    rows: dict[int, dict[str, Any]] = {step: {"loss": step / 100} for step in range(60)}
    rows[30]["loss"], rows[41]["loss"] = "nan", 99.0
    for step in range(50, 60):
        rows[step]["late"] = -1.0 * step
    house.steps(rows)
    house.wait_for(lambda: house.near.get("/v1/runs/math/q").json()["last_step"] == 59)
    return house


def test_series_are_read_whole_thinned_and_by_window(steps) -> None:
    whole = steps.near.get(f"{SERIES}?signal=loss&signal=late&signal=never").json()
    loss, late, never = whole["series"]
    assert [p["step"] for p in loss["points"]] == list(range(60))
    assert loss["points"][30]["value"] == "nan"
    assert (loss["stored"], late["stored"], never["stored"]) == (60, 10, 0)
    assert [p["step"] for p in late["points"]] == list(range(50, 60)), "missing is not zero"
    thinned = steps.near.get(f"{SERIES}?signal=loss&max_points=10").json()["series"][0]
    assert len(thinned["points"]) <= 10
    assert {30, 41} <= {p["step"] for p in thinned["points"]}
    window = steps.near.get(f"{SERIES}?signal=loss&from_step=40&to_step=42&attempt=1").json()["series"][0]
    assert [(p["step"], p["value"]) for p in window["points"]] == [(40, 0.4), (41, 99.0), (42, 0.42)]
    assert steps.near.get(f"{SERIES}?signal=loss&attempt=7").json()["series"][0]["points"] == []


def test_a_step_is_shown_in_full(steps) -> None:
    body = steps.near.get("/v1/runs/math/q/steps/50").json()
    assert body["values"] == {"late": -50.0, "loss": 0.5}
    assert (body["attempt"], body["reported"], body["expected"]) == (1, 1, 1)
    assert body["at_iso"].endswith("Z")
    assert steps.near.get("/v1/runs/math/q/steps/60").status_code == 404
    assert steps.near.get("/v1/runs/math/q/signals").json()["signals"] == ["late", "loss"]


def test_replaying_the_pack_in_use_finds_what_was_found_and_another_finds_what_it_says(steps) -> None:
    found = steps.near.post("/v1/rules/replay", json={"run": "math/q"}).json()
    assert found["steps"] == 60
    assert ("non_finite", "open", 30) in [(f["rule"], f["transition"], f["step"]) for f in found["findings"]]
    live = steps.near.get("/v1/incidents?run=math/q").json()["incidents"]
    assert {f["rule"] for f in found["findings"]} == {i["rule"] for i in live}
    pack = "version: 1\nrules:\n  non_finite: {enabled: false}\n"
    without = steps.near.post("/v1/rules/replay", json={"run": "math/q", "pack": pack}).json()
    assert "non_finite" not in {f["rule"] for f in without["findings"]}
    assert without["pack_hash"] != found["pack_hash"]
    before = steps.near.get("/v1/incidents").json()
    assert before["incidents"] == live, "a replay stores nothing"


def test_a_bad_pack_says_what_is_wrong_with_it(house) -> None:
    pack = "version: 1\nrules:\n  non_finte: {}\n"
    answer = house.near.post("/v1/rules/replay", json={"run": "math/q", "pack": pack})
    assert answer.status_code == 422
    assert "non_finite" in answer.json()["detail"]


def test_windows_are_bounded(make_house) -> None:
    house = make_house(max_replay_steps=3, max_series_steps=100, max_series_points=10, max_series_signals=2)
    house.steps({step: {"loss": 1.0} for step in range(5)})
    house.wait_for(lambda: house.near.get("/v1/runs/math/q").json()["last_step"] == 4)
    assert house.near.post("/v1/rules/replay", json={"run": "math/q"}).status_code == 413
    assert house.near.post("/v1/rules/replay", json={"run": "math/q", "from_step": 3}).json()["steps"] == 2
    assert house.near.get(f"{SERIES}?signal=a&signal=b&signal=c").status_code == 422
    assert house.near.get(f"{SERIES}?signal=%3Cb%3E").status_code == 422
    assert house.near.get(f"{SERIES}?signal=loss&from_step={2**63}").status_code == 422
    assert house.near.get(SERIES).status_code == 422
    many = house.near.get(f"{SERIES}?signal=loss&max_points=1000000").json()
    assert len(many["series"][0]["points"]) == 5
