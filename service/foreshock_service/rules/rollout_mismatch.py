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
from foreshock_service.rules.creep import creeping, crept
from foreshock_service.rules.edges import odd_pass
from foreshock_service.rules.interface import QUIET, UNKNOWN, Edge, Evidence, Observation, RuleConfig, StepView, Verdict
from foreshock_service.rules.presets import Presets, preset_for
from foreshock_service.rules.warm_up import WarmUp, fold_warm_up

PRIMARY = "mismatch.kl_k3"
SECONDARY = "mismatch.kl_k2"
LAGS = tuple(f"mismatch@lag{n}.kl_k3" for n in range(4))
"""Lags with a baseline of their own; older tokens count in the merged figure only."""
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
LOG_FLOOR = 1e-9
POLICY_SHARE = 0.1
"""A policy edge below this share of the mismatch cannot be what raised it."""


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


class State(msgspec.Struct, frozen=True, array_like=True):
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


class RolloutMismatch:
    """Critical when the engine is at fault or nobody can tell; silent when the scoring pass alone is."""

    name = "rollout_mismatch"
    title = "Trainer and rollout engine disagree"
    config: type[RuleConfig] = Config
    state: type[State] = State
    reads: tuple[str, ...] = (PRIMARY, CURRENT, *FALLBACKS, POLICY, PEARSON, SECONDARY, "mismatch_current.kl_k2", *LAGS)
    wants_ticks = False

    def step(self, state: State, seen: Observation, config: Config, now: float) -> tuple[State, Verdict]:
        """kl_k3 merged, then its worst rank; where no KL is logged, the best of FALLBACKS."""
        if not isinstance(seen, StepView):
            return state, UNKNOWN
        warm = state.warm if state.warm.over else fold_warm_up(state.warm, seen)
        learn = warm.over and not state.ill
        # kl_k3 is missing where exp(a - b) overflows, which is no time to be silent; kl_k2 never does.
        signal = next((s for s in (PRIMARY, SECONDARY, CURRENT) if s in seen.values), None)
        value = seen.values.get(signal, math.nan) if signal else None
        if signal is None or value is None:
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
        lags, by_lag = _folded_lags(state.lags, seen, config, learn)
        after = State(merged, worst, state.mean, above, warm, False, lags, state.fallback)
        for lag, at_lag in by_lag:
            if at_lag.value >= config.negligible and out_of_range(at_lag, config):
                return replace(after, ill=True), _verdict(seen, LAGS[lag], at_lag, None, config)
        if value >= config.negligible and out_of_range(reading, config):
            if by_lag and all(at_lag.calibrated for _, at_lag in by_lag):
                return replace(after, ill=True), _mixed(reading, seen)
            return replace(after, ill=True), _verdict(seen, signal, reading, None, config)
        if (
            worst_reading is not None
            and worst_reading.value >= config.negligible
            and out_of_range(worst_reading, config)
        ):
            return replace(after, ill=True), _verdict(seen, PRIMARY, worst_reading, rank, config)
        if value >= config.negligible and crept(reading, config.creep_ratio):
            edge = _edge(seen)
            if edge != "scoring_pass":
                return replace(after, ill=True), creeping(signal, reading, edge)
        if above >= config.preset_steps and not (reading.calibrated and reading.centre < preset):
            message = (
                f"mismatch.kl_k3 is {value:.2g}, above {preset:.2g}, and was never lower in this run: "
                "trainer and engine may have differed from the first step."
            )
            evidence = Evidence(signal=PRIMARY, value=value, bound=preset, sentence="Above the preset of its dtype.")
            return after, Verdict(firing=True, message=message, evidence=(evidence,), edge=_edge(seen))
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
        after = State(state.merged, state.worst, mean, 0, warm, False, state.lags, place)
        if reading is not None and reading.value >= config.negligible and out_of_range(reading, config):
            return replace(after, ill=True), _verdict(seen, signal, reading, None, config)
        return after, QUIET

    def bands(self, state: State, config: Config) -> Mapping[str, tuple[float, float, float]]:
        """The learned range of kl_k3."""
        band = band_log(state.merged, config)
        return {PRIMARY: band} if band else {}


def _folded_lags(
    tracks: tuple[Track, ...], seen: StepView, config: Config, learn: bool
) -> tuple[tuple[Track, ...], list[tuple[int, Reading]]]:
    """Folds the lags that this step has, each against its own baseline."""
    present = [(lag, seen.values[name]) for lag, name in enumerate(LAGS) if name in seen.values]
    if not present:
        return tracks, []
    folded = list(tracks) + [FRESH] * (len(LAGS) - len(tracks))
    readings = []
    for lag, value in present:
        folded[lag], reading = fold_log(folded[lag], value, seen, config, floor=LOG_FLOOR, learn=learn)
        if reading is not None:
            readings.append((lag, reading))
    return tuple(folded), readings


def _mixed(reading: Reading, seen: StepView) -> Verdict:
    """Every lag is in its own range and the whole is not: the mix of lags has changed, not the engine."""
    message = (
        f"{PRIMARY} is {reading.value:.2g} after {reading.centre:.2g}, and every version lag is in its own range: "
    )
    message += "more tokens come from older weights."
    evidence = [Evidence(signal=PRIMARY, value=reading.value, expected=reading.centre, sentence=message)]
    if "staleness.mean" in seen.values:
        sentence = "Versions between sampling and training."
        evidence.append(Evidence(signal="staleness.mean", value=seen.values["staleness.mean"], sentence=sentence))
    return Verdict(firing=True, onset_step=reading.onset, message=message, evidence=evidence)


def _edge(seen: StepView) -> Edge:
    """`engine` where the trainer's passes differ far less than the engine does, else what the three edges say.

    Without a policy edge (not observed, or old log-probs that are the detached current ones) nothing is decided.
    `policy` and `mismatch_current` are of the same tokens and compare best; `mismatch` may be of more.
    """
    values = seen.values
    policy = values.get(POLICY)
    current = values.get("mismatch_current.kl_k2", values.get("mismatch_current.kl_k3"))
    mismatch = values.get("mismatch.kl_k2", values.get(PRIMARY))
    if policy is None or mismatch is None:
        return "undecided"
    if current is None:
        return "engine" if policy <= POLICY_SHARE**2 * mismatch else "undecided"
    if current <= POLICY_SHARE * mismatch:
        return "scoring_pass"
    return "engine" if policy <= POLICY_SHARE * current else odd_pass(seen)[0]


_WHERE: dict[Edge, str] = {
    "engine": "The trainer's two passes agree, so the engine is at fault: push the weights, flush its KV cache.",
    "training_pass": "The training pass disagrees as well.",
    "undecided": "Whether the engine or the trainer is at fault is undecided: score one batch again before acting.",
}


def _verdict(seen: StepView, signal: str, reading: Reading, rank: int | None, config: Config) -> Verdict:
    edge = _edge(seen)
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
    return Verdict(
        firing=True,
        severity="critical" if serious else "warning",
        onset_step=reading.onset if reading.onset is not None else seen.step,
        message=message,
        evidence=evidence,
        edge=edge,
    )


RULE = RolloutMismatch()
