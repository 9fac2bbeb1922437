"""`rollout_mismatch`: the engine's log-probs and the trainer's own scoring part by more than they used to.

With `policy` at its floor the two trainer passes agree with each other, so the engine is at fault: stale or partly
synchronised weights, a stale KV cache, quantisation. `mismatch.kl_k3` leads such a collapse by 5 to 30 steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

import msgspec
from msgspec.structs import replace
from pydantic import Field

from foreshock_service.rules.baseline import (
    FRESH,
    BaselineConfig,
    Reading,
    Track,
    band_log,
    fold_log,
    large,
    out_of_range,
)
from foreshock_service.rules.bulk import NONE, ONE_SIDED_MOST, TRUNCATED, Bulk, Moved, band_bulk, fold_bulk, one_sided
from foreshock_service.rules.creep import creeping, crept
from foreshock_service.rules.edges import engine_edge
from foreshock_service.rules.interface import QUIET, UNKNOWN, Edge, Evidence, Observation, RuleConfig, StepView, Verdict
from foreshock_service.rules.lags import LAGS, folded_lags, mixed
from foreshock_service.rules.presets import Presets, preset_for
from foreshock_service.rules.warm_up import WarmUp, fold_warm_up

PRIMARY = "mismatch.kl_k3"
SECONDARY = "mismatch.kl_k2"
CURRENT = "mismatch_current.kl_k3"
"""Where the scoring pass is skipped and only the training pass is compared with the engine."""
FALLBACKS: Final[Mapping[str, Callable[[float], float]]] = {
    "mismatch.abs_mean": lambda x: 0.5 * x * x,
    "mismatch.prob_abs_mean": lambda x: 2.0 * x * x,
    "mismatch.kl_k1": abs,
}
"""Where no KL is logged, in order of preference, and what makes a figure of a KL's size of it. Mean differences (slime,
TRL) grow like its square root; a difference of probabilities (verl) is about half that of log-probs; the signed mean
has lost all noise that cancels, so its range is wide and it finds what is one-sided."""
POLICY = "policy.kl_k2"
PEARSON = "mismatch.logp_pearson"
UNRELATED = 0.3
"""Correlation of the two sides below which they are not log-probs of the same tokens."""
BULK, SURPRISE = "mismatch.abs_q50", "mismatch.b_mean"
BULK_SHARE = 0.1
"""Share of `negligible` that is enough where the bulk of the tokens has moved as well."""
LOG_FLOOR = 1e-9


class Config(BaselineConfig):
    """Ratios are of kl_k3; on mean differences their square roots count."""

    large_z: float = Field(
        5.0, gt=0, description="Sigmas out of range at which one step is enough, if also large_ratio."
    )
    negligible: float = Field(1e-3, ge=0, description="mismatch.kl_k3 (nats) below which nothing is ever found.")
    creep_ratio: float = Field(
        10.0, gt=1, description="Rise of the baseline itself since calibration that warns, however slow."
    )
    presets: Presets = Field(
        Presets(float32=1e-3, bfloat16=5e-2, moe=0.2),
        description="mismatch.kl_k3 (nats) above which a run that was never lower warns, by dtype.",
    )
    preset_steps: int = Field(3, ge=1, description="Consecutive steps above the preset before it warns.")
    bulk_ratio: float = Field(
        4.0, gt=1, description="Rise of the median token's |difference| at which one step warns, if also large_z."
    )


class State(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Baselines of the merged figure, of the worst rank's and of the fallback."""

    merged: Track = FRESH
    worst: Track = FRESH
    mean: Track = FRESH
    """Of the best of FALLBACKS that this run logs."""
    above_preset: int = 0
    warm: WarmUp = WarmUp()
    ill: bool = False
    """Out of range at the step before: the baselines are not learned from."""
    lags: tuple[Track, ...] = ()
    """Baselines by version lag, where tokens are split by it: index n is lag n."""
    fallback: int = len(FALLBACKS)
    """Which of FALLBACKS `mean` is of: others are not mixed with it."""
    bulk: Bulk = NONE


