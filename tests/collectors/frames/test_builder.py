"""Observations land on the right pair, and what cannot be compared is missing with its reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foreshock.frames.builder import StepBuilder
from foreshock.wire import Frame, Semantics

A = torch.tensor([[-1.0, -2.0, -0.5], [-0.1, -3.0, -1.0]])
B = A - 0.25
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])


@pytest.fixture
def builder() -> StepBuilder:
    return StepBuilder(max_signals=512, max_lag=4, evidence=True)


def sealed(builder: StepBuilder) -> Frame:
    step = builder.seal(7, 0.0)
    assert step.ready()
    return step.build(sequence=1, generation=0, role="trainer", rank=0, sealed_s=0.0, waited=True)


def observe(builder: StepBuilder, pair: str, **where: Any) -> None:
    builder.observe(pair, where.pop("a", A), where.pop("b", B), where.pop("mask", MASK), **where)


def test_later_optimizer_steps_of_policy_are_the_update(builder: StepBuilder) -> None:
    for step in (0, 1, 2):
        observe(builder, "policy", optimizer_step=step)
    observe(builder, "mismatch", optimizer_step=3)
    frame = sealed(builder)
    assert {pair: record.tokens for pair, record in frame.pairs.items()} == {"policy": 5, "update": 10, "mismatch": 5}


@pytest.mark.parametrize("source", ["older_weights", "interpolated", "rollout", "detached"])
def test_policy_proves_nothing_without_the_same_weights(builder: StepBuilder, source: str) -> None:
    observe(builder, "policy", old_source=source)
    observe(builder, "policy", old_source=source, optimizer_step=1)
    frame = sealed(builder)
    assert frame.missing == {"policy": source}
    assert set(frame.pairs) == {"update"}


def test_log_probs_that_were_not_collected_are_missing(builder: StepBuilder) -> None:
    observe(builder, "mismatch", b=None)
    observe(builder, "reference", a=None)
    assert sealed(builder).missing == {"mismatch": "no_rollout_logprobs", "reference": "not_reported"}


def test_unlike_streams_are_not_compared_and_that_is_told_once(builder: StepBuilder) -> None:
    semantics = {"a": Semantics(temperature=1.0), "b": Semantics(engine="vllm", temperature=0.7)}
    for _ in range(3):
        observe(builder, "mismatch", semantics=semantics)
    frame = sealed(builder)
    assert frame.missing == {"mismatch": "semantics_differ"}
    assert frame.pairs == {}
    assert frame.semantics == {"mismatch": semantics}
    assert len(builder.notes) == 1
    assert "temperature: 1.0 against 0.7" in builder.notes[0]


def test_semantics_travel_when_first_said_and_when_changed(builder: StepBuilder) -> None:
    first, second = Semantics(engine="sglang", version="1"), Semantics(engine="sglang", version="2")
    seen = []
    for said in (first, first, second, second):
        observe(builder, "mismatch", semantics=said)
        seen.append(sealed(builder).semantics)
    assert seen == [{"mismatch": {"b": first}}, {}, {"mismatch": {"b": second}}, {}]


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        (1, {"mismatch@lag1": 5}),
        (9, {"mismatch@lag4": 5}),
        ([0, 2], {"mismatch@lag0": 2, "mismatch@lag2": 3}),
        (torch.tensor([[0, 1, 1], [1, 1, 7]]), {"mismatch@lag0": 1, "mismatch@lag1": 3, "mismatch@lag4": 1}),
    ],
)
def test_tokens_are_kept_apart_by_version_lag_beside_the_whole(
    builder: StepBuilder, versions: Any, expected: dict[str, int]
) -> None:
    observe(builder, "mismatch", versions=versions)
    frame = sealed(builder)
    assert {pair: record.tokens for pair, record in frame.pairs.items()} == {"mismatch": 5} | expected


def test_lags_that_do_not_fit_are_an_error_and_leave_the_pair_missing(builder: StepBuilder) -> None:
    with pytest.raises(ValueError, match="versions of shape"):
        observe(builder, "mismatch", versions=[0, 1, 2])
    assert sealed(builder).missing == {"mismatch": "not_reported"}


def test_advantages_are_taken_over_masked_tokens_of_one_pair(builder: StepBuilder) -> None:
    rows = torch.tensor([2.0, -1.0])
    observe(builder, "policy", advantages=rows)
    observe(builder, "mismatch", advantages=rows * 100)
    observe(builder, "policy", advantages=torch.tensor([[2.0, 2.0, 9.0], [-1.0, -1.0, -1.0]]))
    scalars = sealed(builder).scalars
    expected = torch.tensor([2.0, 2.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    assert scalars["advantage.mean"] == pytest.approx(float(expected.mean()))
    assert scalars["advantage.std"] == pytest.approx(float(expected.std(correction=0)))
    assert scalars["advantage.abs_max"] == 2.0


def test_a_step_that_saw_nothing_is_still_a_frame_and_steps_are_timed(builder: StepBuilder) -> None:
    first, second = builder.seal(1, 10.0), builder.seal(2, 12.5)
    assert (first.step_s, second.step_s) == (None, 2.5)
    builder.restart_clock(100.0)
    assert builder.seal(3, 101.0).step_s == 1.0


def test_evidence_can_be_switched_off() -> None:
    for wanted in (True, False):
        builder = StepBuilder(512, 4, evidence=wanted)
        observe(builder, "policy", token_ids=torch.arange(6).view(2, 3))
        assert bool(sealed(builder).pairs["policy"].evidence()) is wanted


def test_figures_that_never_arrive_are_missing_and_the_rest_is_sent(builder: StepBuilder) -> None:
    observe(builder, "policy")
    observe(builder, "mismatch")
    step = builder.seal(1, 0.0)

    class Lost:
        def ready(self) -> bool:
            return False

    step.pairs["policy"] = Lost()
    assert not step.ready()
    frame = step.build(sequence=1, generation=0, role="trainer", rank=0, sealed_s=0.0, waited=False)
    assert frame.missing == {"policy": "not_reported"}
    assert set(frame.pairs) == {"mismatch"}


def test_an_unknown_pair_or_source_is_an_error(builder: StepBuilder) -> None:
    with pytest.raises(ValueError, match="unknown pair"):
        observe(builder, "kl")
    with pytest.raises(ValueError, match="old_source"):
        observe(builder, "policy", old_source="somewhere")
    with pytest.raises(TypeError, match="semantics"):
        observe(builder, "policy", semantics={"c": Semantics()})


def test_a_device_that_fails_costs_its_values_and_not_the_step(builder: StepBuilder) -> None:
    observe(builder, "policy")
    builder.scalars.add({"loss": 1.0, "grad.norm": torch.zeros((), device="meta")})
    frame = sealed(builder)
    assert frame.scalars == {"loss": 1.0}
    assert set(frame.pairs) == {"policy"}
    assert [type(error) for error in builder.errors] == [NotImplementedError]
    observe(builder, "policy")
    assert set(sealed(builder).pairs) == {"policy"}
