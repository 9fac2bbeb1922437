"""`onpolicy_disagreement`: two passes over the same tokens with the same weights disagree by more than noise.

`policy.kl_k2` of optimizer step 0 has an invariant: old and current log-probs come from the same weights, so all that
separates them is rounding. It is the earliest sign of trainer-side faults, steps ahead of the reward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    out_of_range,
)
from foreshock_service.rules.creep import creeping, crept
from foreshock_service.rules.edges import odd_pass
from foreshock_service.rules.interface import QUIET, UNKNOWN, Edge, Evidence, Observation, RuleConfig, StepView, Verdict
from foreshock_service.rules.presets import Presets, preset_for

SIGNAL = "policy.kl_k2"
LOG_FLOOR = 1e-9
"""Identical kernels in both passes give exactly 0; in log space that is this."""
CALIBRATED_FLOOR_RATIO = 10.0
ENGINE_SHARE = 0.1
"""Below this share of both engine edges a disagreement is taken for their consequence."""
PEARSON = "policy.logp_pearson"
UNRELATED = 0.3
"""Correlation of the two sides below which they are not log-probs of the same tokens, if it stays there."""
UNRELATED_STEPS = 3


class Config(BaselineConfig):
    """The floor is learned from this run; presets speak only while it is not."""

    large_z: float = Field(
        5.0, gt=0, description="Sigmas out of range at which one step is enough, if also large_ratio."
    )
    negligible: float = Field(1e-4, ge=0, description="policy.kl_k2 (nats) below which nothing is ever found.")
    creep_ratio: float = Field(
        10.0, gt=1, description="Rise of the baseline itself since calibration that warns, however slow."
    )
    presets: Presets = Field(
        Presets(float32=1e-4, bfloat16=2e-2, moe=5e-2),
        description="policy.kl_k2 (nats) above which a run whose floor is not calibrated warns, by dtype.",
    )
    preset_steps: int = Field(3, ge=1, description="Consecutive steps above the preset before it warns.")


class State(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The merged figure's baseline, the worst rank's, and steps above the preset."""

    merged: Track = FRESH
    worst: Track = FRESH
    above_preset: int = 0
    ill: bool = False
    """Out of range at the step before: the floors are not learned from."""
    unrelated: int = 0
    """Consecutive steps at which the two sides hardly correlate. One alone happens where entropy is low."""


class OnpolicyDisagreement:
    """Critical, unless only the scoring pass is at fault or only a preset speaks."""

    name = "onpolicy_disagreement"
    title = "Training and scoring pass disagree on-policy"
    config: type[RuleConfig] = Config
    state: type[State] = State
    reads: tuple[str, ...] = (SIGNAL, PEARSON, "mismatch.kl_k2", "mismatch_current.kl_k2")
    wants_ticks = False

    def step(self, state: State, seen: Observation, config: Config, now: float) -> tuple[State, Verdict]:
        """Reads merged and worst rank: one rank of 64 at twenty times its floor moves the merged figure by a third."""
        if not isinstance(seen, StepView) or (value := seen.values.get(SIGNAL)) is None:
            return state, UNKNOWN
        merged, reading = fold_log(state.merged, value, seen, config, floor=LOG_FLOOR, learn=not state.ill)
        if reading is None:
            return state, UNKNOWN
        worst, worst_reading, rank = state.worst, None, None
        if seen.reported > 1 and SIGNAL in seen.worst:
            worst_value, rank = seen.worst[SIGNAL]
            worst, worst_reading = fold_log(
                state.worst, worst_value, seen, config, floor=LOG_FLOOR, learn=not state.ill
            )
        preset = preset_for(config.presets, seen.settings)
        above = state.above_preset + 1 if value > preset else 0
        unrelated = state.unrelated + 1 if seen.values.get(PEARSON, 1.0) < UNRELATED else 0
        after = State(merged, worst, above, False, unrelated)
        floor = _host_floor(seen.settings)
        if value >= config.negligible and (
            out_of_range(reading, config) or (floor is not None and value > CALIBRATED_FLOOR_RATIO * floor)
        ):
            return replace(after, ill=True), _verdict(seen, reading, None, floor, unrelated)
        if (
            worst_reading is not None
            and worst_reading.value >= config.negligible
            and out_of_range(worst_reading, config)
        ):
            return replace(after, ill=True), _verdict(seen, worst_reading, rank, floor, unrelated)
        if value >= config.negligible and crept(reading, config.creep_ratio):
            return replace(after, ill=True), creeping(SIGNAL, reading, _edge(seen, value)[0])
        if above >= config.preset_steps and not (reading.calibrated and reading.centre < preset):
            message = (
                f"policy.kl_k2 is {value:.2g}, above {preset:.2g}, and this run has shown no lower floor: "
                "it may have been ill from its first step. Scoring one batch twice would tell."
            )
            evidence = Evidence(signal=SIGNAL, value=value, bound=preset, sentence="Above the preset of its dtype.")
            return after, Verdict(
                firing=True, severity="warning", message=message, evidence=(evidence,), edge=odd_pass(seen)[0]
            )
        return after, QUIET

    def bands(self, state: State, config: Config) -> Mapping[str, tuple[float, float, float]]:
        """The learned floor."""
        band = band_log(state.merged, config)
        return {SIGNAL: band} if band else {}


