"""Every statistic of a pair against the naive reference, on both reduction paths."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.stats.merge import STATISTICS, PairStatistics, merge, statistics
from foreshock.stats.pair import PairAccumulator
from foreshock.stats.record import PairRecord
from foreshock.stats.shapes import sentinel_of
from tests.collectors.stats.reference import naive

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
HOLES = [math.nan, math.inf, -math.inf, -9999.0, -3.4e38]
CLIP = (0.8, 1.25)
PATHS = pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])


def record_of(
    a: torch.Tensor, b: torch.Tensor, mask: torch.Tensor | None, on_device: bool, **options: Any
) -> PairRecord:
    accumulator = PairAccumulator(on_device=on_device)
    accumulator.observe(a, b, mask, **options)
    return accumulator.record()


def reference_of(
    a: torch.Tensor, b: torch.Tensor, mask: torch.Tensor, clip: tuple[float, float] | None = CLIP
) -> dict[str, float]:
    rows = [
        list(zip(x.double().tolist(), y.double().tolist(), m.tolist(), strict=True))
        for x, y, m in zip(a, b, mask.bool(), strict=True)
    ]
    return naive(rows, clip, (sentinel_of(a.dtype), sentinel_of(b.dtype)))


def assert_matches(found: PairStatistics, wanted: dict[str, float]) -> None:
    """1e-6 relative; 5 % where the sketch answers; a signed mean to 1e-6 of the mean size of what it averages."""
    assert set(found.values) | set(found.missing) == set(STATISTICS)
    assert not set(found.values) & set(found.missing)
    for name in STATISTICS:
        if name == "seq_outlier":
            continue
        assert (name in found.values) == (name in wanted), (name, found.missing.get(name), wanted.get(name))
        if name not in wanted:
            continue
        value, right = found.values[name], wanted[name]
        tolerance = 1e-6 * abs(right) + 1e-12
        if name.startswith("abs_q"):
            tolerance = 0.05 * right
        elif name == "step_seq_corr":
            tolerance = 0.05 * (1 - right) + 1e-9
        elif name in ("logp_pearson", "prob_pearson", "slope", "intercept", "delta_kurtosis"):
            tolerance = 1e-6 * abs(right) + 1e-6
        assert value == pytest.approx(right, rel=0, abs=tolerance), name


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two streams of log-probs with holes, and a mask of any form."""
    sequences, positions = draw(st.integers(1, 5)), draw(st.integers(1, 40))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from(DTYPES))
    mean, noise = draw(st.sampled_from([-0.3, -3.0, -20.0])), draw(st.sampled_from([0.0, 1e-5, 1e-3, 0.05, 1.0]))
    shape = (sequences, positions)
    b = torch.tensor(-np.abs(generator.normal(mean, abs(mean) / 3, shape))).to(dtype)
    a = (b.double() + torch.tensor(generator.normal(0, noise, shape))).to(dtype)
    for _ in range(draw(st.integers(0, 3))):
        side = a if draw(st.booleans()) else b
        side[generator.integers(sequences), generator.integers(positions)] = draw(st.sampled_from(HOLES))
    kind = draw(st.sampled_from(["all", "ragged", "holey", "none"]))
    lengths = torch.tensor(generator.integers(0, positions + 1, (sequences, 1)))
    mask = {
        "all": torch.ones(shape),
        "ragged": torch.arange(positions)[None] < lengths,
        "holey": torch.tensor(generator.random(shape) < 0.6),
        "none": torch.zeros(shape, dtype=torch.int64),
    }[kind]
    return a, b, mask.to(draw(st.sampled_from([torch.bool, torch.int64, torch.float32])))


@PATHS
@given(batch=batches())
@settings(max_examples=150)
def test_every_statistic_equals_the_naive_one(on_device: bool, batch: tuple[torch.Tensor, ...]) -> None:
    a, b, mask = batch
    copies = a.clone(), b.clone(), mask.clone()
    found = statistics(record_of(a, b, mask, on_device, clip_range=CLIP))
    assert_matches(found, reference_of(a, b, mask))
    for tensor, copy in zip((a, b, mask), copies, strict=True):
        assert torch.equal(tensor.nan_to_num(7.0), copy.nan_to_num(7.0)), "the host's tensors were changed"


