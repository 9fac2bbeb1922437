"""A probe's acknowledgement becomes evidence in words; figures that are not there are not invented."""

from __future__ import annotations

from foreshock_service.diagnosis.probed import read


def test_the_variant_that_stands_out_of_the_repeat_names_the_cause() -> None:
    found = read("c1", 40, {"probe": {"repeat": {"kl_k2": 1e-9}, "other_mode": {"kl_k2": 1e-4},
                                      "other_partition": {"kl_k2": 2e-9}}})  # fmt: skip
    assert found is not None
    assert found.moved == ("repeat", "other_mode")
    assert "dropout" in found.sentence
    assert "rounding from batching" not in found.sentence


def test_where_nothing_moves_numerics_are_excluded() -> None:
    found = read("c1", 40, {"probe": {"repeat": {"kl_k2": 0.0}, "no_padding": {"kl_k2": 0.0}}})
    assert found is not None
    assert found.moved == ()
    assert "numerics do not explain" in found.sentence


def test_a_nan_stands_out_and_a_failed_variant_is_said() -> None:
    found = read("c1", None, {"probe": {"other_mode": {"kl_k2": "nan"}, "fp32": {"error": "no kernel"}}})
    assert found is not None
    assert found.moved == ("other_mode",)
    assert "Not tried: fp32" in found.sentence


def test_an_acknowledgement_without_a_probe_is_none() -> None:
    assert read("c1", 1, {"text": "ok"}) is None
    assert read("c1", 1, {"probe": "odd"}) is None
    empty = read("c1", 1, {"probe": {}})
    assert empty is not None
    assert empty.sentence == "The probe gave no figures."
