"""`kl_blowup`: the policy runs away from its reference, or one rollout's updates run away from the old policy.

Drift from the reference is what training is, and single outliers are common. Found is a KL that stays at a multiple of
the largest it had ever reached.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec
from pydantic import Field

from foreshock_service.rules.interface import QUIET, UNKNOWN, Evidence, Observation, RuleConfig, StepView, Verdict
from foreshock_service.rules.peak import FRESH, NONE, Peak, fold_peak
from foreshock_service.rules.series import judged_each

RATIO: Final = "update.ratio_mean"
"""The mean unclipped ratio is 1 in expectation: how far it is from 1 tells of an update that ran away."""
SIGNALS: Final = ("reference.kl_k3", "update.kl_k2", RATIO)


class Config(RuleConfig):
    """All series are judged alike, each against its own past; of the mean ratio its distance from 1."""

    calibration_steps: int = Field(20, ge=3, description="Values before anything is said: KL rises from nothing.")
    ratio: float = Field(6.0, gt=1, description="Ratio to the largest KL of the past at which a step counts.")
    negligible: float = Field(0.1, ge=0, description="KL (nats) below which nothing is ever found.")
    critical_kl: float = Field(1.0, gt=0, description="KL (nats) below which nothing is ever critical.")
    warn_steps: float = Field(2.5, gt=0, description="Leaking sum of such steps that warns.")
    decay: float = Field(0.9, gt=0, lt=1, description="What is left of such a step after the next.")
    critical_steps: int = Field(6, ge=1, description="Such steps in a row that are critical.")
    preset_kl: float = Field(
        2.0, gt=0, description="KL (nats) that warns after preset_steps in a row while no past is known."
    )
    preset_steps: int = Field(3, ge=1, description="Such steps in a row that warn.")
    hopeless: float = Field(100.0, gt=0, description="KL (nats) that is critical at once, whatever came before.")


class Course(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One series: its past, the leaking sum of steps out of proportion, such steps in a row."""

    peak: Peak = FRESH
    steps: float = 0.0
    sustained: int = 0
    onset: int | None = None
    above_preset: int = 0
    """Steps in a row above the preset, before anything was known to compare with."""


class State(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One course for each series."""

    reference: Course = Course()
    update: Course = Course()
    ratio: Course = Course()


class KlBlowup:
    """Warns, and is critical where it lasts."""

    name = "kl_blowup"
    title = "KL blows up"
    config: type[RuleConfig] = Config
    state: type[State] = State
    reads: tuple[str, ...] = SIGNALS
    wants_ticks = False

    def step(self, state: State, seen: Observation, config: Config, now: float) -> tuple[State, Verdict]:
        """The gravest of the series speaks."""
        if not isinstance(seen, StepView):
            return state, UNKNOWN
        courses = (state.reference, state.update, state.ratio)
        after, verdict = judged_each(courses, SIGNALS, seen, lambda c, x, signal: _judged(c, x, signal, seen, config))
        return State(*after), verdict

    def bands(self, state: State, config: Config) -> Mapping[str, tuple[float, float, float]]:
        """From zero to where a step counts; the centre is the largest KL of the past."""
        bands = {}
        for signal, course in zip(SIGNALS[:2], (state.reference, state.update), strict=True):
            if course.peak.past != NONE:
                past = math.exp(course.peak.past)
                bands[signal] = (0.0, past, max(past * config.ratio, config.negligible))
        return bands


def _judged(course: Course, value: float, signal: str, seen: StepView, config: Config) -> tuple[Course, Verdict]:
    shown = value
    if signal == RATIO:
        value = abs(value - 1.0)
    if value < 0:
        return course, UNKNOWN
    ill = course.sustained >= config.critical_steps
    peak, excess = fold_peak(
        course.peak,
        max(value, 1e-9),
        seen,
        calibration=config.calibration_steps,
        forget=0.0,
        survives=False,
        learn=not ill,
    )
    out = excess is not None and value >= config.negligible and excess >= math.log(config.ratio)
    steps = course.steps * config.decay + (1.0 if out else 0.0)
    sustained = course.sustained + 1 if out else 0
    above = course.above_preset + 1 if excess is None and value >= config.preset_kl else 0
    begun = steps >= 0.2 or above > 0
    onset = (course.onset if course.onset is not None else seen.step) if begun else None
    after = Course(peak, steps, sustained, onset, above)
    hopeless = value >= config.hopeless
    if not (hopeless or steps >= config.warn_steps or above >= config.preset_steps):
        return after, QUIET
    past = value / math.exp(excess) if excess is not None else None
    compared = " in the first steps" if past is None else f", {value / past:.3g} times the {past:.3g} reached before"
    what = f"{shown:.3g} and should be 1; its distance" if signal == RATIO else f"{value:.3g} nats"
    message = f"{signal} is {what}{compared}."
    evidence = Evidence(signal=signal, value=shown, expected=past, sentence="Against the largest of its past.")
    critical = hopeless or (sustained >= config.critical_steps and value >= config.critical_kl)
    return after, Verdict(
        firing=True,
        severity="critical" if critical else "warning",
        onset_step=onset if onset is not None else seen.step,
        message=message,
        evidence=(evidence,),
    )


RULE = KlBlowup()
