"""Causes by their signature, on the lab's illnesses as measured by the SDK's own statistics; abstention elsewhere."""

from __future__ import annotations

import msgspec
import pytest

from foreshock_service.diagnosis.signature import Diagnosis, diagnose
from tests.service.diagnosis.measured import ONSET, bands_of, steps_of


def of_lab(illness: str, steps: int = 10) -> Diagnosis:
    window = steps_of(illness)[ONSET - 1 : ONSET - 1 + steps]
    return diagnose(window, bands=bands_of(illness))


@pytest.mark.parametrize(
    ("illness", "edge", "cause"),
    [
        ("none", None, "numeric_noise"),
        ("stale_parameters", "training_pass", "stale_trainer_parameters"),
        ("dropout", "training_pass", "dropout"),
        ("stale_scoring", "scoring_pass", "stale_trainer_parameters"),
        ("old_batch", "scoring_pass", "misaligned_rows"),
        ("shifted_labels", "engine", "shifted_labels"),
        ("temperature", "engine", "temperature"),
        ("top_k", "engine", "truncation"),
    ],
)
def test_ten_steps_of_an_illness_name_its_cause(illness: str, edge: str | None, cause: str) -> None:
    found = of_lab(illness)
    assert found.edge == edge
    assert found.causes[0].name == cause
    assert found.undecided_between == ()
    assert found.causes[0].speaks_for
    assert not found.abstains


@pytest.mark.parametrize(
    ("illness", "first"),
    [("stale_engine", None), ("frozen_engine", "stale_engine_weights"), ("quantised_engine", "quantised_engine")],
)
def test_old_weights_and_another_precision_are_not_told_apart_and_the_checksum_is_named(
    illness: str, first: str | None
) -> None:
    found = of_lab(illness)
    assert found.edge == "engine"
    assert first in (None, found.causes[0].name)
    assert set(found.undecided_between) == {"stale_engine_weights", "quantised_engine"}
    assert found.names("stale_engine")
    deciders = [word for cause in found.causes for word in cause.decided_by]
    assert any("checksum" in word for word in deciders)


@pytest.mark.parametrize("settings", [{"quantization": "fp8"}, {"engine": {"quantization": "int8"}}])
def test_what_the_engine_says_of_itself_decides(settings: dict[str, object]) -> None:
    window = steps_of("quantised_engine")[ONSET - 1 : ONSET + 9]
    found = diagnose(window, bands=bands_of("quantised_engine"), settings=settings)
    assert found.causes[0].name == "quantised_engine"
    assert found.undecided_between == ()


def test_a_weight_sync_that_failed_speaks_for_stale_weights() -> None:
    window = steps_of("quantised_engine")[ONSET - 1 : ONSET + 9]
    notices = [{"kind": "weights", "data": {"ok": False, "side": "engine"}}]
    found = diagnose(window, bands=bands_of("quantised_engine"), notices=notices)
    cause = next(c for c in found.causes if c.name == "stale_engine_weights")
    assert "a weight sync reported failure" in [fact.sentence for fact in cause.speaks_for]


def test_before_growth_can_be_told_a_training_pass_fault_is_one_of_two() -> None:
    found = of_lab("stale_parameters", steps=1)
    assert found.edge == "training_pass"
    assert set(found.undecided_between) == {"dropout", "stale_trainer_parameters"}
    assert "do not separate" in found.sentence


@pytest.mark.parametrize("steps", [1, 3])
def test_labels_and_truncation_are_known_from_the_first_step(steps: int) -> None:
    assert of_lab("shifted_labels", steps).causes[0].name == "shifted_labels"
    assert of_lab("top_k", steps).causes[0].name == "truncation"
    assert of_lab("temperature", steps).causes[0].name == "temperature"


def test_when_nothing_fits_it_says_so() -> None:
    odd = {"mismatch.kl_k2": 5.0, "mismatch.kl_k3": 5.0, "policy.kl_k2": 0.0, "mismatch.slope": 3.0,
           "mismatch.logp_pearson": 0.75, "mismatch.abs_mean": 2.0, "mismatch.delta_mean": 0.1}  # fmt: skip
    found = diagnose([odd])
    assert (found.edge, found.abstains, found.causes) == ("engine", True, ())
    assert "No known signature fits" in found.sentence


