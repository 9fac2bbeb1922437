"""Numbers, spans and curves as the page writes them, without a browser."""

from __future__ import annotations

import math
import re

import pytest
from markupsafe import Markup

from foreshock_service.web.charts import kinds
from foreshock_service.web.figures import curve, heights, number, span, told
from foreshock_service.web.fleet import Wanted


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"), (0.0, "0"), (85.0, "85"), (-3.0, "−3"), (0.12345, "0.1235"), (-0.5, "−0.5"), (3.17e-6, "3.17e−6"),
        (1.5e7, "1.50e7"), (2.5e-12, "2.50e−12"), (math.nan, "NaN"), (math.inf, "∞"), (-math.inf, "−∞"), ("nan", "NaN"),
        ("-inf", "−∞"),
    ],
)  # fmt: skip
def test_a_number_has_four_digits_and_a_name_where_it_is_none(value: float | str | None, text: str) -> None:
    assert number(value) == text


def test_a_span_is_told_in_its_largest_unit() -> None:
    assert [span(s) for s in (-1, 59.9, 60, 3599, 3600, 86_400 * 3)] == ["0 s", "59 s", "1 min", "59 min", "1 h", "3 d"]


def test_noise_of_a_few_per_cent_is_not_blown_up_to_the_full_height() -> None:
    flat = [v for v in heights([1.0e-5, 1.03e-5, 0.98e-5], log=True) if v is not None]
    assert max(flat) - min(flat) < 0.03
    jump = heights([1e-5, 1e-2], log=True)
    assert jump == [0.0, 1.0]


def test_zero_lies_at_the_bottom_of_a_logarithmic_scale_and_gaps_stay_gaps() -> None:
    assert heights([0.0, 1e-6, 1.0, None, math.nan], log=True) == [0.0, 0.0, 1.0, None, None]
    assert heights([0.0, 0.0], log=True) == [0.5, 0.5]
    assert heights([], log=False) == []
    assert heights([None, math.inf], log=False) == [None, None]


def test_a_curve_names_itself_escapes_its_name_and_marks_what_is_not_finite() -> None:
    drawn = curve([1.0, math.nan, None, 2.0], '"><script>', log=False)
    assert isinstance(drawn, Markup)
    assert "<script>" not in drawn
    assert drawn.count('class="broken"') == 1
    assert len(re.findall("M", re.search(r'class="line" d="([^"]*)"', drawn)[1])) == 2, "the gap is bridged"  # type: ignore[index]
    assert "style=" not in drawn


def test_a_curve_is_told_in_words() -> None:
    assert told("loss", [0.5, 0.25, math.nan]) == "loss, last 3 steps: now NaN, lowest 0.25, highest 0.5, 1 not finite"
    assert told("loss", [None]) == "loss: nothing in the last 1 steps"


def test_the_filter_survives_any_address() -> None:
    for page in ("0", "-1", "x", "1e9", "9" * 30, "²", ""):
        assert Wanted.of({"page": page, "verdict": "<b>", "sort": "; DROP", "status": "?"}) == Wanted()
    wanted = Wanted.of({"q": " a&b=c# ", "verdict": "critical", "page": "3"})
    assert wanted.address() == "/?q=a%26b%3Dc%23&verdict=critical"
    assert wanted.address(page=3).endswith("&page=3")
    assert Wanted().address() == "/"


def test_accused_signals_come_before_the_training_and_nothing_comes_twice() -> None:
    known = ["policy.kl_k2", "reward.mean", "loss", "host.x", "bad name"]
    found = [k.signals for k in kinds(known, ["loss", "policy.kl_k2", "gone"], ["host.x", "loss", "bad name"])]
    assert found == [("policy.kl_k2",), ("loss",), ("host.x",), ("reward.mean",)]