class RolloutMismatch:
    """Critical when the engine is at fault or nobody can tell; silent when the scoring pass alone is."""

    name = "rollout_mismatch"
    title = "Trainer and rollout engine disagree"
    config: type[RuleConfig] = Config
    state: type[State] = State
    reads: tuple[str, ...] = (
        PRIMARY, CURRENT, *FALLBACKS, POLICY, PEARSON, SECONDARY, "mismatch_current.kl_k2", BULK, SURPRISE, *LAGS,
    )  # fmt: skip
    wants_ticks = False

    def step(self, state: State, seen: Observation, config: Config, now: float) -> tuple[State, Verdict]:
        """kl_k3 merged, then its worst rank; where no KL is logged, the best of FALLBACKS."""
        if not isinstance(seen, StepView):
            return state, UNKNOWN
        warm = state.warm if state.warm.over else fold_warm_up(state.warm, seen)
        learn = warm.over and not state.ill
        # kl_k3 is missing where exp(a - b) overflows, which is no time to be silent; kl_k2 never does.
        signal = PRIMARY if PRIMARY in seen.values else SECONDARY if SECONDARY in seen.values else CURRENT
        value = seen.values.get(signal)
        if value is None:
            return self._by_mean(state, seen, config, warm, learn)
        merged, reading = fold_log(state.merged, value, seen, config, floor=LOG_FLOOR, learn=learn)
        if reading is None:
            return state, UNKNOWN
        worst, worst_reading, rank = state.worst, None, None
        if seen.reported > 1 and PRIMARY in seen.worst:
            worst_value, rank = seen.worst[PRIMARY]
            worst, worst_reading = fold_log(worst, worst_value, seen, config, floor=LOG_FLOOR, learn=learn)
        preset = preset_for(config.presets, seen.settings)
        above = state.above_preset + 1 if value > preset else 0
        lags, by_lag = folded_lags(state.lags, seen, config, learn)
        bulk, moved = state.bulk, None
        if (median := seen.values.get(BULK)) is not None:
            bulk, moved = fold_bulk(bulk, median, -seen.values.get(SURPRISE, 0.0), seen, config, learn=learn)
        after = State(merged, worst, state.mean, above, warm, False, lags, state.fallback, bulk)
        for lag, at_lag in by_lag:
            if at_lag.value >= config.negligible and out_of_range(at_lag, config):
                return replace(after, ill=True), _verdict(seen, LAGS[lag], at_lag, None, config)
        if value >= config.negligible and out_of_range(reading, config):
            if by_lag and all(at_lag.calibrated for _, at_lag in by_lag):
                return replace(after, ill=True), mixed(reading, seen)
            return replace(after, ill=True), _verdict(seen, signal, reading, None, config)
        if (
            worst_reading is not None
            and worst_reading.value >= config.negligible
            and out_of_range(worst_reading, config)
        ):
            return replace(after, ill=True), _verdict(seen, PRIMARY, worst_reading, rank, config)
        if (
            moved is not None
            and moved.z >= config.large_z
            and moved.excess >= math.log(config.bulk_ratio)
            and (value >= BULK_SHARE * config.negligible or one_sided(seen))
            and not by_lag
        ):
            # A truncated sampler is a setting that stays: it is told of, and then it is this run's level.
            return replace(after, ill=not one_sided(seen)), _bulk_verdict(seen, moved)
        if value >= config.negligible and crept(reading, config.creep_ratio):
            edge = engine_edge(seen)
            if edge != "scoring_pass":
                return replace(after, ill=True), creeping(signal, reading, edge)
        if above >= config.preset_steps and not (reading.calibrated and reading.centre < preset):
            message = (
                f"mismatch.kl_k3 is {value:.2g}, above {preset:.2g}, and was never lower in this run: "
                "trainer and engine may have differed from the first step."
            )
            evidence = Evidence(signal=PRIMARY, value=value, bound=preset, sentence="Above the preset of its dtype.")
            return after, Verdict(firing=True, message=message, evidence=(evidence,), edge=engine_edge(seen))
        return after, QUIET

    def _by_mean(
        self, state: State, seen: StepView, config: Config, warm: WarmUp, learn: bool
    ) -> tuple[State, Verdict]:
        """No KL is logged."""
        place, signal = next(
            ((i, s) for i, s in enumerate(FALLBACKS) if math.isfinite(seen.values.get(s, math.nan))), (99, "")
        )
        if not signal or place > state.fallback:
            return state, UNKNOWN
        before = state.mean if place == state.fallback else FRESH
        size = FALLBACKS[signal](seen.values[signal])
        mean, reading = fold_log(before, size, seen, config, floor=LOG_FLOOR, learn=learn)
        after = State(state.merged, state.worst, mean, 0, warm, False, state.lags, place, state.bulk)
        if reading is not None and reading.value >= config.negligible and out_of_range(reading, config):
            return replace(after, ill=True), _verdict(seen, signal, reading, None, config)
        return after, QUIET

    def bands(self, state: State, config: Config) -> Mapping[str, tuple[float, float, float]]:
        """The learned ranges of kl_k3 and of the median token's difference."""
        bands = ((PRIMARY, band_log(state.merged, config)), (BULK, band_bulk(state.bulk, config)))
        return {signal: band for signal, band in bands if band}


