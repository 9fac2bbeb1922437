"""`is_degeneracy`: importance weights degenerate, so that a few tokens stand for the whole batch.

`mismatch.ess_token`, the effective sample share of unclipped token weights, is 0.99 on a healthy bfloat16 stack. The
per-sequence share is length-confounded and never read here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
from pydantic import Field

from foreshock_service.rules.baseline import (
    FRESH,
    PROVISIONAL,
    BaselineConfig,
    Track,
    band_log,
    fold_linear,
    fold_log,
    out_of_range,
)
from foreshock_service.rules.interface import QUIET, UNKNOWN, Evidence, Observation, RuleConfig, StepView, Verdict

ESS, MASKED, MEAN = "mismatch.ess_token", "is_weight.masked", "is_weight.mean"
LOG_FLOOR = 1e-4


class Config(BaselineConfig):
    """What is missing from 1 is judged in log space, and absolute shares speak besides."""

    warn_ess: float = Field(0.5, gt=0, le=1, description="Effective share below which a fall out of range warns.")
    critical_ess: float = Field(0.1, gt=0, le=1, description="Effective share that is critical after critical_steps.")
    critical_steps: int = Field(3, ge=1, description="Consecutive steps below critical_ess.")
    masked_share: float = Field(
        0.5, gt=0, le=1, description="Share dropped by a correction that warns: it hides a fault."
    )

    mean_ratio: float = Field(
        2.0, gt=1, description="Fall of the mean corrected weight below its baseline, as a ratio, that warns."
    )
    mean_z: float = Field(2.0, gt=0, description="Sigmas that the fall must also be.")


class State(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The baseline of 1 − ESS and consecutive steps below the critical share."""

    track: Track = FRESH
    low: int = 0
    mean: Track = FRESH
    """The baseline of the mean corrected weight (log, falling)."""


class IsDegeneracy:
    """Warns below half, critical below a tenth."""

    name = "is_degeneracy"
    title = "Importance weights degenerate"
    config: type[RuleConfig] = Config
    state: type[State] = State
    reads: tuple[str, ...] = (ESS, MASKED, MEAN)
    wants_ticks = False

    def step(self, state: State, seen: Observation, config: Config, now: float) -> tuple[State, Verdict]:
        """ESS first; what a correction masks says the same where no ESS is measured."""
        if not isinstance(seen, StepView):
            return state, UNKNOWN
        ess, masked, mean = seen.values.get(ESS), seen.values.get(MASKED), seen.values.get(MEAN)
        after, reading = state, None
        if ess is not None and 0 <= ess <= 1.000001:
            track, reading = fold_log(
                state.track, max(0.0, 1.0 - ess), seen, config, floor=LOG_FLOOR, learn=ess >= config.warn_ess
            )
            after = State(track, state.low + 1 if ess < config.critical_ess else 0, state.mean)
        elif masked is None:
            return self._by_mean(state, mean, seen, config)
        if ess is not None and after.low >= config.critical_steps:
            message = f"Effective sample share {ess:.2g} for {after.low} steps: a few tokens stand for the whole batch."
            return after, _verdict(ESS, ess, config.critical_ess, message, True, seen.step - after.low + 1)
        if ess is not None and ess < config.warn_ess and reading is not None and out_of_range(reading, config):
            message = f"Effective sample share {ess:.2g}, {1 - reading.centre:.3g} used to be."
            return after, _verdict(ESS, ess, config.warn_ess, message, False, reading.onset)
        if masked is not None and masked >= config.masked_share:
            message = f"A correction drops {masked:.0%}: it hides the fault that makes it necessary."
            return after, _verdict(MASKED, masked, config.masked_share, message, False, None)
        return after, QUIET

    def _by_mean(self, state: State, mean: float | None, seen: StepView, config: Config) -> tuple[State, Verdict]:
        """Weights average 1 before a correction: what the mean has lost was dropped, or lies in a tail never sampled.

        Weights of whole sequences lose more the longer these are, so only a fall from the run's own level counts.
        """
        if mean is None or not 0 <= mean < math.inf:
            return state, UNKNOWN
        known = state.mean
        x = math.log(max(mean, LOG_FLOOR))
        fallen = known.learned >= PROVISIONAL and -x - known.centre >= math.log(config.mean_ratio)
        track, reading = fold_linear(known, x, seen, config, sign=-1.0, survives=True, learn=not fallen)
        after = State(state.track, state.low, track)
        if not fallen or reading is None or reading.z < config.mean_z:
            return after, QUIET
        usual = math.exp(reading.centre)
        message = f"The mean corrected weight is {mean:.2g}, {usual:.2g} used to be: most of the batch is dropped."
        return after, _verdict(MEAN, mean, usual, message, False, reading.onset)

    def bands(self, state: State, config: Config) -> Mapping[str, tuple[float, float, float]]:
        """The learned range of ESS."""
        band = band_log(state.track, config)
        return {ESS: (1 - band[2], 1 - band[1], 1 - band[0])} if band else {}


def _verdict(signal: str, value: float, bound: float, message: str, critical: bool, onset: int | None) -> Verdict:
    evidence = Evidence(signal=signal, value=value, bound=bound, sentence=message)
    severity = "critical" if critical else "warning"
    return Verdict(firing=True, severity=severity, onset_step=onset, message=message, evidence=(evidence,))  # type: ignore[arg-type]


RULE = IsDegeneracy()
