"""What a signature is read from: one pair's statistics over a window of steps, medians and trend."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Final

import msgspec

GROWTH_STEPS: Final = 6
"""Steps without which growth cannot be told."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One pair over a window, oldest step first. Every reading is None where its numbers are missing or undefined."""

    pair: str
    window: Sequence[Mapping[str, float]]
    bands: Mapping[str, tuple[float, float, float]] = {}
    settings: Mapping[str, Any] = {}
    notices: Sequence[Mapping[str, Any]] = ()
    worst_tokens: Sequence[Mapping[str, Any]] = ()

    def of(self, statistic: str) -> float | None:
        """Median over the window of `<pair>.<statistic>`, finite values only."""
        return self.scalar(f"{self.pair}.{statistic}")

    def scalar(self, signal: str) -> float | None:
        """Median over the window of any signal, finite values only."""
        values = [v[signal] for v in self.window if signal in v and math.isfinite(v[signal])]
        return median(values) if values else None

    def share(self, part: str, whole: str) -> float | None:
        """|part| / whole of two statistics' medians."""
        a, b = self.of(part), self.of(whole)
        return abs(a) / b if a is not None and b else None

    def explained(self) -> float | None:
        """R² of δ on b, from slope and Pearson alone: near 1 where δ is a multiple of b, as with a temperature.

        With s the slope of a on b and r their correlation: (s − 1)² / (s²/r² + 1 − 2s).
        """
        s, r = self.of("slope"), self.of("logp_pearson")
        if s is None or r is None or abs(r) < 1e-3:
            return None
        unexplained = s * s / (r * r) + 1 - 2 * s
        return min(1.0, (s - 1) ** 2 / unexplained) if unexplained > 1e-12 else None

    def tail(self) -> float | None:
        """Median over 99 % quantile of |δ|: .005 for bf16 rounding, .1 to .2 for weights that differ."""
        return self.share("abs_q50", "abs_q99")

    def growth(self) -> float | None:
        """Last third over first third of mean |δ|: a frozen side grows, a fixed gap does not. Needs six steps."""
        name = f"{self.pair}.abs_mean"
        values = [v[name] for v in self.window if name in v and math.isfinite(v[name])]
        third = len(values) // 3
        if len(values) < GROWTH_STEPS:
            return None
        first = median(values[:third])
        return median(values[-third:]) / first if first > 0 else None

    def early(self) -> float | None:
        """Mean |δ| in the first relative-position decile over that in the last."""
        first, last = self.of("decile_abs_mean.0"), self.of("decile_abs_mean.9")
        return first / last if first is not None and last else None

    def one_token(self) -> float | None:
        """Share of the 16 worst tokens that are one and the same token id."""
        tokens = [t["token"] for t in self.worst_tokens if t.get("token") is not None]
        return Counter(tokens).most_common(1)[0][1] / len(tokens) if len(tokens) >= 4 else None

    def in_band(self) -> bool | None:
        """True where the pair's KL is inside the run's own baseline; None without one."""
        for statistic in ("kl_k2", "kl_k3", "abs_mean"):
            band, value = self.bands.get(f"{self.pair}.{statistic}"), self.of(statistic)
            if band is not None and value is not None:
                return value <= band[2]
        return None

    def bulk_in_band(self) -> bool | None:
        """True where the median token's |δ| is inside the run's own range; None without one."""
        name = f"{self.pair}.abs_q50"
        band, value = self.bands.get(name) or self.bands.get(name.replace("_current.", ".")), self.of("abs_q50")
        return None if band is None or value is None else value <= band[2]

    def setting(self, *names: str) -> Any:
        """The first of these settings that is there, also inside `engine`."""
        engine = self.settings.get("engine")
        nested: Mapping[str, Any] = engine if isinstance(engine, Mapping) else {}
        for name in names:
            if self.settings.get(name) is not None:
                return self.settings[name]
            if nested.get(name) is not None:
                return nested[name]
        return None

    def noticed(self, kind: str, **wanted: Any) -> bool:
        """True where a notice of that kind carries these data."""
        for notice in self.notices:
            data = notice.get("data") or {}
            if notice.get("kind") == kind and all(data.get(key) == value for key, value in wanted.items()):
                return True
        return False
