"""Ranks the causes of a disagreement by their signature, with the numbers for and against; says so when nothing fits.

Pure functions over `values` mappings: `foreshock check`, the API's diagnosis and the incidents share them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from foreshock_service.diagnosis.causes import CAUSES, TRAINER, Cause, Reading
from foreshock_service.diagnosis.edges import Location, locate, settled
from foreshock_service.diagnosis.figures import GROWTH_STEPS, Figures
from foreshock_service.rules.interface import Edge

MIN_SCORE: Final = 0.5
"""A cause below this share of its known weight is not named."""
MIN_KNOWN: Final = 0.4
"""Share of a cause's weight that must be known at all before it is named."""
CLOSE: Final = 0.15
CLOSE_EARLY: Final = 0.3
"""Scores nearer than this do not separate two causes; early: before there are enough steps to tell growth."""
CALM: Final = 3
"""Steps in a row inside the range that end an excursion, looking back."""
SURE_KNOWN: Final = 0.6
"""Where less of the best cause's weight is known, causes of which too little is known to rank them stay possible."""


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """One number that speaks for or against a cause."""

    sentence: str
    value: float | None
    weight: float


class RankedCause(msgspec.Struct, frozen=True, kw_only=True):
    """`score` in [0, 1]: the weight that speaks for it over the weight that is known, shrunk where little is known."""

    name: str
    title: str
    score: float
    pair: str
    known: float = 1.0
    """Share of the cause's weight that is known."""
    family: str | None = None
    speaks_for: tuple[Fact, ...] = ()
    speaks_against: tuple[Fact, ...] = ()
    decided_by: tuple[str, ...] = ()


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """Causes, best first; empty where nothing fits. `msgspec.to_builtins` makes JSON of it."""

    location: Location
    causes: tuple[RankedCause, ...]
    abstains: bool
    sentence: str
    undecided_between: tuple[str, ...] = ()
    """Causes that these statistics do not separate; what decides is in their `decided_by`."""

    @property
    def edge(self) -> Edge | None:
        """The pass at fault."""
        return self.location.edge

    def names(self, cause_or_family: str) -> bool:
        """True where the best cause, or one not separated from it, is of that name or family."""
        leading = [c for c in self.causes if c.name in self.undecided_between] or list(self.causes[:1])
        return any(cause_or_family in (c.name, c.family) for c in leading)


def diagnose(
    window: Sequence[Mapping[str, float]],
    *,
    bands: Mapping[str, tuple[float, float, float]] | None = None,
    missing: Mapping[str, str] | None = None,
    settings: Mapping[str, Any] | None = None,
    notices: Sequence[Mapping[str, Any]] = (),
    evidence: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    causes: Sequence[Cause] = CAUSES,
) -> Diagnosis:
    """Of the steps in `window` (since the onset, oldest first; its last steps locate the fault).

    `causes` are those that are weighed; a token dump brings further readings and causes of its own.

    Raises ValueError on an empty window. Costs about a millisecond.
    """
    if not window:
        raise ValueError("a diagnosis needs at least one step")
    bands = bands or {}
    location = locate(settled(window), bands, missing)
    window = _since_onset(window, location, bands)
    ranked, possible, alike = list[RankedCause](), list[str](), dict[str, tuple[str, ...]]()
    pair = _pair_for(location, window)
    for cause in causes:
        if pair is None or not _can_sit(cause, location):
            continue
        figures = Figures(
            pair=pair, window=window, bands=bands, settings=settings or {}, notices=notices,
            worst_tokens=(evidence or {}).get(pair, ()),
        )  # fmt: skip
        readings = cause.read(figures)
        if any(r.veto and r.holds is False for r in readings):
            continue
        found = _weigh(cause, readings, pair)
        if found.known < MIN_KNOWN:
            possible.append(found.name)
        elif found.score >= MIN_SCORE:
            ranked.append(found)
            named = cause.lookalikes(figures)
            alike[found.name] = tuple(c.name for c in causes if c.name in named and _can_sit(c, location))
    ranked.sort(key=lambda c: (-c.score, c.name))
    close = CLOSE if len(window) >= GROWTH_STEPS else CLOSE_EARLY
    between = _not_separated(ranked, possible, alike[ranked[0].name] if ranked else (), close)
    return Diagnosis(
        location=location,
        causes=tuple(ranked),
        abstains=not ranked,
        sentence=_sentence(location, ranked, between),
        undecided_between=between,
    )


