"""`reward_collapse`: the reward has lost what it had gained. A consequence, not a precursor: the last line of defence.

The level is a median of the last values, the best level so far is what it is held against, and the yardstick is the
larger of the run's own noise and the ground it had gained.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec
from pydantic import Field

from foreshock_service.rules.interface import (
    QUIET,
    UNKNOWN,
    Evidence,
    Observation,
    RuleConfig,
    Severity,
    StepView,
    Verdict,
)
from foreshock_service.rules.series import judged_each

SIGNALS: Final = ("reward.mean", "reward.validation")
SHORT, LONG = 5, 20
"""Values in the two levels: the short one sees a fall at once where noise is small, the long one where it is large."""
ESTABLISHED = 10
"""Values whose median counts as a level that the run had, for the short level."""
MEAN_TO_SIGMA: Final = 1.128
"""The mean |difference| of two Gaussian values is 1.128 sigma."""
MEDIAN_LOSS: Final = 1.2533
"""A median of n values is that much noisier than their mean."""
NOISE_RATE = 1 / 32
TINY = 1e-9


class Config(RuleConfig):
    """Shares are of what the run had: the larger of its gain since the start and `floor_share` of its best level."""

    calibration_steps: int = Field(6, ge=3, description="Values before anything is said.")
    warn_share: float = Field(0.45, gt=0, description="Share of what the run had whose loss warns.")
    critical_share: float = Field(0.75, gt=0, description="Share of what the run had whose loss is critical.")
    floor_share: float = Field(
        0.5, ge=0, description="Of the best level's size, counted as had even if there was no gain."
    )
    noise_sigmas: float = Field(
        7.0, gt=0, description="The loss must also be this many sigmas of the level's own noise."
    )
    critical_sigmas: float = Field(8.0, gt=0, description="The same for a critical finding.")
    critical_steps: int = Field(4, ge=1, description="Consecutive steps below before it is critical.")


class Level(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One reward's recent values, its noise, and the best and worst levels it had."""

    recent: tuple[float, ...] = ()
    noise: float = 0.0
    """Sigma of one value, from step-to-step changes; frozen while the reward is down."""
    best: float = -math.inf
    best_long: float = -math.inf
    worst: float = math.inf
    seen: int = 0
    below: int = 0
    grave: int = 0
    onset: int | None = None
    attempt: int = -1
    step: int = -1


class State(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Rollout reward and validation reward, each by itself."""

    rollout: Level = Level()
    validation: Level = Level()


class RewardCollapse:
    """Warns, then is critical; the graver of the two rewards speaks."""

    name = "reward_collapse"
    title = "Reward collapses"
    config: type[RuleConfig] = Config
    state: type[State] = State
    reads: tuple[str, ...] = SIGNALS
    wants_ticks = False

    def step(self, state: State, seen: Observation, config: Config, now: float) -> tuple[State, Verdict]:
        """A reward that is missing or not finite leaves its level as it was."""
        if not isinstance(seen, StepView):
            return state, UNKNOWN
        levels = (state.rollout, state.validation)
        after, verdict = judged_each(
            levels, SIGNALS, seen, lambda level, x, name: _judged(level, x, name, seen, config)
        )
        return State(*after), verdict


def _median(values: tuple[float, ...]) -> float:
    """As `statistics.median`, which costs twice the rest of this rule. Of at least one value."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else 0.5 * (ordered[half - 1] + ordered[half])


def _judged(level: Level, value: float, signal: str, seen: StepView, config: Config) -> tuple[Level, Verdict]:
    if seen.attempt != level.attempt or seen.step <= level.step:
        # Another attempt starts from other weights: what it may lose is what it has itself.
        level = Level(noise=level.noise, attempt=seen.attempt)
    count, noise = level.seen + 1, level.noise
    if level.recent and not level.below:
        change = abs(value - level.recent[-1]) / MEAN_TO_SIGMA
        noise += max(NOISE_RATE, 1.0 / count) * (change - noise)
    recent = (*level.recent[1 - LONG :], value)
    best, best_long, worst = level.best, level.best_long, level.worst
    now_at = _median(recent[-SHORT:])
    long_at = math.fsum(recent) / LONG if len(recent) == LONG else math.inf
    below, grave, onset, verdict = 0, 0, None, QUIET
    if count >= config.calibration_steps:
        established = _median(recent[-ESTABLISHED:])
        best, worst = max(best, established), min(worst, established)
        if long_at < math.inf:
            best_long = max(best_long, long_at)
        had = max(best - worst, config.floor_share * abs(best))
        short_sigmas = (best - now_at) / max(MEDIAN_LOSS * noise / math.sqrt(SHORT), TINY)
        long_sigmas = (best_long - long_at) / max(noise / math.sqrt(LONG), TINY)
        short = short_sigmas >= long_sigmas
        lost, sigmas = (best - now_at, short_sigmas) if short else (best_long - long_at, long_sigmas)
        share = lost / had if had > 0 else 0.0
        if share >= config.warn_share and sigmas >= config.noise_sigmas:
            below = level.below + 1
            grave = level.grave + 1 if share >= config.critical_share and sigmas >= config.critical_sigmas else 0
            onset = level.onset if level.onset is not None else seen.step
            verdict = _verdict(signal, best - lost, best, share, onset, grave >= config.critical_steps)
    after = Level(recent, noise, best, best_long, worst, count, below, grave, onset, seen.attempt, seen.step)
    return after, verdict


def _verdict(signal: str, now_at: float, best: float, share: float, onset: int, grave: bool) -> Verdict:
    message = f"{signal} is at {now_at:.3g} after {best:.3g}: {share:.0%} of what the run had is gone."
    severity: Severity = "critical" if grave else "warning"
    evidence = Evidence(signal=signal, value=now_at, expected=best, sentence=message)
    return Verdict(firing=True, severity=severity, onset_step=onset, message=message, evidence=(evidence,))


RULE = RewardCollapse()
