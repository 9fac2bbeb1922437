"""Asynchronous training: tokens are split by version lag, and each lag has its own level."""

from __future__ import annotations

from foreshock_service.rules.baseline import FRESH, BaselineConfig, Reading, Track, fold_log
from foreshock_service.rules.interface import Evidence, StepView, Verdict

PRIMARY = "mismatch.kl_k3"
LAGS = tuple(f"mismatch@lag{n}.kl_k3" for n in range(4))
"""Lags with a baseline of their own; older tokens count in the merged figure only."""
LOG_FLOOR = 1e-9


def folded_lags(
    tracks: tuple[Track, ...], seen: StepView, config: BaselineConfig, learn: bool
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


def mixed(reading: Reading, seen: StepView) -> Verdict:
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
