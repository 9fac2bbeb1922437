"""`outlier_sequences`: some sequences disagree by far more than the median one, while means look calm.

Faults that depend on the prompt (a special token, a routing defect, a hybrid layer) hit 1 to 20 % of the sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from pydantic import Field

from foreshock_service.rules.baseline import FRESH, BaselineConfig, Reading, Track, band_log, fold_log, out_of_range
from foreshock_service.rules.interface import QUIET, UNKNOWN, Evidence, Observation, RuleConfig, StepView, Verdict

PAIRS: Final = ("mismatch", "policy")
NAMES: Final = tuple((pair, f"{pair}.seq_outlier", f"{pair}.seq_abs_max") for pair in PAIRS)
LOG_FLOOR = 1e-3


class Config(BaselineConfig):
    """`seq_outlier` is the share of sequences above ten times the median one."""

    hold_steps: int = Field(2, ge=1, description="Consecutive steps out of range before it opens.")
    warn_share: float = Field(
        0.05, gt=0, le=1, description="Share of outlier sequences below which nothing is ever found."
    )
    large_ratio: float = Field(
        4.0, gt=1, description="Ratio to the usual share at which a step counts, if also large_z."
    )
    negligible: float = Field(
        0.05, ge=0, description="Largest per-sequence mean |a - b| (nats) below which nothing is found."
    )


class State(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The usual share of outliers, per pair."""

    mismatch: Track = FRESH
    policy: Track = FRESH


class OutlierSequences:
    """Warns: the worst tokens of the step are the evidence to look at."""

    name = "outlier_sequences"
    title = "Outlier sequences"
    config: type[RuleConfig] = Config
    state: type[State] = State
    reads: tuple[str, ...] = tuple(f"{pair}.{s}" for pair in PAIRS for s in ("seq_outlier", "seq_abs_max"))
    wants_ticks = False

    def step(self, state: State, seen: Observation, config: Config, now: float) -> tuple[State, Verdict]:
        """Mismatch, then policy."""
        if not isinstance(seen, StepView):
            return state, UNKNOWN
        tracks, found, told = [state.mismatch, state.policy], QUIET, False
        for i, (pair, outlier, farthest) in enumerate(NAMES):
            share = seen.values.get(outlier)
            if share is None:
                continue
            tracks[i], reading = fold_log(tracks[i], share, seen, config, floor=LOG_FLOOR)
            if reading is None:
                continue
            told = True
            largest = seen.values.get(farthest, config.negligible)
            if not found.firing and share >= config.warn_share and largest >= config.negligible:
                found = _verdict(pair, reading, largest, seen) if out_of_range(reading, config) else found
        return State(tracks[0], tracks[1]), found if told else UNKNOWN

    def bands(self, state: State, config: Config) -> Mapping[str, tuple[float, float, float]]:
        """The usual shares."""
        bands = ((NAMES[0][1], band_log(state.mismatch, config)), (NAMES[1][1], band_log(state.policy, config)))
        return {signal: band for signal, band in bands if band}


def _verdict(pair: str, reading: Reading, largest: float, seen: StepView) -> Verdict:
    message = f"{reading.value:.0%} of the sequences disagree on `{pair}` ten times more than the median one."
    evidence = [
        Evidence(signal=f"{pair}.seq_outlier", value=reading.value, expected=reading.centre, sentence=message),
        Evidence(signal=f"{pair}.seq_abs_max", value=largest, sentence="The worst sequence's mean |a - b|."),
    ]
    worst = seen.evidence.get(pair)
    if worst:
        tokens = ", ".join(str(token.get("token")) for token in worst[:4])
        evidence.append(
            Evidence(
                signal=f"{pair}.abs_max", value=seen.values.get(f"{pair}.abs_max"), sentence=f"Worst tokens: {tokens}."
            )
        )
    return Verdict(firing=True, onset_step=reading.onset, message=message, evidence=evidence)


RULE = OutlierSequences()
