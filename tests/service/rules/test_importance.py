"""is_degeneracy, outlier_sequences and clip_saturation: where the loss hangs on few tokens."""

from __future__ import annotations

from foreshock_service.rules.interface import StepView
from tests.service.rules.streams import opened, view


def ess(values: list[float]) -> list[StepView]:
    return [view(i, {"mismatch.ess_token": x}) for i, x in enumerate(values)]


def test_a_fall_below_half_warns_and_below_a_tenth_is_critical() -> None:
    calm = [0.99 + 0.001 * (i % 5) for i in range(30)]
    assert opened(ess(calm), "is_degeneracy") == []
    assert opened(ess(calm + [0.4] * 5), "is_degeneracy")[0].severity == "warning"
    assert opened(ess(calm + [0.02] * 5), "is_degeneracy")[0].severity == "critical"


def test_an_ess_that_was_never_high_warns_of_nothing_and_a_hopeless_one_is_critical_all_the_same() -> None:
    assert opened(ess([0.45 + 0.01 * (i % 3) for i in range(60)]), "is_degeneracy") == []
    assert opened(ess([0.01] * 5), "is_degeneracy")[0].opened == 2


def test_a_correction_that_drops_most_of_the_batch_warns() -> None:
    assert opened([view(0, {"is_weight.masked": 0.65})], "is_degeneracy")[0].severity == "warning"


def test_the_sequence_share_is_never_read() -> None:
    assert opened([view(i, {"mismatch.ess_sequence": 0.06}) for i in range(30)], "is_degeneracy") == []


def outliers(share: float, largest: float, start: int = 20) -> list[StepView]:
    return [
        view(
            i,
            {
                "mismatch.seq_outlier": share if i >= start else 0.002,
                "mismatch.seq_abs_max": largest,
                "mismatch.abs_max": 9.0,
            },
            evidence={"mismatch": [{"seq": "1", "position": 3, "token": 151645, "a": -9.0, "b": 0.0}]},
        )
        for i in range(40)
    ]


def test_a_tenth_of_the_sequences_warns_and_shows_the_worst_tokens() -> None:
    (incident,) = opened(outliers(0.15, 2.0), "outlier_sequences")
    assert incident.opened == 21
    assert any("151645" in evidence.sentence for evidence in incident.first.evidence)


def test_outliers_of_rounding_and_rare_ones_are_no_finding() -> None:
    assert opened(outliers(0.15, 1e-3), "outlier_sequences") == []
    assert opened(outliers(0.02, 2.0), "outlier_sequences") == []


def clipped(values: list[float]) -> list[StepView]:
    return [view(i, {"update.clip_low": x / 2, "update.clip_high": x / 2}) for i, x in enumerate(values)]


def test_saturation_out_of_the_runs_own_range_warns_then_is_critical() -> None:
    calm = [0.01 + 0.002 * (i % 4) for i in range(30)]
    assert opened(clipped(calm), "clip_saturation") == []
    assert opened(clipped(calm + [0.2] * 8), "clip_saturation")[0].severity == "warning"
    assert opened(clipped(calm + [0.6] * 8), "clip_saturation")[0].severity == "critical"


def test_a_run_that_always_clips_much_has_that_as_its_range() -> None:
    assert opened(clipped([0.3 + 0.02 * (i % 4) for i in range(80)]), "clip_saturation") == []


def test_a_constant_zero_is_unknown_and_closes_nothing() -> None:
    views = clipped([0.01 + 0.002 * (i % 4) for i in range(30)] + [0.6] * 8)
    assert opened(clipped([0.0] * 50), "clip_saturation") == []
    assert opened(views, "clip_saturation")[0].closed is None


def test_a_mean_corrected_weight_that_falls_to_half_of_its_own_level_warns() -> None:
    calm = [0.9 + 0.02 * (i % 4) for i in range(20)]
    (incident,) = opened([view(i, {"is_weight.mean": x}) for i, x in enumerate(calm + [0.3] * 4)], "is_degeneracy")
    assert (incident.opened, incident.severity) == (20, "warning")


def test_a_mean_weight_that_was_always_low_is_the_length_of_the_responses() -> None:
    views = [view(i, {"is_weight.mean": 0.3 + 0.02 * (i % 4)}) for i in range(40)]
    assert opened(views, "is_degeneracy") == []
