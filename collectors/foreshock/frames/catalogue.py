"""The signal catalogue: every name that collectors, rules, dashboards, REST and docs may use, each with its sentence.

A signal is `<pair>.<statistic>` (or `<pair>@lag<n>.<statistic>` where tokens are split by version lag) or a scalar.
Hosts may log further scalars under their own names; those are stored and shown, and no shipped rule reads them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, Literal

import msgspec

Merge = Literal["sum", "mean", "max", "min", "last", "pair"]
"""How ranks of one step (and repeated `log` calls of one rank) fold. `pair`: through the merged PairRecord."""

NAME: Final = re.compile(r"^[A-Za-z][A-Za-z0-9_]*(@lag\d{1,6})?([./][A-Za-z0-9_\-]+){0,6}\Z")
"""What a signal's name may look like: at most 128 characters, no blanks, no markup."""
MAX_NAME: Final = 128


class Signal(msgspec.Struct, frozen=True):
    """One named series: `unit` is nats, share, count, tokens, steps, seconds or 1."""

    name: str
    unit: str
    merge: Merge
    sentence: str
    worst: Literal["", "max", "min"] = ""
    """Which rank is the worst one, where the worst rank is kept beside the merged figure."""


PAIRS: Final[dict[str, str]] = {
    "policy": "Current log-prob of the training forward (first optimizer step) against the recomputed old log-prob.",
    "update": "The same on later optimizer steps of the rollout: how far the update has moved.",
    "mismatch": "Old log-prob against the rollout engine's own: do scoring pass and engine agree.",
    "mismatch_current": "Current log-prob, first optimizer step, against the rollout engine's own: the third edge.",
    "reference": "Frozen reference model against the current one: drift from where training began.",
}

_STATISTICS: Final[tuple[Signal, ...]] = (
    Signal("a_mean", "nats", "pair", "Mean log-prob of side a."),
    Signal("b_mean", "nats", "pair", "Mean log-prob of side b."),
    Signal("tokens", "tokens", "pair", "Tokens that counted."),
    Signal("sequences", "count", "pair", "Sequences with at least one counted token."),
    Signal("nonfinite", "count", "pair", "Counted tokens where a or b is NaN or infinite.", "max"),
    Signal("sentinels", "count", "pair", "Counted tokens holding an engine's sentinel (-9999, -3.4e38).", "max"),
    Signal("zero_share", "share", "pair", "Share of tokens with no difference at all."),
    Signal("positive_share", "share", "pair", "Share of tokens with a above b."),
    Signal("delta_kurtosis", "1", "pair", "Kurtosis of the differences."),
    Signal("seq_zero_share", "share", "pair", "Share of sequences without any difference."),
    Signal("delta_mean", "nats", "pair", "Mean difference a - b."),
    Signal("delta_std", "nats", "pair", "Standard deviation of a - b."),
    Signal("delta_min", "nats", "pair", "Smallest a - b."),
    Signal("delta_max", "nats", "pair", "Largest a - b."),
    Signal("abs_mean", "nats", "pair", "Mean |a - b|.", "max"),
    Signal("abs_max", "nats", "pair", "Largest |a - b|.", "max"),
    Signal("kl_k1", "nats", "pair", "mean(b - a): unbiased estimate of KL(b||a), can be negative."),
    Signal("kl_k2", "nats", "pair", "mean((a - b)^2 / 2): ROLL's approxkl.", "max"),
    Signal("kl_k3", "nats", "pair", "mean(exp(a - b) - 1 - (a - b)): low-variance KL(b||a), never negative.", "max"),
    Signal("overflow", "count", "pair", "Tokens whose exp(a - b) overflows."),
    Signal("ratio_mean", "1", "pair", "Mean exp(a - b), unclipped."),
    Signal("ratio_min", "1", "pair", "Smallest exp(a - b)."),
    Signal("ratio_max", "1", "pair", "Largest exp(a - b).", "max"),
    Signal("clip_low", "share", "pair", "Share of tokens below the run's own clip range."),
    Signal("clip_high", "share", "pair", "Share of tokens above the run's own clip range."),
    Signal("chi2_token", "1", "pair", "mean(exp(2(a - b))) - 1: variance of the weights."),
    Signal("ess_token", "share", "pair", "Effective sample share of token weights.", "min"),
    Signal("ess_sequence", "share", "pair", "The same per sequence; length-confounded, never an alarm by itself."),
    Signal("prob_abs_mean", "1", "pair", "Mean |exp(a) - exp(b)|: verl's rollout_probs_diff_mean."),
    Signal("prob_abs_max", "1", "pair", "Largest |exp(a) - exp(b)|."),
    Signal("prob_pearson", "1", "pair", "Pearson correlation of the probabilities.", "min"),
    Signal("logp_pearson", "1", "pair", "Pearson correlation of the log-probs.", "min"),
    Signal("tail_ln2", "share", "pair", "Share of tokens with |a - b| above ln 2."),
    Signal("abs_q50", "nats", "pair", "Median |a - b|, from the sketch."),
    Signal("abs_q90", "nats", "pair", "90 % quantile of |a - b|."),
    Signal("abs_q99", "nats", "pair", "99 % quantile of |a - b|."),
    Signal("abs_q999", "nats", "pair", "99.9 % quantile of |a - b|."),
    Signal("seq_abs_max", "nats", "pair", "Largest per-sequence mean |a - b|.", "max"),
    Signal("seq_outlier", "share", "pair", "Share of sequences above ten times the median sequence."),
    Signal("slope", "1", "pair", "Least-squares slope of a on b; not 1: temperature on one side only."),
    Signal("intercept", "nats", "pair", "Least-squares intercept of a on b."),
    Signal("first_abs_mean", "nats", "pair", "Mean |a - b| on the first response token."),
    *(
        Signal(f"decile_abs_mean.{i}", "nats", "pair", f"Mean |a - b| in relative-position decile {i}.")
        for i in range(10)
    ),
    Signal("step_seq_corr", "1", "pair", "Correlation of a and b per sequence, worst decile.", "min"),
    Signal("kl_k1_seqmean", "nats", "pair", "Mean of per-sequence kl_k1; ROLL's policykl is its negative."),
    Signal("kl_k2_seqmean", "nats", "pair", "kl_k2 as the mean of per-sequence means: ROLL's approxkl by default."),
    Signal("kl_k3_seqmean", "nats", "pair", "kl_k3 as the mean of per-sequence means."),
    Signal("abs_mean_seqmean", "nats", "pair", "Mean of sequence means: slime's train_rollout_logprob_abs_diff."),
)
STATISTICS: Final[dict[str, Signal]] = {s.name: s for s in _STATISTICS}

