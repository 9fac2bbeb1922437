"""Rules that can't be installed, restated from their documentation, and a yardstick: rows in, alarm steps out.

Each takes (step, values) rows under the catalogue's names and a choice of signals, and yields the steps at which it
speaks. Absent and non-finite values are passed over, as these rules know nothing of them.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

Rows = Iterable[tuple[int, Mapping[str, float]]]


def z_score(rows: Rows, signals: tuple[str, ...], window: int = 30, limit: float = 3.0) -> Iterator[int]:
    """W&B's z-score automation as documented: |x − mean| > 3σ of the last 30 values, any direction, one per signal.

    Emulated: speaks when the condition begins to hold, not again while it lasts.
    """
    past = {signal: deque[float](maxlen=window) for signal in signals}
    holding = dict.fromkeys(signals, False)
    for step, values in rows:
        for signal in signals:
            value, kept = values.get(signal, math.nan), past[signal]
            if not math.isfinite(value):
                continue
            if len(kept) == window:
                holds = abs(value - statistics.fmean(kept)) > limit * max(statistics.pstdev(kept), 1e-12)
                if holds and not holding[signal]:
                    yield step
                holding[signal] = holds
            kept.append(value)


def kill_loss_spike(
    rows: Rows, window: int = 100, times: float = 2.0, patience: int = 4, cap: float = 10
) -> Iterator[int]:
    """llm-foundry's KillLossSpike with its defaults: a loss twice its rolling mean more than `patience` times running.

    Or, after two windows, half the window is above `cap`. Speaks once, as it would end the run. Emulated from its
    documentation.
    """
    past, outliers, seen = deque[float](maxlen=window), 0, 0
    for step, values in rows:
        loss = values.get("loss", math.nan)
        if not math.isfinite(loss):
            continue
        seen += 1
        if len(past) == window:
            outliers = outliers + 1 if loss >= times * statistics.fmean(past) else 0
            high = seen > 2 * window and sum(x > cap for x in past) >= window / 2
            if outliers > patience or high:
                yield step
                return
        past.append(loss)


def yardstick(
    rows: Rows, signals: tuple[str, ...], *, falls: bool = False, warm: int = 20, times: float = 5.0, need: int = 3
) -> Iterator[int]:
    """Eight lines to hold every tool against: log x more than 5 robust deviations above its median, thrice in a row.

    `falls`: or below it. Suspect values are not learned from. Written with the common stream in sight, so no fair
    contestant on it.
    """
    past = {signal: deque[float](maxlen=64) for signal in signals}
    streak = dict.fromkeys(signals, 0)
    for step, values in rows:
        for signal in signals:
            value, kept = values.get(signal, math.nan), past[signal]
            if not (math.isfinite(value) and value > 0):
                continue
            height = math.log(value)
            if len(kept) >= warm:
                middle = statistics.median(kept)
                spread = 1.4826 * statistics.median(abs(x - middle) for x in kept) + 1e-3
                away = abs(height - middle) if falls else height - middle
                streak[signal] = streak[signal] + 1 if away > times * spread else 0
                if streak[signal] == need:
                    yield step
            if not streak[signal]:
                kept.append(height)