def _host_floor(settings: Mapping[str, Any]) -> float | None:
    """A floor that the host calibrated by scoring one batch again: settings `floors: {policy.kl_k2: x}`."""
    floors = settings.get("floors")
    floor = floors.get(SIGNAL) if isinstance(floors, Mapping) else None
    return float(floor) if isinstance(floor, int | float) and floor > 0 else None


_WHERE: dict[Edge, str] = {
    "training_pass": "The training pass is the odd one out: engine and scoring pass agree. Resync the trainer.",
    "scoring_pass": "The scoring pass is the odd one out: engine and training pass agree. Mostly harmless.",
    "engine": "The engine's edges are far larger: this follows from them.",
    "undecided": "Which pass is at fault is undecided: score one batch again before acting.",
}


def _edge(seen: StepView, value: float) -> tuple[Edge, float | None]:
    """The odd pass; `engine` where this is far below both engine edges and so their consequence."""
    edge, share = odd_pass(seen)
    engine_edges = [seen.values.get(signal) for signal in ("mismatch.kl_k2", "mismatch_current.kl_k2")]
    if edge == "undecided" and all(e is not None and value <= ENGINE_SHARE * e for e in engine_edges):
        edge = "engine"
    return edge, share


def _verdict(seen: StepView, reading: Reading, rank: int | None, floor: float | None, unrelated_steps: int) -> Verdict:
    edge, share = _edge(seen, reading.value)
    expected = floor if floor is not None else reading.centre
    who = f" on rank {rank}" if rank is not None else ""
    ratio = reading.value / max(expected, LOG_FLOOR)
    figures = f"{reading.value:.2g}, {ratio:.3g} times this run's floor of {expected:.2g}"
    message = f"policy.kl_k2{who} is {figures}. {_WHERE[edge]}"
    evidence = [
        Evidence(
            signal=SIGNAL,
            value=reading.value,
            expected=expected,
            rank=rank,
            sentence=f"{reading.z:.1f} sigma up; same weights on both sides, so more than rounding is a defect.",
        )
    ]
    for signal in ("mismatch.kl_k2", "mismatch_current.kl_k2"):
        if signal in seen.values:
            evidence.append(Evidence(signal=signal, value=seen.values[signal], sentence="An edge to the engine."))
    if share is not None:
        sentence = "(mismatch_current − mismatch) / policy: near 1 for the training pass, near −1 for the scoring pass."
        evidence.append(Evidence(signal="edges.share", value=share, sentence=sentence))
    unrelated = unrelated_steps >= UNRELATED_STEPS
    certain = reading.calibrated or floor is not None
    if unrelated:
        pearson = seen.values[PEARSON]
        message += f" The log-probs hardly correlate ({PEARSON} {pearson:.2f}): they belong to other tokens or rows."
        evidence.append(
            Evidence(signal=PEARSON, value=pearson, bound=UNRELATED, sentence="Labels or rows that belong elsewhere.")
        )
    return Verdict(
        firing=True,
        severity="critical" if certain and (unrelated or edge not in ("scoring_pass", "engine")) else "warning",
        onset_step=reading.onset if reading.onset is not None else seen.step,
        message=message,
        evidence=evidence,
        edge=edge,
    )


RULE = OnpolicyDisagreement()
