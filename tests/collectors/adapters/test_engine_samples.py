"""The join by sample id: what matches is exact, what does not is counted and never guessed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from foreshock import Semantics
from foreshock.adapters.engine_digests import digests
from foreshock.adapters.engine_samples import SAMPLE_BYTES, Sample, Samples, Span
from foreshock.adapters.engine_weights import EMPTY, WeightWatch, changed_share
from tests.collectors.adapters.engine_watching import Told

RAW = Semantics(engine="e", temperature=1.0, truncation="none", normaliser="full_vocabulary")


def sample(name: str, tokens: list[int], semantics: Semantics = RAW, spans: tuple[Span, ...] = ()) -> Sample:
    ids = np.array(tokens, np.int32)
    return Sample(name, ids, -0.5 * ids.astype(np.float32), semantics, spans=spans)


@pytest.fixture
def samples() -> Samples:
    made = Samples()
    made.put(sample("a", [1, 2, 3], spans=(Span("v4", 0, 1), Span("v5", 1, 3))))
    made.put(sample("b", [4, 5], spans=(Span("v5", 0, 2),)))
    return made


def test_rows_meet_by_id_in_any_order(samples: Samples) -> None:
    tokens = torch.tensor([[9, 4, 5, 0], [1, 2, 3, 0]])
    mask = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 0]])
    found = samples.align(["b", "a"], tokens, mask)
    assert found.counts == {"matched": 2}
    assert torch.equal(found.mask_BT, mask.bool())
    assert torch.equal(found.log_probs_BT, -0.5 * (tokens * mask).float())


@pytest.mark.parametrize(
    ("name", "tokens", "reason"),
    [
        ("a", [1, 2, 4], "token_ids"),
        ("a", [1, 2], "length"),
        ("a", [1, 2, 3, 4], "length"),
        ("nobody", [1, 2, 3], "unknown"),
    ],
)
def test_what_does_not_match_is_counted_and_left_out(
    samples: Samples, name: str, tokens: list[int], reason: str
) -> None:
    found = samples.align([name], torch.tensor([tokens]), torch.ones(1, len(tokens)))
    assert found.counts == {reason: 1}
    assert samples.counts[reason] == 1
    assert not found.mask_BT.any()


def test_a_row_of_several_calls_is_joined_in_their_order(samples: Samples) -> None:
    tokens, mask = torch.tensor([[1, 2, 3, 70, 71, 4, 5]]), torch.tensor([[1, 1, 1, 0, 0, 1, 1]])
    found = samples.align([["a", "b"]], tokens, mask, version=6)
    assert found.counts == {"matched": 1}
    assert found.lags_BT.tolist() == [[2, 1, 1, 0, 0, 1, 1]]
    assert samples.align([["b", "a"]], tokens, mask).counts == {"token_ids": 1}


def test_labels_without_numbers_and_labels_ahead_have_no_lag(samples: Samples) -> None:
    samples.put(sample("c", [7], spans=(Span("default", 0, 1),)))
    assert samples.align(["c"], torch.tensor([[7]]), torch.ones(1, 1), version=6).lags_BT is None
    assert samples.align(["b"], torch.tensor([[4, 5]]), torch.ones(1, 2), version=3).lags_BT is None


def test_memory_is_bounded_and_evictions_are_counted() -> None:
    made = Samples(max_bytes=10 * (SAMPLE_BYTES + 80))
    for number in range(25):
        made.put(sample(f"s{number}", list(range(10))))
    assert len(made) == 10
    assert made.counts["evicted"] == 15
    rows = torch.arange(10).expand(3, 10)
    found = made.align(["s0", "s24", "never"], rows, torch.ones(3, 10))
    assert found.counts == {"evicted": 1, "matched": 1, "unknown": 1}


def test_forgotten_samples_give_their_memory_back(samples: Samples) -> None:
    samples.forget(["a", ["b", "nobody"]])
    assert (len(samples), samples._bytes) == (0, 0)


def test_a_replaced_sample_is_counted_and_ids_without_log_probs_are_refused(samples: Samples) -> None:
    samples.put(sample("a", [8]))
    assert samples.counts["replaced"] == 1
    with pytest.raises(ValueError, match="2 token ids and 1 log-probs"):
        samples.put(Sample("x", np.zeros(2, np.int32), np.zeros(1, np.float32), RAW))


def test_observe_gives_the_mismatch_of_matched_rows_alone(samples: Samples, tmp_path: Path) -> None:
    told = Told(tmp_path)
    tokens, mask = torch.tensor([[1, 2, 3], [4, 6, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    counts = samples.observe(told.monitor, ["a", "b"], -0.5 * tokens.float() + 0.25, tokens, mask, version=6)
    assert counts == Counter(matched=1, token_ids=1)
    built = told.monitor._builder.seal(0, 0.0).build(
        sequence=1, generation=0, role="trainer", rank=0, sealed_s=0.0, waited=True
    )
    assert built.pairs["mismatch"].tokens == 3
    assert built.pairs["mismatch@lag2"].tokens == 1
    assert built.semantics["mismatch"]["b"] == RAW
    assert told.scalars == {"join.unmatched_share": 0.5, "staleness.mean": pytest.approx(4 / 3), "staleness.max": 2.0}
    assert "1 of 2 samples" in told.last("semantics")["detail"]


def test_kept_set_log_probs_are_not_compared_with_a_full_vocabulary(tmp_path: Path) -> None:
    told, made = Told(tmp_path), Samples()
    cut = Semantics(engine="e", truncation="top_k=5", normaliser="kept_set")
    made.put(sample("cut", [1, 2], cut))
    made.put(sample("whole", [3, 4]))
    tokens = torch.tensor([[1, 2]])
    made.observe(told.monitor, ["cut"], torch.zeros(1, 2), tokens, torch.ones(1, 2))
    assert told.monitor._builder._missing == {"mismatch": "semantics_differ"}
    # One request that differs does not silence the others.
    made.observe(told.monitor, ["cut", "whole"], torch.zeros(2, 2), torch.tensor([[1, 2], [3, 4]]), torch.ones(2, 2))
    sealed = told.monitor._builder.seal(0, 0.0)
    assert sealed.pairs["mismatch"].record().tokens == 2


def test_without_any_match_the_pair_is_missing(samples: Samples, tmp_path: Path) -> None:
    told = Told(tmp_path)
    samples.observe(told.monitor, ["x"], torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2))
    assert told.monitor._builder.seal(0, 0.0).missing == {"mismatch": "no_rollout_logprobs"}


def test_shapes_that_do_not_fit_are_refused(samples: Samples) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        samples.align(["a"], torch.ones(2, 3), torch.ones(2, 3))


# --- weights and cache


def watched(told: Told, answers: list[tuple[dict[str, str] | None, str | None]], share: float = 1.0) -> WeightWatch:
    left = iter(answers)
    return WeightWatch(told.monitor, "e", lambda _: next(left), share)


def test_a_push_is_told_once_when_it_has_settled(tmp_path: Path) -> None:
    told = Told(tmp_path)
    weights = watched(told, [({"w": "0", "b": "0"}, "v0"), ({"w": "1", "b": "0"}, "v1")])
    weights.baseline()
    for _ in range(3):  # buckets
        weights.updated(True, label="v1")
    weights.flushed()
    assert told.notices == []
    weights.generating()
    weights.generating()
    assert told.kinds() == ["weights", "flush"]
    said = told.last("weights")
    assert (said["version"], said["updates"], said["ok"], said["changed_share"]) == ("v1", 3, True, 0.5)


@pytest.mark.parametrize(
    ("acts", "kinds", "clean"),
    [
        (("generate", "push"), ["weights"], False),
        (("generate", "push", "flush"), ["weights", "flush"], True),
        (("generate", "push flushing"), ["weights", "flush"], True),
        # Nothing was generated between the flush and the push: nothing stale can be there.
        (("generate", "flush", "push"), ["flush", "weights"], True),
        (("generate", "flush", "generate", "push"), ["flush", "weights"], False),
        (("push",), ["weights"], True),
    ],
)
def test_whether_the_cache_can_hold_old_states(
    acts: tuple[str, ...], kinds: list[str], clean: bool, tmp_path: Path
) -> None:
    told = Told(tmp_path)
    weights = watched(told, [(None, None)] * 9)
    for act in acts:
        {
            "generate": weights.generating,
            "push": lambda: weights.updated(True),
            "push flushing": lambda: weights.updated(True, flushed=True),
            "flush": weights.flushed,
        }[act]()
    weights.settle()
    assert (told.kinds(), told.last("weights")["clean"]) == (kinds, clean)


def test_one_bucket_that_fails_fails_the_push(tmp_path: Path) -> None:
    told = Told(tmp_path)
    weights = watched(told, [(None, "v0")])
    weights.updated(True, label="v1")
    weights.updated(False, message="no session")
    weights.settle()
    assert (told.last("weights")["ok"], told.last("weights")["message"]) == (False, "no session")


def test_checksums_take_no_more_than_their_share(tmp_path: Path) -> None:
    told, asked = Told(tmp_path), []
    weights = WeightWatch(told.monitor, "e", lambda with_digests: (asked.append(with_digests), (None, "v"))[1], 1e-9)
    for _ in range(4):
        weights.updated(True)
        weights.settle()
    assert asked == [True, True, False, False]


def test_digests_see_values_places_and_empty_tensors() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    named = {"a": whole, "half": whole.bfloat16(), "odd": torch.ones(3, dtype=torch.uint8), "none": torch.empty(0)}
    first = digests(named.items())
    assert digests(named.items()) == first
    assert first["none"] == EMPTY
    swapped = digests({"a": whole.flip(0), "half": named["half"], "odd": named["odd"], "none": named["none"]}.items())
    assert {name for name in first if first[name] != swapped[name]} == {"a"}
    # What shows no bytes proves nothing: it counts on neither side.
    assert changed_share(first, swapped) == pytest.approx(1 / 3)
    big = torch.zeros((1 << 22) + 5)
    before = digests([("w", big)])
    big[-1] = 1e-7
    assert digests([("w", big)]) != before
