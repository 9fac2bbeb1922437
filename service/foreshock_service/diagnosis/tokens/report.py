"""A dump → its diagnosis: its steps, their baseline, the service's own diagnosis of them, the tokens' evidence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from foreshock.frames.plain import plain
from foreshock_service.diagnosis.signature import Diagnosis, diagnose
from foreshock_service.diagnosis.tokens import calm as calm_steps
from foreshock_service.diagnosis.tokens import inspect as inspection
from foreshock_service.diagnosis.tokens import readers
from foreshock_service.diagnosis.tokens.batches import DumpError, StepKey, Unit
from foreshock_service.diagnosis.tokens.causes import HARMLESS, Evidence, causes, gather
from foreshock_service.diagnosis.tokens.inspect import Sums
from foreshock_service.diagnosis.tokens.measure import Measured, StepMeasure, measure, merged
from foreshock_service.diagnosis.tokens.rows import Fit, fit

WINDOW: Final = 16
"""Steps from the onset on that are looked at: as many as the service takes."""
WORST: Final = 10
ORDER: Final = ("policy", "mismatch", "mismatch_current", "update", "reference")

Run = Callable[[Callable[[Unit], Any], Sequence[Unit]], list[Any]]
"""Calls a function of a unit on each, in order; here or on a cluster."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a profile."""

    what: str
    tokens: int
    abs_mean: float


class DumpDiagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The report; `msgspec.to_builtins` makes JSON of it. `verdict` is healthy or ill."""

    verdict: str
    sentence: str
    run: str
    launch: str
    generation: int
    other_attempts: int
    files: int
    tokens: int
    steps: list[int]
    onset: int | None
    window: list[int]
    pair: str | None
    nonfinite: dict[str, float]
    bands: dict[str, tuple[float, float, float]]
    values: list[dict[str, float]]
    """Of each step of the window."""
    diagnosis: Diagnosis
    evidence: Evidence | None
    positions: list[Place]
    lengths: list[Place]
    token_ids: list[Place]
    ranks: list[Place]
    lags: list[Place]


def here(call: Callable[[Unit], Any], units: Sequence[Unit]) -> list[Any]:
    """In this process, one unit after the other."""
    return [call(unit) for unit in units]


def measure_unit(unit: Unit) -> Measured:
    """The first pass over a unit."""
    return measure(readers.read(unit))


def diagnose_dump(
    named: Sequence[str], *, healthy: Sequence[str] = (), since: int | None = None, run: Run = here
) -> DumpDiagnosis:
    """Of the files, folders or globs `named`. Raises DumpError.

    `healthy` names dumps of healthy steps, whose bands then hold; `since` the first ill step. Two passes over the
    files; memory holds a row group and each step's sums, however large the dump.
    """
    paths = readers.sources(named)
    units = readers.units(paths)
    steps = merged(run(measure_unit, units))
    if not steps:
        raise DumpError(f"{', '.join(named)}: no tokens")
    known, others = _attempt(steps)
    values = {key: known[key].values() for key in known}
    reference = _values_of(healthy, run) if healthy else []
    keys = list(known)
    first = None if since is None else next((i for i, key in enumerate(keys) if key.step >= since), None)
    if since is not None and first is None:
        raise DumpError(f"no step from {since} on; the dump holds {keys[0].step} to {keys[-1].step}")
    found = calm_steps.look([values[key] for key in keys], reference, first)
    window = keys[found.onset or 0 :][:WINDOW] if found.onset is not None else keys[-WINDOW:]
    about = next(batch.about for unit in units for batch in readers.read(unit))
    arguments = _arguments([values[key] for key in window], known[window[-1]], found.bands, about.config)
    pair = _pair(diagnose(**arguments), known[window[-1]])
    evidence, sums, ranks = None, Sums(), {}
    if pair is not None:
        sums = inspection.merged(run(_Inspect(pair, frozenset(window)), units))
        ranks = _ranks([known[key] for key in window], pair)
        evidence = gather(sums, ranks, _fit(sums))
    said = diagnose(**arguments, causes=causes(evidence)) if evidence is not None else diagnose(**arguments)
    nonfinite = _nonfinite([values[key] for key in window])
    ill = said.edge is not None or bool(nonfinite) or any(c.name not in HARMLESS for c in said.causes)
    return DumpDiagnosis(
        verdict="ill" if ill else "healthy",
        sentence=said.sentence,
        run=about.run,
        launch=keys[0].launch,
        generation=keys[0].generation,
        other_attempts=others,
        files=len(paths),
        tokens=sum(step.tokens for step in known.values()),
        steps=[key.step for key in keys],
        onset=keys[found.onset].step if found.onset is not None else None,
        window=[key.step for key in window],
        pair=pair,
        nonfinite=nonfinite,
        bands=found.bands,
        values=[values[key] for key in window],
        diagnosis=said,
        evidence=evidence,
        positions=_bins(sums.positions, "position"),
        lengths=_bins(sums.lengths, "length"),
        token_ids=_tokens(sums),
        ranks=_places(ranks),
        lags=_places({f"lag {n}": s.tolist() for n, s in sums.lags.items() if n >= 0}),
    )


class _Inspect:
    """The second pass over a unit; a class, so that it travels to a cluster."""

    def __init__(self, pair: str, steps: frozenset[StepKey]) -> None:
        self._pair, self._steps = pair, steps

    def __call__(self, unit: Unit) -> Sums:
        return inspection.inspect(readers.read(unit), self._pair, self._steps)


def _attempt(steps: Measured) -> tuple[dict[StepKey, StepMeasure], int]:
    """The steps of the attempt with the most of them (the later one on a tie), in order; how many others there are."""
    attempts: dict[tuple[str, int], list[StepKey]] = {}
    for key in steps:
        attempts.setdefault((key.launch, key.generation), []).append(key)
    chosen = max(attempts.values(), key=lambda keys: (len(keys), keys[0].generation))
    return {key: steps[key] for key in sorted(chosen)}, len(attempts) - 1


def _values_of(named: Sequence[str], run: Run) -> list[dict[str, float]]:
    steps = merged(run(measure_unit, readers.units(readers.sources(named))))
    return [steps[key].values() for key in sorted(steps)]


def _arguments(
    window: Sequence[dict[str, float]], last: StepMeasure, bands: calm_steps.Bands, config: dict[str, Any]
) -> dict[str, Any]:
    evidence = {
        pair: [
            {"seq": t.sequence, "position": t.position, "token": t.token if t.token >= 0 else None, "a": t.a, "b": t.b}
            for t in tokens
        ]
        for pair, tokens in last.evidence().items()
    }
    return {"window": window, "bands": bands, "missing": last.missing, "settings": plain(config), "evidence": evidence}


def _pair(said: Diagnosis, last: StepMeasure) -> str | None:
    """The pair whose tokens are looked at: where the fault shows, else the first that is there."""
    order = [c.pair for c in said.causes] + [r.pair for r in said.location.readings if r.level == "up"]
    return next((pair for pair in (*order, *ORDER) if pair in last.records), None)


def _ranks(window: Sequence[StepMeasure], pair: str) -> dict[str, list[float]]:
    total: dict[str, list[float]] = {}
    for step in window:
        for rank, sums in step.ranks.get(pair, {}).items():
            total[rank] = [x + y for x, y in zip(total.get(rank, [0.0, 0.0, 0.0]), sums, strict=True)]
    return total


def _fit(sums: Sums) -> Fit:
    """Each step of each rank beside the step before it on the same rank."""
    by_rank: dict[str, list[StepKey]] = {}
    for key, rank in sorted(sums.rows):
        by_rank.setdefault(rank, []).append(key)
    pairs = []
    for rank, keys in by_rank.items():
        for index, key in enumerate(keys):
            follows = index > 0 and keys[index - 1].step == key.step - 1
            pairs.append((sums.rows[key, rank], sums.rows[keys[index - 1], rank] if follows else None))
    return fit(pairs)


def _nonfinite(window: Sequence[dict[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for values in window:
        for name, value in values.items():
            if name.endswith((".nonfinite", ".sentinels")) and value:
                total[name] = total.get(name, 0.0) + value
    return total


def _bins(table: Any, what: str) -> list[Place]:
    lines = []
    for index, (tokens, absolute, _) in enumerate(np.asarray(table)):
        if tokens:
            low, high = (0, 0) if index == 0 else (1 << (index - 1), (1 << index) - 1)
            name = f"{what} {low}" if low == high else f"{what} {low}–{high}"
            lines.append(Place(what=name, tokens=int(tokens), abs_mean=float(absolute / tokens)))
    return lines


def _tokens(sums: Sums) -> list[Place]:
    """The token ids that carry most of Σδ²."""
    order = np.argsort(-sums.token_sums[:, 2], kind="stable")[:WORST]
    return [
        Place(
            what=f"token {int(sums.token_ids[i])}", tokens=int(sums.token_sums[i, 0]),
            abs_mean=float(sums.token_sums[i, 1] / sums.token_sums[i, 0]),
        )
        for i in order
    ]  # fmt: skip


def _places(table: Mapping[str, Sequence[float]]) -> list[Place]:
    return [
        Place(what=name, tokens=int(s[0]), abs_mean=float(s[1] / s[0])) for name, s in sorted(table.items()) if s[0]
    ]