def test_without_the_shape_of_the_differences_one_cause_is_never_named_alone() -> None:
    values = {"policy.kl_k2": 0.0, "mismatch.kl_k2": 0.061, "mismatch.kl_k3": 0.078, "mismatch.abs_mean": 0.25,
              "mismatch.delta_mean": -0.13}  # fmt: skip
    found = diagnose([values], bands={"mismatch.kl_k3": (0.0, 1e-3, 3e-3)})
    assert {"quantised_engine", "stale_engine_weights", "temperature"} <= set(found.undecided_between)


def test_the_trainers_two_passes_do_not_differ_because_of_the_engine() -> None:
    values = {"policy.kl_k2": 0.004, "policy.slope": 1.0, "policy.logp_pearson": 0.999, "policy.abs_mean": 0.06,
              "policy.delta_mean": -0.002}  # fmt: skip
    found = diagnose([values], bands={"policy.kl_k2": (0.0, 1e-5, 1e-4)})
    assert found.edge == "undecided"
    assert {cause.name for cause in found.causes} == {"stale_trainer_parameters"}


def test_another_forward_and_one_stale_step_of_the_size_of_rounding_are_named_together() -> None:
    values = {"policy.kl_k2": 4e-4, "policy.slope": 1.0, "policy.logp_pearson": 0.9998, "policy.abs_mean": 0.015,
              "policy.delta_mean": 1e-4}  # fmt: skip
    found = diagnose([values], bands={"policy.kl_k2": (0.0, 1e-6, 1e-5)})
    assert set(found.undecided_between) == {"stale_trainer_parameters", "different_forward"}
    assert any("probe" in how for cause in found.causes for how in cause.decided_by)


def test_a_shift_of_all_tokens_one_way_is_truncation_although_no_kl_is_up() -> None:
    shifted = {"mismatch.kl_k1": 0.0137, "mismatch.kl_k2": 1.7e-4, "mismatch.kl_k3": 1.6e-4, "policy.kl_k2": 0.0,
               "mismatch.abs_mean": 0.0137, "mismatch.delta_mean": -0.0137, "mismatch.positive_share": 0.001,
               "mismatch.slope": 1.01, "mismatch.logp_pearson": 0.999}  # fmt: skip
    bands = {"mismatch.kl_k3": (1e-5, 1e-4, 1e-3)}
    assert diagnose([shifted], bands=bands).causes[0].name == "truncation"
    noise = {**shifted, "mismatch.delta_mean": 2e-4, "mismatch.kl_k1": -2e-4, "mismatch.positive_share": 0.5}
    assert diagnose([noise], bands=bands).causes[0].name == "numeric_noise"


def test_little_knowledge_names_nothing() -> None:
    found = diagnose([{"policy.kl_k2": 0.02}], bands={"policy.kl_k2": (0.0, 1e-5, 1e-4)})
    assert found.edge == "undecided"
    assert found.abstains


def test_a_healthy_step_has_nothing_to_explain() -> None:
    assert diagnose([{"reward.mean": 1.0}]).sentence.startswith("Nothing to explain")
    with pytest.raises(ValueError, match="at least one step"):
        diagnose([])


def test_one_special_token_needs_its_evidence() -> None:
    values = {"mismatch.kl_k2": 0.2, "mismatch.kl_k3": 0.2, "policy.kl_k2": 0.0, "mismatch.slope": 1.05,
              "mismatch.logp_pearson": 0.97, "mismatch.abs_q50": 1e-3, "mismatch.abs_q99": 2.0,
              "mismatch.delta_kurtosis": 60.0, "mismatch.abs_mean": 0.05, "mismatch.delta_mean": -0.047}  # fmt: skip
    tokens = [{"seq": i, "position": 9, "token": 2, "a": -9.0, "b": -0.1} for i in range(16)]
    assert not diagnose([values]).names("special_tokens")
    assert diagnose([values], evidence={"mismatch": tokens}).names("special_tokens")


def test_worst_tokens_of_one_kind_are_no_special_token_where_the_median_token_has_moved() -> None:
    # Old weights: every token has moved, and the worst sixteen are all the end token, which decides most.
    window = steps_of("stale_engine")[ONSET - 1 : ONSET + 9]
    tokens = [{"seq": i, "position": 6, "token": 12, "a": -7.0, "b": -0.1} for i in range(16)]
    usual = [v["mismatch.abs_q50"] for v in steps_of("stale_engine")[: ONSET - 1]]
    bands = bands_of("stale_engine") | {"mismatch.abs_q50": (min(usual) / 2, min(usual), 2 * min(usual))}
    for upto in range(1, len(window) + 1):
        found = diagnose(window[:upto], bands=bands, evidence={"mismatch": tokens})
        assert "special_tokens" not in [c.name for c in found.causes]
    assert found.names("stale_engine")