@PATHS
@given(batch=batches(), gap=st.integers(0, 3))
@settings(max_examples=60)
def test_packed_rows_give_what_padded_rows_give(on_device: bool, batch: tuple[torch.Tensor, ...], gap: int) -> None:
    a, b, mask = batch
    padded = statistics(record_of(a, b, mask, on_device))
    edges = [row * a.shape[1] for row in range(a.shape[0] + 1)]
    # Tokens behind the last sequence belong to none, whatever they hold.
    tail = torch.full((gap,), math.nan)
    flat = [torch.cat((x.reshape(-1), tail.to(x.dtype))) for x in (a, b)] + [
        torch.cat((mask.reshape(-1), torch.ones(gap))) != 0
    ]
    for shape in ((-1,), (1, -1)):
        for cu_seqlens in (edges, torch.tensor(edges, dtype=torch.int32)):
            packed = statistics(record_of(*(x.reshape(shape) for x in flat), on_device, cu_seqlens=cu_seqlens))
            assert_close(packed, padded)


def assert_close(found: PairStatistics, wanted: PairStatistics, rel: float = 1e-9) -> None:
    assert found.missing == wanted.missing
    for name, value in wanted.values.items():
        # A variance that cancels is known to its rounding only: ± 1e-9 of a correlation, never of a sum.
        assert found.values[name] == pytest.approx(value, rel=rel, abs=1e-13 if "pearson" not in name else 1e-9), name


@given(batch=batches())
@settings(max_examples=100)
def test_both_paths_give_the_same_record(batch: tuple[torch.Tensor, ...]) -> None:
    a, b, mask = batch
    host, device = (record_of(a, b, mask, on_device, clip_range=CLIP) for on_device in (False, True))
    assert_close(statistics(device), statistics(host))
    for sketch in ("abs_sketch", "decile_tokens", "evidence_ids", "evidence_logps", "masked"):
        assert getattr(device, sketch) == getattr(host, sketch) or sketch.startswith("evidence")
    assert [abs(t.delta) for t in device.evidence()] == [abs(t.delta) for t in host.evidence()]


@PATHS
@given(batch=batches(), cuts=st.lists(st.integers(0, 5), max_size=3), seed=st.integers(0, 9))
@settings(max_examples=60)
def test_micro_batches_and_ranks_pool_to_the_whole(
    on_device: bool, batch: tuple[torch.Tensor, ...], cuts: list[int], seed: int
) -> None:
    a, b, mask = batch
    whole = statistics(record_of(a, b, mask, on_device, clip_range=CLIP))
    edges = sorted({0, a.shape[0], *(min(cut, a.shape[0]) for cut in cuts)})
    slices = [slice(*pair) for pair in itertools.pairwise(edges)]
    one = PairAccumulator(on_device=on_device)
    for part in slices:
        one.observe(a[part], b[part], mask[part], clip_range=CLIP)
    assert_close(statistics(one.record()), whole)
    ranks = [record_of(a[part], b[part], mask[part], on_device, clip_range=CLIP) for part in slices]
    assert_close(statistics(merge(ranks)), whole)
    np.random.default_rng(seed).shuffle(ranks)  # type: ignore[arg-type]
    nested = merge([merge(ranks[:1]), merge([merge(ranks[1:]), PairRecord()])])
    assert_close(statistics(nested), whole)


@PATHS
def test_the_sixteen_worst_tokens_are_named_by_sequence_position_and_token(on_device: bool) -> None:
    torch.manual_seed(3)
    b = -torch.rand(6, 900)
    a, mask = b + 0.01 * torch.randn(6, 900), torch.rand(6, 900) < 0.5
    tokens = torch.randint(0, 150_000, (6, 900))
    seq_ids = [11, 7, 2**40, 3, 5, 8]
    accumulator = PairAccumulator(on_device=on_device)
    for rows in (slice(0, 4), slice(4, 6)):
        accumulator.observe(a[rows], b[rows], mask[rows], token_ids=tokens[rows], seq_ids=seq_ids[rows])
    delta = torch.where(mask, (a.double() - b.double()).abs(), -1.0)
    worst = delta.reshape(-1).topk(16).indices.tolist()
    wanted = []
    for row, column in (divmod(index, 900) for index in worst):
        position = int(mask[row, :column].sum())
        wanted.append((seq_ids[row], position, int(tokens[row, column]), float(a[row, column]), float(b[row, column])))
    assert [(t.sequence, t.position, t.token, t.a, t.b) for t in accumulator.record().evidence()] == wanted


