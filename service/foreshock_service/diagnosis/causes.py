"""The signatures: for each cause, the readings that speak for it and against it, with their bounds and sources.

A reading is (sentence, weight, number, holds); `holds` None: cannot be told. Bounds come from the measured tables in
docs/diagnosis.md; they were set on small models and one synthetic language, so they rank and never prove.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from foreshock_service.diagnosis.figures import Figures
from foreshock_service.rules.interface import Edge


class Reading(msgspec.Struct, frozen=True):
    """One number held against one bound."""

    sentence: str
    weight: float
    value: float | None
    holds: bool | None
    veto: bool = False
    """Where it does not hold, the cause is out, however much else speaks for it."""


def below(sentence: str, value: float | None, bound: float, weight: float = 1.0, *, veto: bool = False) -> Reading:
    """Holds up to `bound`."""
    return Reading(sentence, weight, value, None if value is None else value <= bound, veto)


def above(sentence: str, value: float | None, bound: float, weight: float = 1.0, *, veto: bool = False) -> Reading:
    """Holds from `bound` on."""
    return Reading(sentence, weight, value, None if value is None else value >= bound, veto)


def between(
    sentence: str, value: float | None, low: float, high: float, weight: float = 1.0, *, veto: bool = False
) -> Reading:
    """Holds from `low` to `high`."""
    return Reading(sentence, weight, value, None if value is None else low <= value <= high, veto)


def said(sentence: str, holds: bool | None, weight: float = 1.0, *, veto: bool = False) -> Reading:
    """Something that was said or noticed rather than measured; unsaid (None) does not count."""
    return Reading(sentence, weight if holds is not None else 0.0, None, holds, veto)


def hint(reading: Reading) -> Reading:
    """Counts where it holds and says nothing where it does not."""
    return reading if reading.holds else msgspec.structs.replace(reading, holds=None, weight=0.0)


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """One cause: where it can sit, what it looks like, and which experiment decides what statistics cannot."""

    name: str
    title: str
    edges: frozenset[Edge | None]
    """None: no edge is up."""
    read: Callable[[Figures], Sequence[Reading]]
    decided_by: tuple[str, ...] = ()
    family: str | None = None
    """Causes of one family cannot be told apart by these statistics."""
    lookalikes: Callable[[Figures], tuple[str, ...]] = lambda _: ()
    """Causes that would show the very same figures: whatever their score, this one is then never named alone."""


TRAINER: Final[frozenset[Edge | None]] = frozenset({"training_pass", "scoring_pass", "undecided"})
ENGINE: Final[frozenset[Edge | None]] = frozenset({"engine", "undecided"})
ANY: Final[frozenset[Edge | None]] = TRAINER | ENGINE


UNRELATED: Final = 0.25
"""Correlation and slope below which the two sides are log-probs of different tokens; half of all units dropped leaves
more."""
DROPOUT_LEAST: Final = 1e-3
"""Half mean square below which no dropout is."""
QUANTISED_LEAST: Final = 3e-3
"""Half mean square below which bf16's own floor says as much."""
STALE_SLOPES: Final = (0.8, 1.35)
SHIFT_NATS: Final = 1e-3
"""Mean δ below which one-sidedness is rounding."""


def _correlated(f: Figures, bound: float = 0.5) -> Reading:
    return above("the two sides correlate", f.of("logp_pearson"), bound, 0.5, veto=True)


def _two_sided(f: Figures, weight: float = 0.5) -> Reading:
    return below("differences go both ways: |mean| / mean |δ|", f.share("delta_mean", "abs_mean"), 0.5, weight)


def _not_one_sided(f: Figures) -> Reading:
    return below("differences go both ways: |mean| / mean |δ|", f.share("delta_mean", "abs_mean"), 0.9, 1.0, veto=True)


def _numeric_noise(f: Figures) -> list[Reading]:
    trainer = f.pair == "policy"
    return [
        said("the pair is inside the run's own baseline", f.in_band(), 3.0, veto=True),
        below("half mean square, within rounding", f.of("kl_k2"), 2.5e-5 if trainer else 3e-3, 1.5),
        between("slope of a on b", f.of("slope"), 0.98, 1.02, 0.5, veto=True),
        _correlated(f, 0.98),
        said("differences go both ways", _not(_shifted_to_one_side(f)), 0.5, veto=True),
    ]


def _dropout(f: Figures) -> list[Reading]:
    return [
        above("half mean square: far above rounding", f.of("kl_k2"), DROPOUT_LEAST, 1.0, veto=True),
        below(
            "share of tokens with δ > 0: noise lowers the sampled token's log-prob", f.of("positive_share"), 0.46, 1.5
        ),
        below("mean δ is negative", f.of("delta_mean"), 0.0, 1.0),
        between("slope of a on b, below 1", f.of("slope"), UNRELATED, 0.985, 2.0, veto=True),
        between("δ explained by b", f.explained(), 0.015, 0.4, 1.0),
        below("no growth over steps", f.growth(), 1.3, 1.5),
        _correlated(f, UNRELATED),
    ]