@pytest.mark.parametrize("illness", ["dropout", "old_batch", "stale_parameters", "temperature"])
def test_healthy_steps_before_the_onset_do_not_change_the_answer(illness: str) -> None:
    # As the page asks: the last steps, whatever they were.
    steps, bands = steps_of(illness), bands_of(illness)
    for last in range(ONSET, ONSET + 9):
        mixed, ill = diagnose(steps[:last], bands=bands), diagnose(steps[ONSET - 1 : last], bands=bands)
        assert (mixed.edge, mixed.causes, mixed.undecided_between) == (ill.edge, ill.causes, ill.undecided_between)


def test_two_dropout_passes_are_never_taken_for_stale_parameters_alone() -> None:
    values = {"policy.kl_k2": 0.032, "policy.slope": 0.99, "policy.logp_pearson": 0.991, "policy.abs_mean": 0.16,
              "policy.delta_mean": 5e-4, "policy.positive_share": 0.487, "policy.abs_q50": 0.09, "policy.abs_q99": 0.96,
              "policy.zero_share": 0.0, "policy.seq_zero_share": 0.0}  # fmt: skip
    found = diagnose([values], bands={"policy.kl_k2": (0.0, 1e-9, 1e-8)})
    assert set(found.undecided_between) == {"stale_trainer_parameters", "dropout"}
    assert "same partition twice" in found.sentence
    # One rank of several with old parameters leaves sequences untouched, which no dropout does.
    one_rank = diagnose([{**values, "policy.seq_zero_share": 0.5}], bands={"policy.kl_k2": (0.0, 1e-9, 1e-8)})
    assert one_rank.undecided_between == ()


def test_a_gap_that_does_not_grow_is_not_called_another_precision_alone_unless_the_engine_says_so() -> None:
    step = {"mismatch.kl_k2": 0.2, "mismatch.kl_k3": 0.1, "policy.kl_k2": 0.0, "mismatch.slope": 1.03,
            "mismatch.logp_pearson": 0.8, "mismatch.abs_mean": 0.2, "mismatch.delta_mean": -0.1}  # fmt: skip
    bands = {"mismatch.kl_k3": (1e-5, 1e-4, 1e-3)}
    assert set(diagnose([step] * 10, bands=bands).undecided_between) >= {"quantised_engine", "stale_engine_weights"}
    said = diagnose([step] * 10, bands=bands, settings={"quantization": "fp8"})
    assert (said.causes[0].name, said.undecided_between) == ("quantised_engine", ())


def test_sequence_ess_alone_is_length_and_no_fault() -> None:
    values = {"mismatch.kl_k3": 5e-4, "mismatch.kl_k2": 5e-4, "policy.kl_k2": 0.0, "mismatch.ess_sequence": 0.2,
              "mismatch.ess_token": 0.996, "mismatch.slope": 1.0, "mismatch.logp_pearson": 0.999}  # fmt: skip
    found = diagnose([values], bands={"mismatch.kl_k3": (1e-4, 5e-4, 2e-3)})
    assert found.edge is None
    assert "length_confounding" in [c.name for c in found.causes]


def test_moe_routing_needs_an_moe_model() -> None:
    values = {"mismatch.kl_k2": 0.06, "mismatch.kl_k3": 0.06, "policy.kl_k2": 0.0, "mismatch.slope": 0.98,
              "mismatch.logp_pearson": 0.96, "mismatch.abs_q50": 0.01, "mismatch.abs_q99": 1.0,
              "mismatch.tail_ln2": 0.01, "mismatch.delta_kurtosis": 80.0, "mismatch.abs_mean": 0.05,
              "mismatch.delta_mean": 0.0}  # fmt: skip
    assert not diagnose([values]).names("moe_routing")
    assert diagnose([values], settings={"moe": True}).names("moe_routing")


def test_a_diagnosis_is_plain_data() -> None:
    plain = msgspec.to_builtins(of_lab("stale_parameters"))
    assert plain["causes"][0]["name"] == "stale_trainer_parameters"
    assert plain["location"]["edge"] == "training_pass"
