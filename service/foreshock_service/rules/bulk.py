"""The bulk of the tokens: the median |difference| of a pair, followed closely, so that one step out of line tells.

Means of |difference| and KLs are carried by a few surprising tokens and jump tenfold on healthy steps. The median of
thousands of tokens does not: its own sampling error is a few per cent, and it moves where every token moves, as it does
with weights of another version, another precision or a truncated sampler. It also falls by its nature as a policy grows
certain, so it is held against its last level, not against a range of long ago.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from foreshock_service.rules.baseline import GATE, BaselineConfig
from foreshock_service.rules.interface import StepView

FLOOR: Final = 1e-5
"""Nats below which a median is rounding of float32 and counts as this."""
LEVEL_RATE: Final = 0.25
NOISE_RATE: Final = 0.1
SURPRISE_RATE: Final = 0.125
STEP_TO_SIGMA: Final = 1.128
"""The mean |difference| of two Gaussian values is 1.128 sigma. Not the spread: a level that falls is no noise."""
SURPRISE_POWER: Final = 2.0
"""Rounding grows with surprise: across a run that sharpens, healthy medians fall like its square."""

ONE_SIDED = 0.8
"""|k1| over mean |difference| from which nearly all tokens are shifted one way."""
ONE_SIDED_LEAST, ONE_SIDED_MOST = 1e-3, 0.1
"""Nats from which that is said of, and from which it is as critical as any other mismatch."""
FLAT = 0.25
"""k3 over |k1| below which that shift is the same for all: a sampler that renormalises what it kept."""
TRUNCATED = (
    "All tokens are shifted one way: the engine samples from a truncated, renormalised distribution (top-k, top-p, "
    "min-p) and the trainer scores the whole one."
)


class Bulk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """ln of the median's level and last value, its noise (sigma), and ln of the mean surprise that went with it."""

    level: float = 0.0
    last: float = 0.0
    noise: float = 0.0
    surprise: float = 0.0
    count: int = 0
    rejected: int = 0
    """Values in a row beyond the gate; as many as a calibration are the new level."""
    segment: int = -1


class Moved(msgspec.Struct, frozen=True, gc=False):
    """How far the median is beyond its level."""

    value: float
    usual: float
    z: float
    excess: float
    """ln of value over level, less what a rise of surprise explains."""


NONE: Final = Bulk()


def fold_bulk(
    bulk: Bulk, value: float, surprise: float, seen: StepView, config: BaselineConfig, *, learn: bool
) -> tuple[Bulk, Moved | None]:
    """Folds a median |difference| and the mean surprise (−b, nats); what it was held against, None before calibration.

    A change of settings begins anew; a restart does not, for log-probs of a pair survive it. Values that are not finite
    leave all as it was; a surprise that is not positive explains nothing.
    """
    if not 0.0 <= value < math.inf:
        return bulk, None
    if seen.segment != bulk.segment:
        bulk = Bulk(segment=seen.segment)
    x = math.log(max(value, FLOOR))
    known = bulk.count > 0
    u = math.log(surprise) if 0.0 < surprise < math.inf else bulk.surprise
    level, last, noise, usual = (bulk.level, bulk.last, bulk.noise, bulk.surprise) if known else (x, x, 0.0, u)
    sigma = max(noise, config.min_spread)
    off = x - level
    z = off / sigma
    moved = None
    if bulk.count >= config.calibration_steps:
        moved = Moved(value, math.exp(level), z, off - SURPRISE_POWER * max(0.0, u - usual))
    if not learn:
        return bulk, moved
    if z >= GATE and bulk.count >= config.calibration_steps:
        if bulk.rejected + 1 < config.calibration_steps:
            return msgspec.structs.replace(bulk, rejected=bulk.rejected + 1), moved
        return Bulk(x, x, noise, u, 1, 0, bulk.segment), moved
    share = max(LEVEL_RATE, 1.0 / (bulk.count + 1))
    level += share * off
    noise += max(NOISE_RATE, 1.0 / (bulk.count + 1)) * (abs(x - last) / STEP_TO_SIGMA - noise)
    usual += SURPRISE_RATE * (u - usual)
    return Bulk(level, x, noise, usual, bulk.count + 1, 0, bulk.segment), moved


def band_bulk(bulk: Bulk, config: BaselineConfig) -> tuple[float, float, float] | None:
    """(low, level, high), nats: the gate either way. None before calibration."""
    if bulk.count < config.calibration_steps:
        return None
    reach = GATE * max(bulk.noise, config.min_spread)
    return math.exp(bulk.level - reach), math.exp(bulk.level), math.exp(bulk.level + reach)


def one_sided(seen: StepView) -> bool:
    """Nearly all tokens are shifted one way by nearly the same."""
    k1, mean = abs(seen.values.get("mismatch.kl_k1", 0.0)), seen.values.get("mismatch.abs_mean", math.inf)
    return k1 >= ONE_SIDED * mean and k1 >= ONE_SIDED_LEAST and seen.values.get("mismatch.kl_k3", math.inf) <= FLAT * k1