def _stale_trainer(f: Figures) -> list[Reading]:
    return [
        between("slope of a on b", f.of("slope"), 0.9, 1.1, 2.0, veto=True),
        below("δ is not explained by b", f.explained(), 0.1, 1.0),
        above("grows over steps", f.growth(), 1.3, 1.5),
        said("the pair has left the run's own baseline", _not(f.in_band()), 1.0),
        hint(above("share of sequences untouched: one rank is stale", f.of("seq_zero_share"), 0.05, 1.0)),
        hint(above("median |δ| over its 99 % quantile: a bell, not rare jumps", f.tail(), 0.05, 1.0)),
        _correlated(f, 0.7),
    ]


def _like_stale_trainer(f: Figures) -> tuple[str, ...]:
    """Two dropout passes held against each other lose the one-sidedness of one: only a repeated pass tells.

    Dropout leaves no token and no sequence untouched, and does not grow.
    """
    untouched = (f.of("zero_share") or 0.0) >= 0.05 or (f.of("seq_zero_share") or 0.0) >= 0.05
    far, growth = (f.of("kl_k2") or 0.0) >= DROPOUT_LEAST, f.growth()
    return ("dropout",) if far and not untouched and (growth is None or growth < 1.3) else ()


def _like_stale_engine(f: Figures) -> tuple[str, ...]:
    """A gap of precision grows as well where the policy sharpens: versions, digests or the engine's word part them."""
    lagging = (f.scalar("staleness.mean") or 0.0) >= 0.5 or (f.scalar("weights.changed_share") or 1.0) < 0.5
    proven = lagging or f.noticed("weights", ok=False) or _quantised_setting(f) is False
    return () if proven else ("quantised_engine",)


def _like_quantised(f: Figures) -> tuple[str, ...]:
    """Weights that stay some steps behind are a gap that does not grow: only the engine's own word parts the two."""
    slope = f.of("slope")
    old = slope is None or STALE_SLOPES[0] <= slope <= STALE_SLOPES[1]
    return ("stale_engine_weights",) if old and not _quantised_setting(f) else ()


def _different_forward(f: Figures) -> list[Reading]:
    return [
        between("slope of a on b", f.of("slope"), 0.98, 1.02, 2.0, veto=True),
        below("half mean square: bf16's rounding, or rows that see each other", f.of("kl_k2"), 3e-3, 0.5, veto=True),
        below("no growth over steps", f.growth(), 1.3, 1.5),
        said("differences go both ways", _not(_shifted_to_one_side(f)), 0.5, veto=True),
        said("it was so when the run's baseline was learned: a forward does not change by itself", f.in_band(), 0.75),
        hint(above("first response tokens are worse than the last: rows see those packed before", f.early(), 1.5)),
        _correlated(f, 0.98),
    ]


def _stale_engine(f: Figures) -> list[Reading]:
    return [
        between("slope of a on b", f.of("slope"), *STALE_SLOPES, 1.5, veto=True),
        below("δ is not explained by b", f.explained(), 0.9, 1.0, veto=True),
        _not_one_sided(f),
        said("the pair has left the run's own baseline", _not(f.in_band()), 1.0),
        above("grows over steps", f.growth(), 1.15, 0.75),
        hint(above("versions between sampling and training", f.scalar("staleness.mean"), 0.5, 2.0)),
        hint(below("share of tensors that changed at the last sync", f.scalar("weights.changed_share"), 0.5, 2.0)),
        said("a weight sync reported failure", True if f.noticed("weights", ok=False) else None, 3.0),
        said("the engine stores the trainer's precision", _not(_quantised_setting(f)), 1.0),
        _correlated(f, 0.6),
    ]


def _stale_cache(f: Figures) -> list[Reading]:
    return [
        above("first response tokens are worse than the last", f.early(), 2.0, 1.5, veto=True),
        above("first token over the mean", f.share("first_abs_mean", "abs_mean"), 2.0, 1.0),
        above("some sequences only: share above ten times the median one", f.of("seq_outlier"), 0.02, 1.5),
        said("the cache was flushed", False if f.noticed("flush") else None, 1.5),
        between("slope of a on b", f.of("slope"), 0.85, 1.15, 0.5),
        _correlated(f, 0.6),
    ]


