"""A NaN or an infinity is an incident at the step at which it comes."""

from __future__ import annotations

import math

import pytest

from foreshock_service.rules.non_finite import offenders
from tests.service.rules.streams import changed, healthy, incidents, opened, view

RULE = "non_finite"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("signal", ["loss", "grad.norm", "policy.kl_k2", "mismatch@lag2.kl_k3", "entropy.mean"])
def test_a_vital_signal_is_critical_at_once_even_at_the_first_step(signal: str, bad: float) -> None:
    (incident,) = opened([view(0, {"reward.mean": 0.1, signal: bad})], RULE)
    assert (incident.opened, incident.severity) == (0, "critical")
    assert incident.first.evidence[0].signal == signal


def test_a_hosts_own_scalar_only_warns_and_may_be_ignored() -> None:
    views = [view(0, {"loss": 0.1, "my.metric": math.nan})]
    assert opened(views, RULE)[0].severity == "warning"
    assert opened(views, RULE, ignore=["my.metric"]) == []


def test_finite_values_however_large_are_no_finding() -> None:
    assert opened([view(0, {"a": 1.7e308, "b": 1.7e308, "loss": -1e300})], RULE) == []


def test_a_single_nan_among_ordinary_steps_resolves() -> None:
    views = changed(healthy(20), 0)
    views[7] = view(7, {**views[7].values, "loss": math.nan})
    (incident,) = incidents(views)
    assert (incident.rule, incident.opened, incident.closed) == (RULE, 7, 12)


def test_nonfinite_tokens_in_a_trainer_pass_are_critical_and_a_few_of_the_engines_warn() -> None:
    assert opened([view(0, {"policy.nonfinite": 1, "policy.tokens": 1e6})], RULE)[0].severity == "critical"
    assert opened([view(0, {"mismatch.nonfinite": 1, "mismatch.tokens": 1e6})], RULE)[0].severity == "warning"
    assert opened([view(0, {"mismatch.nonfinite": 1e4, "mismatch.tokens": 1e6})], RULE)[0].severity == "critical"


def test_sentinels_warn() -> None:
    assert opened([view(0, {"mismatch.sentinels": 3})], RULE)[0].severity == "warning"


def test_an_overflowing_gradient_whose_update_was_skipped_warns_and_else_is_critical() -> None:
    assert opened([view(0, {"grad.nonfinite": 2, "update.skipped": 1})], RULE)[0].severity == "warning"
    assert opened([view(0, {"grad.nonfinite": 2, "update.skipped": 0})], RULE)[0].severity == "critical"


def test_a_step_without_any_value_decides_nothing() -> None:
    views = [view(0, {"loss": math.nan}), *[view(i, {}) for i in range(1, 20)]]
    assert opened(views, RULE)[0].closed is None


def test_offenders_names_them() -> None:
    assert offenders({"a": 1.0, "b": math.nan, "c": math.inf}) == ["b", "c"]
