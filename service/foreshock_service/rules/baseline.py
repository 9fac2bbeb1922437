"""A run's own healthy range of one signal, learned; and how far, and for how long, the signal has left it.

`Track` is the state of one signal: the last clean values (at most 64), their median and spread, and a cumulative sum
that notices drift which never jumps. Positive series live in log space, where "ten times the floor" is a distance that
travels between models; others are linear. Everything here is pure and of constant cost: `fold` returns a new Track.

What is learned from: finite values, not while the rule finds the run ill (`learn=False`). Values beyond the gate are
not learned, so that a burst moves nothing; a change that lasts is followed slowly.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec
from pydantic import Field

from foreshock_service.rules.interface import RuleConfig, StepView

MAX_WINDOW: Final = 64
IQR_TO_SIGMA: Final = 1.349
TAIL_TO_SIGMA: Final = 1.2816
"""A Gaussian's 90 % quantile is 1.2816 sigma above its median."""
PROVISIONAL: Final = 3
"""Values after which a step far beyond them counts although the baseline is not calibrated."""
EARLY_Z: Final = 1.5
"""Doubled sigmas out of a provisional range at which a large_ratio counts."""
RENEW_EVERY: Final = 2
"""Values that a full window takes up between two estimates of its centre and spread."""
GATE: Final = 3.0
"""Sigmas beyond which a value is not learned; if that lasts, values are learned as if they were only so far out."""


class BaselineConfig(RuleConfig):
    """How a baseline is learned and what counts as leaving it. Ratios are to the baseline's centre."""

    calibration_steps: int = Field(8, ge=3, le=MAX_WINDOW, description="Clean steps before the baseline is trusted.")
    window_values: int = Field(48, ge=8, le=MAX_WINDOW, description="Clean values that the baseline remembers.")
    stride: int = Field(2, ge=1, description="Once its window is full, the baseline learns every n-th clean value.")
    min_spread: float = Field(
        0.15, gt=0, description="Smallest spread (sigma) believed, in log units or the signal's own."
    )
    large_z: float = Field(
        6.0, gt=0, description="Sigmas out of range at which one step is enough, if also large_ratio."
    )
    large_ratio: float = Field(
        10.0, gt=1, description="Ratio to the centre at which one step is enough, if also large_z."
    )
    mild_ratio: float = Field(3.0, gt=1, description="Smallest smoothed ratio to the centre that a drift may open at.")
    drift_slack: float = Field(1.0, ge=0, description="Sigmas a step that the cumulative sum forgives.")
    drift_limit: float = Field(12.0, gt=0, description="Cumulative sum (sigmas) at which a drift is found.")