def _quantised(f: Figures) -> list[Reading]:
    return [
        said("the engine says that it stores other precision", _quantised_setting(f), 3.0),
        said("the pair has left the run's own baseline", _not(f.in_band()), 1.0),
        # A gap of precision grows too where the policy sharpens, so growth alone does not part it from old weights.
        below("no growth: there at once and in full", f.growth(), 1.15, 0.75),
        below("δ is not explained by b", f.explained(), 0.5, 1.0, veto=True),
        _not_one_sided(f),
        above("half mean square: above bf16's floor", f.of("kl_k2"), QUANTISED_LEAST, 1.0, veto=True),
        between("slope of a on b", f.of("slope"), 0.7, 1.5, 0.5, veto=True),
        hint(below("engine and trainer hold the same version", f.scalar("staleness.mean"), 0.5, 0.5)),
        _correlated(f, 0.4),
    ]


def _temperature(f: Figures) -> list[Reading]:
    slope = f.of("slope")
    return [
        above("δ explained by b: one side is a multiple of the other", f.explained(), 0.9, 3.0, veto=True),
        above("distance of the slope from 1", None if slope is None else abs(slope - 1), 0.02, 1.5, veto=True),
        above("the two sides all but lie on a line", f.of("logp_pearson"), 0.995, 1.5, veto=True),
        below("no growth over steps", f.growth(), 1.5, 0.5),
    ]


def _truncation(f: Figures) -> list[Reading]:
    positive = f.of("positive_share")
    lopsided = None if positive is None else max(positive, 1 - positive)
    return [
        said("one-sided: |mean δ| is nearly all of mean |δ|", _shifted_to_one_side(f), 2.0, veto=True),
        above("one-sided: share of tokens on the larger side", lopsided, 0.9, 1.5),
        between("slope of a on b", f.of("slope"), 0.9, 1.1, 1.0, veto=True),
        above("|KL k1| far above k3: a shift, not a spread", f.share("kl_k1", "kl_k3"), 3.0, 1.0),
        said("the sampler truncates", _truncates(f), 1.5),
        _correlated(f, 0.9),
    ]


def _moe_routing(f: Figures) -> list[Reading]:
    return [
        said("the model routes over experts", _moe(f), 3.0, veto=True),
        above("heavy tail: share beyond ln 2", f.of("tail_ln2"), 1e-3, 1.5),
        below("most tokens agree: median over 99 % quantile", f.tail(), 0.1, 1.0),
        above("kurtosis of δ", f.of("delta_kurtosis"), 30.0, 1.0),
        between("slope of a on b", f.of("slope"), 0.9, 1.1, 0.5),
        _correlated(f, 0.6),
    ]


def _shifted_labels(f: Figures) -> list[Reading]:
    return [
        below("the two sides do not correlate", f.of("logp_pearson"), UNRELATED, 2.0, veto=True),
        above("one side is far less likely: |mean δ| over mean |δ|", f.share("delta_mean", "abs_mean"), 0.6, 2.0),
        above("mean |δ|", f.of("abs_mean"), 1.0, 1.0),
        below("slope of a on b", f.of("slope"), UNRELATED, 0.5, veto=True),
        above("half mean square", f.of("kl_k2"), 0.5, 1.0, veto=True),
    ]


def _misaligned_rows(f: Figures) -> list[Reading]:
    return [
        below("the two sides hardly correlate", f.of("logp_pearson"), 0.5, 2.0, veto=True),
        below("the same numbers in other places: |mean δ| over mean |δ|", f.share("delta_mean", "abs_mean"), 0.3, 2.5),
        above("half mean square", f.of("kl_k2"), 0.1, 1.0, veto=True),
        below("correlation within the worst decile of sequences", f.of("step_seq_corr"), 0.3, 0.5),
    ]


def _special_tokens(f: Figures) -> list[Reading]:
    return [
        said("the worst tokens are one token id", (f.one_token() or 0.0) >= 0.6, 3.0, veto=True),
        below("most tokens agree: median over 99 % quantile", f.tail(), 0.1, 1.0),
        above("kurtosis of δ", f.of("delta_kurtosis"), 20.0, 1.0),
        # Where all tokens have moved, the worst are of one kind because some tokens decide more than others.
        said("the median token is where it used to be", f.bulk_in_band(), 2.0, veto=True),
        below("no growth over steps: a template does not grow", f.growth(), 1.3, 1.0),
        _correlated(f),
    ]


def _length_confounding(f: Figures) -> list[Reading]:
    return [
        below("sequence ESS is low", f.of("ess_sequence"), 0.7, 2.0, veto=True),
        above("while token ESS is not", f.of("ess_token"), 0.98, 2.0, veto=True),
        said("the pair is inside the run's own baseline", f.in_band(), 1.5, veto=True),
    ]


