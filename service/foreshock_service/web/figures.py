"""Numbers as people read them, and curves as inline SVG: what the page shows before and without any script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from markupsafe import Markup, escape

NEVER: Final = "–"
PAD: Final = 2.0


def number(value: float | str | None) -> str:
    """Four significant digits; "–" for none, NaN and infinities by name."""
    if value is None:
        return NEVER
    if isinstance(value, str):
        return {"nan": "NaN", "inf": "∞", "-inf": "−∞"}.get(value, value)
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    size = abs(value)
    if value == int(value) and size < 1e6:
        return f"{int(value)}".replace("-", "−")
    text = f"{value:.4g}" if 1e-3 <= size < 1e6 else f"{value:.2e}".replace("e-0", "e-").replace("e+0", "e")
    return text.replace("-", "−") if not text.startswith("-") else "−" + text[1:].replace("-", "−")


def span(seconds: float) -> str:
    """A time span in its largest unit: `12 s`, `4 min`, `3 h`, `2 d`."""
    seconds = max(0.0, seconds)
    for size, unit in ((86_400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} s"


def heights(values: Sequence[float | None], *, log: bool) -> list[float | None]:
    """Each value's place between 0 (lowest) and 1; None where there is no finite number.

    On a logarithmic scale a zero lies at the bottom, and less than a decade is not blown up to the full height: noise
    of a few per cent should look like it.
    """
    finite = [v for v in values if v is not None and math.isfinite(v)]
    if not finite:
        return [None] * len(values)
    if log:
        positive = [v for v in finite if v > 0]
        floor = min(positive) if positive else 1.0
        finite = [math.log10(max(v, floor)) for v in finite]
        values = [None if v is None or not math.isfinite(v) else math.log10(max(v, floor)) for v in values]
    low, high = min(finite), max(finite)
    least = 1.0 if log else 0.02 * max(abs(low), abs(high), 1e-12)
    if high - low < least:
        middle = (low + high) / 2
        low, high = middle - least / 2, middle + least / 2
    return [None if v is None or not math.isfinite(v) else (v - low) / (high - low) for v in values]


def curve(values: Sequence[float | None], label: str, *, log: bool, width: int = 96, height: int = 24) -> Markup:
    """An SVG of the values from left to right, named `label` for whoever does not see it.

    A gap is a gap; NaN and infinities are ticks at the top, in the colour of trouble. Some 50 µs for 60 values.
    """
    # Half pixels as whole numbers: a page has a thousand of these.
    width, height = 2 * width, 2 * height
    across = (width - 4 * PAD) / max(len(values) - 1, 1)
    drawn, broken = [], []
    pen, end = "M", ""
    for i, place in enumerate(heights(values, log=log)):
        x = round(2 * PAD + across * i)
        if place is None:
            pen = "M"
            if values[i] is not None:
                broken.append(f'<path class="broken" d="M{x} 2v12"/>')
            continue
        y = round(2 * PAD + (height - 4 * PAD) * (1 - place))
        drawn.append(f"{pen}{x} {y}")
        pen, end = "L", f'<circle cx="{x}" cy="{y}" r="4"/>'
    line = f'<path class="line" d="{"".join(drawn)}"/>' if drawn else ""
    box = f'viewBox="0 0 {width} {height}" preserveAspectRatio="none"'
    name = escape(label)
    return Markup(f'<svg class="curve" role="img" aria-label="{name}" {box}>{line}{"".join(broken)}{end}</svg>')  # nosec B704


def told(signal: str, values: Sequence[float | None]) -> str:
    """A curve in words."""
    there = [v for v in values if v is not None]
    if not there:
        return f"{signal}: nothing in the last {len(values)} steps"
    finite = [v for v in there if math.isfinite(v)]
    words = f"{signal}, last {len(values)} steps: now {number(there[-1])}"
    if finite:
        words += f", lowest {number(min(finite))}, highest {number(max(finite))}"
    odd = len(there) - len(finite)
    return words + (f", {odd} not finite" if odd else "")
