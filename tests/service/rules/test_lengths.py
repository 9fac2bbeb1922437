"""length_runaway and truncation_surge: growth that nobody pays for, and answers cut by the limit."""

from __future__ import annotations

import random

from foreshock_service.rules.interface import StepView
from tests.service.rules.streams import healthy, opened, view


def growing(factor: float, reward_slope: float, truncated: float = 0.0, start: int = 40) -> list[StepView]:
    source, views = random.Random(2), []
    for step in range(100):
        late = max(0, step - start)
        length = min(4000.0, 500 * factor**late) + source.gauss(0, 10)
        cut = min(truncated, 0.1 * late)
        reward = 0.5 + reward_slope * late + source.gauss(0, 0.02)
        views.append(view(step, {"length.mean": length, "reward.mean": reward, "length.truncated": cut}))
    return views


def test_length_runaway_warns_at_growth_without_reward() -> None:
    (incident,) = opened(growing(1.04, 0.0), "length_runaway")
    assert incident.severity == "warning"
    assert incident.opened is not None
    assert 41 <= incident.opened <= 60


def test_length_runaway_is_silent_about_growth_that_pays() -> None:
    assert opened(growing(1.02, 0.006), "length_runaway") == []


def test_length_runaway_is_critical_once_everything_is_cut() -> None:
    assert opened(growing(1.06, 0.0, truncated=1.0), "length_runaway")[0].severity == "critical"


def test_length_runaway_is_silent_on_a_calm_run() -> None:
    assert opened(healthy(300), "length_runaway") == []


def shrinking(factor: float, reward_slope: float | None, start: int = 40) -> list[StepView]:
    source, views = random.Random(3), []
    for step in range(100):
        late = max(0, step - start)
        values = {"length.mean": max(3.0, 500 * factor**late + source.gauss(0, 10))}
        if reward_slope is not None:
            values["reward.mean"] = 0.5 + reward_slope * late + source.gauss(0, 0.02)
        views.append(view(step, values))
    return views


def test_length_collapse_is_found_where_the_reward_falls_with_the_responses() -> None:
    (incident,) = opened(shrinking(0.94, -0.006), "length_collapse")
    assert [f.transition for f in incident.findings if f.transition != "update"] == ["open", "escalate"]
    assert incident.opened is not None
    assert 41 <= incident.opened <= 60


def test_length_collapse_is_silent_about_brevity_that_costs_nothing_and_where_no_reward_is_known() -> None:
    assert opened(shrinking(0.94, 0.002), "length_collapse") == []
    assert opened(shrinking(0.94, 0.0), "length_collapse") == []
    assert opened(shrinking(0.94, None), "length_collapse") == []
    assert opened(healthy(300), "length_collapse") == []


def cut(limit: float, sequences: float | None = 128, start: int = 30, segment: int = 0) -> list[StepView]:
    source, views = random.Random(4), []
    for step in range(60):
        late = step >= start
        longest = limit if late else 900 + source.gauss(0, 60)
        values = {"length.mean": 0.97 * limit if late else 500 + source.gauss(0, 15), "length.max": longest}
        values["reward.mean"] = 0.5 + source.gauss(0, 0.02)
        if sequences is not None:
            values["mismatch.sequences"] = sequences
        views.append(view(step, values, segment=segment if late else 0))
    return views


def test_length_collapse_is_found_at_once_where_the_longest_response_is_below_the_former_mean() -> None:
    (incident,) = opened(cut(400), "length_collapse")
    assert (incident.opened, incident.severity) == (30, "warning")
    assert "ends them early" in incident.first.message


def test_a_cut_of_few_or_unknown_responses_must_stay_at_its_limit() -> None:
    assert opened(cut(400, None), "length_collapse")[0].opened == 32
    assert opened(cut(400, 8), "length_collapse")[0].opened == 32
    source = random.Random(5)
    short = [v if v.step < 30 else view(v.step, {**v.values, "length.max": 380 + source.random()}) for v in cut(400, 8)]
    assert opened(short, "length_collapse") == []


def test_a_limit_above_the_former_mean_or_set_on_purpose_is_no_cut() -> None:
    assert opened(cut(700), "length_collapse") == []
    assert opened(cut(400, segment=1), "length_collapse") == []


def test_truncation_surge_warns_then_is_critical() -> None:
    views = [view(i, {"length.truncated": 0.02 if i < 30 else min(1.0, 0.1 * (i - 29))}) for i in range(60)]
    (incident,) = opened(views, "truncation_surge")
    assert [f.transition for f in incident.findings if f.transition != "update"] == ["open", "escalate"]
    assert incident.opened is not None
    assert incident.opened <= 35


def test_truncation_surge_finds_a_rise_too_slow_to_be_a_jump() -> None:
    views = [view(i, {"length.truncated": 0.0 if i < 30 else min(1.0, 0.01 * (i - 29))}) for i in range(150)]
    assert opened(views, "truncation_surge") != []


def test_a_run_that_was_always_cut_has_that_as_its_baseline() -> None:
    source = random.Random(0)
    assert (
        opened([view(i, {"length.truncated": source.choice((0.9, 1.0))}) for i in range(100)], "truncation_surge") == []
    )