CAUSES: Final[tuple[Cause, ...]] = (
    Cause(
        name="numeric_noise", title="Rounding: other batches, kernels or engines for the same weights",
        edges=frozenset({None}), read=_numeric_noise,
        decided_by=("probe: same partition twice", "probe: in fp32"),
    ),
    Cause(
        name="dropout", title="Dropout active in one of the trainer's passes",
        edges=frozenset({"training_pass", "undecided"}), read=_dropout,
        decided_by=("probe: same partition twice", "probe: eval against train mode"),
    ),
    Cause(
        name="stale_trainer_parameters", title="One of the trainer's passes reads parameters of earlier steps",
        edges=TRAINER, read=_stale_trainer, lookalikes=_like_stale_trainer,
        decided_by=("probe: after a forced parameter sync", "weights.checksum before each pass, over ranks"),
    ),
    Cause(
        name="different_forward", title="The trainer's passes compute otherwise: precision, padding or packing",
        edges=TRAINER, read=_different_forward,
        decided_by=("probe: the other phase's partition", "probe: in fp32", "probe: without padding"),
    ),
    Cause(
        name="stale_engine_weights", title="The engine samples with weights of earlier steps, all or some",
        edges=ENGINE, read=_stale_engine, lookalikes=_like_stale_engine, family="stale_engine",
        decided_by=("weights.checksum per tensor, trainer and engine", "a re-sync that verifies digests"),
    ),
    Cause(
        name="stale_kv_cache", title="The engine reuses KV cache of earlier weights",
        edges=ENGINE, read=_stale_cache, family="stale_engine",
        decided_by=("flush events beside weight syncs", "the same prompts after a flush"),
    ),
    Cause(
        name="quantised_engine", title="The engine computes in other precision than the trainer",
        edges=ENGINE, read=_quantised, lookalikes=_like_quantised,
        decided_by=("the engine's own settings", "a re-sync that verifies digests"),
    ),
    Cause(
        name="temperature", title="A temperature is applied on one side only",
        edges=ANY, read=_temperature, decided_by=("the semantics of both streams",),
    ),
    Cause(
        name="truncation", title="Truncated sampling, renormalised on one side only",
        edges=ANY | {None}, read=_truncation,
        decided_by=("the semantics of both streams", "the engine's sampling mask"),
    ),
    Cause(
        name="moe_routing", title="Experts are routed differently on the two sides",
        edges=ANY, read=_moe_routing, decided_by=("replayed routing decisions",),
    ),
    Cause(
        name="shifted_labels", title="Labels or masks are shifted: other tokens are scored than were sampled",
        edges=ANY, read=_shifted_labels, decided_by=("token ids of the worst tokens",),
    ),
    Cause(
        name="misaligned_rows", title="Log-probs belong to other rows, or to an earlier step's tensor",
        edges=ANY, read=_misaligned_rows, decided_by=("sequence ids of the worst tokens",),
    ),
    Cause(
        name="special_tokens", title="One special token is treated differently (EOS, padding, template)",
        edges=ANY, read=_special_tokens, decided_by=("token ids of the worst tokens",),
    ),
    Cause(
        name="length_confounding", title="No fault: sequence weights spread with length alone",
        edges=frozenset({None}), read=_length_confounding,
    ),
)  # fmt: skip


def _quantised_setting(f: Figures) -> bool | None:
    said_so = f.setting("quantization", "quantisation", "engine_dtype", "rollout_dtype")
    if said_so is None:
        return None
    word = str(said_so).lower()
    return any(mark in word for mark in ("int8", "int4", "int3", "fp8", "float8", "fp4", "awq", "gptq", "w8a8", "gguf"))


def _truncates(f: Figures) -> bool | None:
    top_k, top_p, min_p = f.setting("top_k"), f.setting("top_p"), f.setting("min_p")
    if top_k is None and top_p is None and min_p is None:
        return None
    try:
        return int(top_k or 0) > 0 or float(top_p if top_p is not None else 1.0) < 1.0 or float(min_p or 0.0) > 0.0
    except (TypeError, ValueError):
        return None


def _moe(f: Figures) -> bool | None:
    if f.scalar("expert.max_violation") is not None:
        return True
    stated = f.setting("moe", "num_experts")
    return bool(stated) if stated is not None else False


def _shifted_to_one_side(f: Figures) -> bool | None:
    """|mean δ| is at least .8 of mean |δ|: renormalisation shifts every token the same way, noise does not."""
    share, mean = f.share("delta_mean", "abs_mean"), f.of("delta_mean")
    return None if share is None or mean is None else share >= 0.8 and abs(mean) >= SHIFT_NATS


def _not(value: bool | None) -> bool | None:
    return None if value is None else not value
