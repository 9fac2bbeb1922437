"""Streams that were not compared are reported, by pair."""

from __future__ import annotations

from tests.service.rules.streams import opened, view

RULE = "semantics_differ"


def test_signals_missing_for_that_reason_warn_and_name_the_pairs() -> None:
    missing = {
        "mismatch.kl_k3": "semantics_differ",
        "mismatch.abs_mean": "semantics_differ",
        "policy.kl_k2": "detached",
    }
    (incident,) = opened([view(0, {"loss": 0.1}, missing=missing)], RULE)
    assert incident.severity == "warning"
    assert [e.signal for e in incident.first.evidence] == ["mismatch.kl_k3"]


def test_other_reasons_are_no_finding() -> None:
    assert opened([view(0, {"loss": 0.1}, missing={"policy.kl_k2": "detached"})], RULE) == []


def test_a_notice_carries_the_detail() -> None:
    notice = {"kind": "semantics", "data": {"detail": "temperature 0.7 against 1.0"}}
    assert "temperature 0.7" in opened([view(0, {"loss": 0.1}, notices=(notice,))], RULE)[0].first.message
