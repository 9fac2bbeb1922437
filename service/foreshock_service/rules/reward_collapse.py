"""`reward_collapse`: the reward has lost what it had gained. A consequence, not a precursor: the last line of defence.

The level is a median of the last values, the best level so far is what it is held against, and the yardstick is the
larger of the run's own noise and the ground it had gained.
"""

from __future__ import annotations

import math
from statistics import median
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

SIGNALS: Final = ("reward.mean", "reward.validation")
FAST, SLOW, NOISE = 5, 10, 32
"""Values in the present level, in an established level, and step-to-step changes in the noise estimate."""
DIFFERENCE_TO_SIGMA: Final = 0.954
"""The median |difference| of two Gaussian values is 0.954 sigma."""


class Config(RuleConfig):
    """Shares are of what the run had: the larger of its gain since the start and `floor_share` of its best level."""

    calibration_steps: int = Field(12, ge=SLOW, description="Values before anything is said.")
    warn_share: float = Field(0.35, gt=0, description="Share of what the run had whose loss warns.")
    critical_share: float = Field(0.6, gt=0, description="Share of what the run had whose loss is critical.")
    floor_share: float = Field(
        0.5, ge=0, description="Of the best level's size, counted as had even if there was no gain."
    )
    noise_sigmas: float = Field(
        4.0, gt=0, description="The loss must also be this many sigmas of the level's own noise."
    )
    critical_steps: int = Field(4, ge=1, description="Consecutive steps below before it is critical.")


class Level(msgspec.Struct, frozen=True, array_like=True):
    """One reward's recent values, its noise and its best and first established level."""

    recent: tuple[float, ...] = ()
    changes: tuple[float, ...] = ()
    best: float = -math.inf
    worst: float = math.inf
    seen: int = 0
    below: int = 0
    onset: int | None = None
    attempt: int = -1
    step: int = -1


class State(msgspec.Struct, frozen=True, array_like=True):
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
        levels = [state.rollout, state.validation]
        verdicts: list[Verdict] = []
        for i, signal in enumerate(SIGNALS):
            value = seen.values.get(signal)
            if value is not None and math.isfinite(value):
                levels[i], verdict = _judged(levels[i], value, signal, seen, config)
                verdicts.append(verdict)
        after = State(levels[0], levels[1])
        if not verdicts:
            return state, UNKNOWN
        firing = [v for v in verdicts if v.firing]
        return after, max(firing, key=lambda v: v.severity == "critical") if firing else QUIET


def _judged(level: Level, value: float, signal: str, seen: StepView, config: Config) -> tuple[Level, Verdict]:
    if seen.attempt != level.attempt or seen.step <= level.step:
        # Another attempt starts from other weights: what it may lose is what it has itself.
        level = Level(changes=level.changes, attempt=seen.attempt)
    changes = level.changes
    if level.recent:
        changes = (*changes[-NOISE + 1 :], abs(value - level.recent[-1]))
    recent = (*level.recent[-SLOW + 1 :], value)
    best, worst, count = level.best, level.worst, level.seen + 1
    if len(recent) >= SLOW:
        established = median(recent)
        best, worst = max(best, established), min(worst, established)
    below, onset, verdict = 0, None, QUIET
    if count >= config.calibration_steps:
        now_at = median(recent[-FAST:])
        had = max(best - worst, config.floor_share * abs(best))
        # 1.2533: the median of n values is that much noisier than their mean.
        noise = 1.2533 * median(changes) / DIFFERENCE_TO_SIGMA / math.sqrt(FAST)
        lost = best - now_at
        share = lost / had if had > 0 else 0.0
        if share >= config.warn_share and lost >= config.noise_sigmas * noise:
            below = level.below + 1
            onset = level.onset if level.onset is not None else seen.step
            severity: Severity = (
                "critical" if share >= config.critical_share and below >= config.critical_steps else "warning"
            )
            message = f"{signal} is at {now_at:.3g} after {best:.3g}: {share:.0%} of what the run had is gone."
            evidence = Evidence(
                signal=signal, value=now_at, expected=best, bound=best - config.warn_share * had, sentence=message
            )
            verdict = Verdict(firing=True, severity=severity, onset_step=onset, message=message, evidence=(evidence,))
    after = Level(recent, changes, best, worst, count, below, onset, seen.attempt, seen.step)
    return after, verdict


RULE = RewardCollapse()