class Track(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One signal's baseline and excursion, immutable. Values are transformed (log or linear) and signed upwards."""

    recent: tuple[float, ...] = ()
    learned: int = 0
    """Clean values learned in this segment."""
    centre: float = 0.0
    spread: float = 0.0
    """Sigma, estimated from quantiles; 0 before the first value."""
    prior: bool = False
    """centre and spread come from before a change of settings; until enough is learned they are trusted half."""
    attempt: int = -1
    segment: int = -1
    step: int = -1
    drift: float = 0.0
    """One-sided cumulative sum of z - slack, capped."""
    smooth: float = 0.0
    """Exponentially weighted excess over the centre, weight one half."""
    onset: int | None = None
    """The step at which the excursion began, while there is one."""
    rejected: int = 0
    """Values in a row beyond the gate."""
    anchor: float | None = None
    """The centre at which the baseline was first trusted in this segment: what slow creep is held against."""


class Reading(msgspec.Struct, frozen=True, gc=False):
    """One value against its baseline as it was before the value came."""

    value: float
    excess: float
    """Transformed value minus centre: ln(ratio) in log space."""
    z: float
    drift: float
    smooth: float
    centre: float
    """The baseline's centre in the signal's own unit."""
    calibrated: bool
    onset: int | None
    creep: float = 0.0
    """The centre over the one at which the baseline was first trusted, in log units."""
    known: bool = False
    """A few values are known, so that a step far beyond all of them means something although nothing is calibrated."""

    @property
    def ratio(self) -> float:
        """Value over centre, in log space."""
        return math.exp(min(self.excess, 700.0))


FRESH: Final = Track()


def fold_log(
    track: Track,
    value: float,
    seen: StepView,
    config: BaselineConfig,
    *,
    floor: float,
    survives: bool = True,
    learn: bool = True,
) -> tuple[Track, Reading | None]:
    """Folds a positive value in log space; what is below `floor` counts as `floor` (zeros are measurements).

    None for a value that is not finite: it is an event for `non_finite`, and leaves the track as it was.
    """
    if not -math.inf < value < math.inf:
        return track, None
    x = math.log(value if value > floor else floor)
    return _fold(track, x, value, seen, config, survives, learn, 0.0)


def fold_linear(
    track: Track,
    value: float,
    seen: StepView,
    config: BaselineConfig,
    *,
    sign: float = 1.0,
    survives: bool = False,
    learn: bool = True,
) -> tuple[Track, Reading | None]:
    """Folds a value as it is; sign −1 watches for falls. None for a value that is not finite."""
    if not -math.inf < value < math.inf:
        return track, None
    return _fold(track, sign * value, value, seen, config, survives, learn, sign)


def large(reading: Reading, config: BaselineConfig) -> bool:
    """So far out of a calibrated range that one step is enough."""
    return reading.calibrated and reading.z >= config.large_z and reading.excess >= math.log(config.large_ratio)


def drifted(reading: Reading, config: BaselineConfig) -> bool:
    """Out of range long enough, though no step need be large: the cumulative sum and the smoothed ratio both say so."""
    return reading.calibrated and reading.drift >= config.drift_limit and reading.smooth >= math.log(config.mild_ratio)


def early(reading: Reading, config: BaselineConfig) -> bool:
    """Far beyond the few values known before calibration: enough to warn, not to act on."""
    far = reading.known and not reading.calibrated and reading.z >= EARLY_Z
    return far and reading.excess >= math.log(config.large_ratio)


def out_of_range(reading: Reading, config: BaselineConfig) -> bool:
    """Any of the three."""
    return large(reading, config) or drifted(reading, config) or early(reading, config)


def gain(track: Track, reading: Reading | None) -> float:
    """Smoothed change of a linear series against its baseline, in sigmas; 0 while that is not calibrated.

    `track` is the one the reading was taken against. Sigma is at least 2 % of the centre: rewards come in coarse steps.
    """
    if reading is None or not reading.calibrated:
        return 0.0
    return reading.smooth / max(track.spread, 0.02 * abs(reading.centre), 1e-9)


def band_log(track: Track, config: BaselineConfig) -> tuple[float, float, float] | None:
    """(low, centre, high) in the signal's unit: three sigma either way. None before anything was learned."""
    if not track.spread:
        return None
    reach = GATE * max(track.spread, config.min_spread)
    return math.exp(track.centre - reach), math.exp(track.centre), math.exp(min(track.centre + reach, 700.0))


def band_linear(track: Track, config: BaselineConfig, sign: float = 1.0) -> tuple[float, float, float] | None:
    """The same for linear tracks."""
    if not track.spread:
        return None
    reach = GATE * max(track.spread, config.min_spread)
    centre = sign * track.centre
    return centre - reach, centre, centre + reach


def _fold(
    track: Track,
    x: float,
    value: float,
    seen: StepView,
    config: BaselineConfig,
    survives: bool,
    learn: bool,
    sign: float,
) -> tuple[Track, Reading]:
    """x is the transformed value; a sign of 0 says that it is ln(value). Written flat: rules spend their time here."""
    recent, learned, centre, spread, prior = track.recent, track.learned, track.centre, track.spread, track.prior
    drift, smooth, onset, rejected, anchor = track.drift, track.smooth, track.onset, track.rejected, track.anchor
    attempt, segment, step = seen.attempt, seen.segment, seen.step
    if attempt != track.attempt or step <= track.step:
        if not survives and track.attempt >= 0:
            recent, learned, prior, spread = (), 0, False, 0.0
        drift, smooth, onset = 0.0, 0.0, None
    elif segment != track.segment:
        # Settings changed: the level may move for good reason. What was known serves at twice the spread
        # until enough is relearned.
        prior = learned >= config.calibration_steps or prior
        recent, learned, drift, smooth, onset = (), 0, 0.0, 0.0, None
        if not prior:
            spread = 0.0

    trusted = learned >= config.calibration_steps
    known = prior or learned >= PROVISIONAL
    sigma = spread if spread > config.min_spread else config.min_spread
    if not trusted:
        sigma *= 2.0
    excess = x - centre if spread > 0.0 else 0.0
    z = excess / sigma
    if trusted or prior:
        if z >= config.large_z and drift < 0.25 * config.drift_limit:
            onset = step  # A jump: what little had summed up before it was noise.
        drift += (z if z < config.large_z else config.large_z) - config.drift_slack
        smooth += 0.5 * (excess - smooth)
        if drift <= 0.0:
            drift, onset = 0.0, None
        else:
            if onset is None:
                onset = step
            drift = min(drift, 2.0 * config.drift_limit)
    creep = centre - anchor if trusted and anchor is not None else 0.0
    shown = x if spread <= 0.0 else centre
    shown = sign * shown if sign else math.exp(shown)
    reading = Reading(value, excess, z, drift, smooth, shown, trusted or prior, onset, creep, known)

    # Few values make a wide spread, in which a tenfold jump is no outlier; learned, it would be the baseline.
    off = z >= GATE or (not trusted and known and excess >= math.log(config.large_ratio))
    rejected = rejected + 1 if off and known and learn else 0
    if rejected >= config.calibration_steps and not trusted:
        # What was known first was the exception: zeros before the first update, or settings that moved the level.
        recent, learned, rejected, prior, spread, drift, smooth, onset = (), 0, 0, False, 0.0, 0.0, 0.0, None
    elif learn and (not rejected or rejected >= config.calibration_steps):
        learned += 1
        if trusted:
            reach = GATE * sigma
            x = centre + reach if excess > reach else centre - reach if excess < -reach else x
        renewed = True
        if len(recent) < config.window_values:
            recent = (*recent, x)
        elif learned % config.stride == 0:
            recent = (*recent[1 - config.window_values :], x)
            renewed = learned % (RENEW_EVERY * config.stride) == 0  # one of 48 values moves no median worth a sort
        else:
            renewed = False
        if renewed and (not prior or learned >= config.calibration_steps):
            prior = False
            centre, spread = _centre_and_spread(recent)
            if learned == config.calibration_steps:
                anchor = centre
    after = Track(
        recent, learned, centre, spread, prior, attempt, segment, step, drift, smooth, onset, rejected, anchor
    )
    return after, reading


def _centre_and_spread(values: tuple[float, ...]) -> tuple[float, float]:
    """Median, and sigma from the quartiles or the upper decile, whichever is wider (heavy upper tails are common)."""
    ordered = sorted(values)
    n = len(ordered)
    centre = 0.5 * (ordered[(n - 1) // 2] + ordered[n // 2])
    quarter = (n - 1) // 4
    spread = (ordered[n - 1 - quarter] - ordered[quarter]) / IQR_TO_SIGMA
    tail = (ordered[n - 1 - (n - 1) // 10] - centre) / TAIL_TO_SIGMA
    spread = tail if tail > spread else spread
    return centre, spread * (1.0 + 2.0 / n) or 1e-12