_SCALARS: Final[tuple[Signal, ...]] = (
    Signal("reward.mean", "1", "mean", "Mean rollout reward."),
    Signal("reward.std", "1", "mean", "Standard deviation of rollout rewards."),
    Signal("reward.min", "1", "min", "Smallest rollout reward."),
    Signal("reward.max", "1", "max", "Largest rollout reward."),
    Signal("reward.validation", "1", "mean", "Reward of the trainer's own weights on held-out prompts."),
    Signal("group.zero_std", "share", "mean", "Share of groups whose rewards are all equal."),
    Signal("group.mixed", "share", "max", "Share of advantage groups that hold more than one prompt: must be 0."),
    Signal("advantage.mean", "1", "mean", "Mean advantage."),
    Signal("advantage.std", "1", "mean", "Standard deviation of advantages."),
    Signal("advantage.abs_max", "1", "max", "Largest |advantage|."),
    Signal("entropy.mean", "nats", "mean", "Mean token entropy; the estimator travels in the settings."),
    Signal("grad.norm", "1", "max", "Gradient norm before clipping."),
    Signal("grad.nonfinite", "count", "max", "Gradients that were NaN or infinite."),
    Signal("update.skipped", "count", "max", "Optimizer updates that were skipped."),
    Signal("lr", "1", "last", "Learning rate."),
    Signal("loss", "1", "mean", "Training loss."),
    Signal("length.mean", "tokens", "mean", "Mean response length."),
    Signal("length.max", "tokens", "max", "Longest response."),
    Signal("length.truncated", "share", "mean", "Share of responses cut by the limit."),
    Signal("length.repetition", "share", "mean", "Share of responses that repeat themselves."),
    Signal("is_weight.masked", "share", "mean", "Share of tokens or sequences that a correction dropped."),
    Signal("is_weight.mean", "1", "mean", "Mean importance weight after its correction; before it, 1."),
    Signal("staleness.mean", "steps", "mean", "Mean versions between sampling and training."),
    Signal("staleness.max", "steps", "max", "Largest versions between sampling and training."),
    Signal("weights.version", "1", "max", "Version label of the weights."),
    Signal("weights.changed_share", "share", "min", "Share of tensors whose digest moved since the last sync."),
    Signal("filter.share", "share", "mean", "Share of tokens that the trainer's filters dropped."),
    Signal("time.step_s", "seconds", "max", "Seconds per step."),
    Signal("expert.max_violation", "1", "max", "Largest MoE load violation."),
    Signal("norm.update_ratio", "1", "mean", "Update norm over weight norm."),
)
SCALARS: Final[dict[str, Signal]] = {s.name: s for s in _SCALARS}

MISSING_REASONS: Final[dict[str, str]] = {
    "older_weights": "Old log-probs come from older weights: the on-policy invariant does not hold.",
    "interpolated": "Old log-probs are interpolated: the on-policy invariant does not hold.",
    "rollout": "Old log-probs are the engine's own.",
    "detached": "Old log-probs are the detached current ones: identically zero, proving nothing.",
    "no_rollout_logprobs": "The engine's log-probs were not collected.",
    "split_sequence": "Sequences are split over ranks and could not be completed.",
    "overflow": "exp(a - b) overflowed on at least one token.",
    "empty_mask": "No token counted.",
    "not_reported": "The host did not report it.",
    "constant": "A side is constant: the correlation is undefined.",
    "semantics_differ": "The two streams do not mean the same thing and were not compared.",
}


def merge_rule(name: str) -> Merge:
    """How values of scalar `name` fold over ranks; unknown scalars are averaged."""
    known = SCALARS.get(name)
    return known.merge if known else "mean"


def find(name: str) -> Signal | None:
    """The catalogue's entry for a full signal name such as `policy.kl_k2`, or None for a host's own scalar."""
    if name in SCALARS:
        return SCALARS[name]
    pair, _, statistic = name.partition(".")
    if pair.partition("@")[0] in PAIRS:
        return STATISTICS.get(statistic)
    return None


def valid_name(name: str) -> bool:
    """True where `name` may be stored as a signal."""
    return len(name) <= MAX_NAME and NAME.match(name) is not None


def all_signals() -> Iterator[Signal]:
    """Every catalogued signal under its full name; used by docs, dashboards and `/v1/rules`."""
    for pair in PAIRS:
        for s in _STATISTICS:
            yield Signal(f"{pair}.{s.name}", s.unit, s.merge, s.sentence, s.worst)
    yield from _SCALARS