def _since_onset(
    window: Sequence[Mapping[str, float]], location: Location, bands: Mapping[str, tuple[float, float, float]]
) -> Sequence[Mapping[str, float]]:
    """The steps since what is up left its range: medians over healthy steps as well describe neither.

    Back from the last step, to before CALM steps in a row inside every range. All of them where nothing is up.
    """
    highs = {r.signal: r.high for r in location.readings if r.level == "up" and r.signal and r.high is not None}
    if not highs:
        highs = {s: b[2] for s, b in bands.items() if s.endswith(".abs_q50") and window[-1].get(s, 0.0) > b[2]}
    calm, begin = 0, len(window) - 1
    for i in range(len(window) - 1, -1, -1):
        if any(not window[i].get(signal, math.inf) <= high for signal, high in highs.items()):
            calm, begin = 0, i
        elif (calm := calm + 1) == CALM:
            break
    return window[begin:] if highs else window


def _can_sit(cause: Cause, location: Location) -> bool:
    """The cause can be in the pass at fault. What only an engine does leaves the trainer's two passes at one."""
    if location.edge == "undecided" and location.level("policy") == "up" and not cause.edges & TRAINER - {"undecided"}:
        return False
    return location.edge in cause.edges


def _not_separated(
    ranked: Sequence[RankedCause], possible: Sequence[str], alike: Sequence[str], close: float
) -> tuple[str, ...]:
    """The leading causes, where they are more than one; `alike` would show the same figures as the first."""
    if not ranked:
        return ()
    between = [c.name for c in ranked if ranked[0].score - c.score < close]
    if ranked[0].known < SURE_KNOWN:
        between += possible
    between += [name for name in alike if name not in between]
    return tuple(between) if len(between) > 1 else ()


def _pair_for(location: Location, window: Sequence[Mapping[str, float]]) -> str | None:
    """The pair in which the fault shows: `policy` for the trainer's passes, else the engine's edge."""
    order = ("mismatch", "mismatch_current", "policy")
    if location.edge in ("training_pass", "scoring_pass") or (
        location.edge == "undecided" and location.level("policy") == "up"
    ):
        order = ("policy", "mismatch_current", "mismatch")
    present = [pair for pair in order if any(s.startswith(f"{pair}.") for s in window[-1])]
    return present[0] if present else None


def _weigh(cause: Cause, readings: Sequence[Reading], pair: str) -> RankedCause:
    known = [r for r in readings if r.holds is not None]
    total, weight = sum(r.weight for r in readings), sum(r.weight for r in known)
    share = weight / total if total else 0.0
    score = sum(r.weight for r in known if r.holds) / weight * (0.7 + 0.3 * share) if weight else 0.0
    return RankedCause(
        name=cause.name,
        title=cause.title,
        score=round(score, 3),
        pair=pair,
        known=round(share, 3),
        family=cause.family,
        speaks_for=tuple(_fact(r) for r in known if r.holds),
        speaks_against=tuple(_fact(r) for r in known if not r.holds),
        decided_by=cause.decided_by,
    )


def _fact(reading: Reading) -> Fact:
    return Fact(sentence=reading.sentence, value=reading.value, weight=reading.weight)


def _decisive(between: Sequence[str]) -> str:
    """The first experiment of each of the two that lead."""
    known = {cause.name: cause.decided_by for cause in CAUSES}
    named = [known[name][0] for name in between[:2] if known.get(name)]
    return "; ".join(dict.fromkeys(named)) or "a probe"


def _sentence(location: Location, ranked: Sequence[RankedCause], between: Sequence[str]) -> str:
    if not ranked:
        if location.edge is None:
            return f"Nothing to explain. {location.sentence}"
        return f"No known signature fits; a probe would tell more. {location.sentence}"
    best = ranked[0]
    if between:
        names = " or ".join(between)
        decides = _decisive(between)
        return f"{names}: these statistics do not separate them; what decides: {decides}. {location.sentence}"
    return f"{best.title} ({best.name}, {best.score:.2f}). {location.sentence}"