@PATHS
def test_an_overflowing_ratio_is_counted_and_leaves_what_needs_it_missing(on_device: bool) -> None:
    b, a = torch.full((2, 50), -1.0), torch.full((2, 50), -1.5)
    b[0, 3], a[0, 3] = -120.0, -1.0
    found = statistics(record_of(a, b, None, on_device))
    assert found.values["overflow"] == 1
    for name in ("kl_k3", "ratio_mean", "ratio_max", "chi2_token", "ess_token", "kl_k3_seqmean"):
        assert found.missing[name] == "overflow"
    assert found.values["delta_max"] == 119.0
    assert found.values["prob_abs_max"] == pytest.approx(math.exp(-1), rel=1e-12)


@PATHS
def test_an_empty_mask_is_missing_and_not_zero(on_device: bool) -> None:
    found = statistics(record_of(torch.zeros(2, 5), torch.zeros(2, 5), torch.zeros(2, 5), on_device))
    counts = {"tokens", "sequences", "nonfinite", "sentinels", "overflow"}
    assert found.values == dict.fromkeys(counts, 0.0)
    assert set(found.missing.values()) == {"empty_mask"}
    nothing = statistics(PairAccumulator(on_device=on_device).record())
    assert nothing.values == found.values
    for shape in ((0, 5), (5, 0), (0, 0)):
        assert statistics(record_of(torch.zeros(shape), torch.zeros(shape), None, on_device)).values == found.values


@PATHS
def test_identical_streams_measure_zero(on_device: bool) -> None:
    b = -torch.rand(3, 70)
    found = statistics(record_of(b, b, None, on_device))
    for name in ("kl_k1", "kl_k2", "kl_k3", "abs_max", "abs_q99", "prob_abs_mean", "decile_abs_mean.4", "chi2_token"):
        assert found.values[name] == 0.0, name
    for name in ("zero_share", "seq_zero_share", "ess_token", "ess_sequence", "ratio_mean", "logp_pearson", "slope"):
        assert found.values[name] == pytest.approx(1.0, abs=1e-12), name
    assert found.missing == {"clip_low": "not_reported", "clip_high": "not_reported", "delta_kurtosis": "constant"}


@PATHS
@pytest.mark.parametrize("spread", [1e-3, 1.0])
def test_correlation_holds_its_digits_far_from_zero(on_device: bool, spread: float) -> None:
    rng = np.random.default_rng(0)
    b = torch.tensor(-20 + spread * rng.normal(size=(4, 3000)), dtype=torch.float32)
    a = (b.double() + 0.2 * spread * torch.tensor(rng.normal(size=(4, 3000)))).float()
    found = statistics(record_of(a, b, None, on_device))
    right = np.corrcoef(a.double().reshape(-1), b.double().reshape(-1))[0, 1]
    assert found.values["logp_pearson"] == pytest.approx(right, abs=1e-9)


@PATHS
@pytest.mark.parametrize("tokens", [1, 10**7])
def test_one_token_and_ten_million(on_device: bool, tokens: int) -> None:
    torch.manual_seed(1)
    rows = max(1, tokens // 50_000)
    b = -torch.rand(rows, tokens // rows)
    a = b + 0.02 * torch.randn_like(b)
    found = statistics(record_of(a, b, None, on_device)).values
    d = a.double() - b.double()
    wanted = {
        "tokens": tokens,
        "delta_mean": d.mean(),
        "kl_k2": (d * d / 2).mean(),
        "kl_k3": (torch.expm1(d) - d).mean(),
        "abs_mean": d.abs().mean(),
        "chi2_token": (2 * d).exp().mean() - 1,
    }
    for name, right in wanted.items():
        assert found[name] == pytest.approx(float(right), rel=1e-6), name
    assert found["abs_q99"] == pytest.approx(float(np.quantile(d.abs(), 0.99, method="inverted_cdf")), rel=0.05)