def _bulk_verdict(seen: StepView, moved: Moved) -> Verdict:
    """A warning: the bulk of the tokens has moved, though no mean is out of its range yet."""
    edge = engine_edge(seen)
    if edge == "scoring_pass":
        return UNKNOWN
    figures = f"{moved.value:.2g} nats, {moved.value / moved.usual:.3g} times this run's {moved.usual:.2g}"
    message = f"The median token's difference is {figures}. "
    evidence = [
        Evidence(
            signal=BULK,
            value=moved.value,
            expected=moved.usual,
            sentence=f"{moved.z:.1f} sigma out of its range: not a few tokens, the bulk of them.",
        )
    ]
    if one_sided(seen):
        message += TRUNCATED
        k1 = seen.values["mismatch.kl_k1"]
        sentence = "As large as the mean |difference|: one-sided."
        evidence.append(Evidence(signal="mismatch.kl_k1", value=k1, sentence=sentence))
    else:
        message += _WHERE[edge]
    return Verdict(firing=True, onset_step=seen.step, message=message, evidence=evidence, edge=edge)


_WHERE: dict[Edge, str] = {
    "engine": "The trainer's two passes agree, so the engine is at fault: push the weights, flush its KV cache.",
    "training_pass": "The training pass disagrees as well.",
    "undecided": "Whether the engine or the trainer is at fault is undecided: score one batch again before acting.",
}


def _verdict(seen: StepView, signal: str, reading: Reading, rank: int | None, config: Config) -> Verdict:
    edge = engine_edge(seen)
    if edge == "scoring_pass":
        # Old log-probs are the odd ones out and carry this edge up with them; onpolicy_disagreement speaks of it.
        return UNKNOWN
    measured, centre = reading.value, reading.centre
    if signal in FALLBACKS:
        unit = FALLBACKS[signal](1.0)
        power = 1.0 if signal == "mismatch.kl_k1" else 0.5
        measured, centre = (measured / unit) ** power, (centre / unit) ** power
    who = f" on rank {rank}" if rank is not None else ""
    ratio = measured / max(centre, LOG_FLOOR)
    message = f"{signal}{who} is {measured:.2g}, {ratio:.3g} times this run's {centre:.2g}. {_WHERE[edge]}"
    evidence = [
        Evidence(
            signal=signal,
            value=measured,
            expected=centre,
            rank=rank,
            sentence=f"{reading.z:.1f} sigma out of its range.",
        )
    ]
    if POLICY in seen.values:
        sentence = "Too small to have raised the mismatch." if edge == "engine" else "Up as well."
        evidence.append(Evidence(signal=POLICY, value=seen.values[POLICY], sentence=sentence))
    pearson = seen.values.get(PEARSON, 1.0)
    if pearson < UNRELATED:
        # Shifted labels or rows look like the worst of engines, and no push of weights would cure them.
        edge = "undecided"
        message += f" The log-probs hardly correlate ({PEARSON} {pearson:.2f}): they belong to other tokens or rows."
        sentence = "Labels or rows that belong elsewhere."
        evidence.append(Evidence(signal=PEARSON, value=pearson, bound=UNRELATED, sentence=sentence))
    serious = reading.calibrated and (
        large(reading, config) or reading.smooth >= 2.0 or edge == "engine" or pearson < UNRELATED
    )
    if one_sided(seen) and abs(seen.values["mismatch.kl_k1"]) < ONE_SIDED_MOST:
        message += f" {TRUNCATED}"
        serious = False
    return Verdict(
        firing=True,
        severity="critical" if serious else "warning",
        onset_step=reading.onset if reading.onset is not None else seen.step,
        message=message,
        evidence=evidence,
        edge=edge,
    )


RULE = RolloutMismatch()
