"""What the rules say about a recorded run: its incidents, as `foreshock` would have opened them live."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from foreshock_service.rules.engine import RuleEngine
from foreshock_service.rules.interface import Outcome, StepView
from foreshock_service.rules.pack import default_pack

Rows = Iterable[tuple[int, Mapping[str, float]]]


@dataclass
class Incident:
    """One incident of one run. `critical` is the step at which it became so, None if it never did."""

    rule: str
    opened: int
    critical: int | None = None
    closed: int | None = None
    edge: str | None = None
    onset: int | None = None
    """The first step of the excursion, as the rule dates it."""


def outcomes(rows: Rows, engine: RuleEngine | None = None) -> Iterator[tuple[int, Outcome]]:
    """Folds (step, values) rows through a pack (the shipped one by default). A rule that fails is an error here.

    A step that goes backwards begins a new attempt, as a restart in one log does.
    """
    engine = engine or RuleEngine(default_pack())
    state, attempt, last = engine.initial(), 1, -1
    for step, values in rows:
        if step <= last:
            attempt += 1
        last = step
        view = StepView(run="bench/run", attempt=attempt, step=step, values=values)
        state, outcome = engine.evaluate(state, view, 0.0)
        if outcome.errors:
            raise RuntimeError(f"step {step}: {outcome.errors}")
        yield step, outcome


def incidents(rows: Rows, engine: RuleEngine | None = None) -> list[Incident]:
    """The incidents of a run, in the order of their opening."""
    found, open_now = list[Incident](), dict[str, Incident]()
    for step, outcome in outcomes(rows, engine):
        for finding in outcome.findings:
            if finding.transition == "open":
                open_now[finding.rule] = Incident(finding.rule, step, onset=finding.onset_step)
                found.append(open_now[finding.rule])
            incident = open_now[finding.rule]
            incident.edge = finding.edge or incident.edge
            if finding.severity == "critical" and incident.critical is None and finding.transition != "close":
                incident.critical = step
            if finding.transition == "close":
                incident.closed = step
    return found
