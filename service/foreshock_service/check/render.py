"""The report for people: verdict, precursors with their consequences, what it means, what to do, what was read."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from foreshock_service.check.advice import ADVICE
from foreshock_service.check.judge import Incident, Report
from foreshock_service.check.story import chains, told
from foreshock_service.rules.illnesses import rule_named

COLOURS = {"healthy": "green", "warning": "yellow", "critical": "red", "unreadable": "magenta"}
FEW_STEPS = 20
"""Below this a healthy verdict says little: baselines need about ten steps."""
SHOWN_CHAINS = 12


def render(console: Console, name: str, report: Report, *, verbose: bool = False) -> None:
    """Prints a report. `verbose` also shows where each signal was read from."""
    colour = COLOURS[report.verdict]
    head = Text.assemble((report.verdict.upper(), f"bold {colour}"), f"  {_about(report)}")
    body: list[RenderableType] = [head]
    if report.verdict == "unreadable":
        body.append(Text(report.problem))
    body += [Text(sentence, style="dim") for sentence in _cautions(report)]
    console.print(Panel(Group(*body), title=escape(name), title_align="left", border_style=colour))
    told_chains = sorted(chains(report.incidents), key=_gravest_first)
    for chain in told_chains[:SHOWN_CHAINS]:
        _chain(console, chain)
    if len(told_chains) > SHOWN_CHAINS:
        console.print(f"… and {len(told_chains) - SHOWN_CHAINS} more; --json has them all.")
    _sources(console, report, verbose)


def change_line(what: str, incident: Incident, step: int) -> Text:
    """One line for `--follow`, as something happens."""
    word = {"open": incident.severity, "escalate": "now critical", "close": "resolved"}[what]
    colour = "green" if what == "close" else COLOURS[incident.severity]
    said = "" if what == "close" else f"  {incident.explanation}"
    return Text.assemble(f"step {step}  ", (f"{word} {incident.rule}", colour), said)


def _about(report: Report) -> str:
    if report.verdict == "unreadable":
        return report.format or ""
    where = f"steps {report.first_step}–{report.last_step}" if report.steps > 1 else f"step {report.first_step}"
    attempts = f", {report.attempts} attempts" if report.attempts > 1 else ""
    words = f"{report.format}, {report.framework} names" if report.framework else report.format
    return f"{report.steps} logged, {where}{attempts}  ({words})"


def _cautions(report: Report) -> list[str]:
    said = list(report.notes)
    if report.verdict == "healthy" and report.steps < FEW_STEPS:
        said.append(f"Only {report.steps} steps: baselines need about ten, so this says little.")
    if report.always_zero:
        zeros = ", ".join(report.always_zero)
        said.append(f"0 throughout, so not measured and taken as missing: {zeros}.")
    if report.verdict != "unreadable" and not any(s.startswith(("policy.", "mismatch.")) for s in report.signals):
        said.append("No log-prob pair is logged: the earliest precursors cannot be seen in this log.")
    return said


def _chain(console: Console, chain: Sequence[Incident]) -> None:
    worst = "critical" if any(i.severity == "critical" for i in chain) else "warning"
    console.print(Text(told(chain)[:1].upper() + told(chain)[1:] + ".", style=f"bold {COLOURS[worst]}"))
    for incident in chain:
        until = f"resolved at {incident.resolved_step}" if incident.resolved_step is not None else "open at the end"
        steps = f"seen at step {incident.opened_step}, {until}"
        title = rule_named(incident.rule).title
        parts: list[RenderableType] = [
            Text.assemble((incident.severity, COLOURS[incident.severity]), f"  {title} ({incident.rule}): {steps}"),
            Padding(Text(incident.explanation), (0, 0, 0, 2)),
        ]
        advice = ADVICE[incident.rule]
        parts.append(Padding(Text(f"What it means: {advice.meaning}", style="dim"), (0, 0, 0, 2)))
        parts.append(Padding(Text(f"What to do:    {advice.action}"), (0, 0, 0, 2)))
        if incident.diagnosis is not None and incident.diagnosis.causes:
            parts.append(Padding(Text(f"Likely cause:  {incident.diagnosis.sentence}"), (0, 0, 0, 2)))
        console.print(Padding(Group(*parts), (0, 0, 1, 2)))


def _sources(console: Console, report: Report, verbose: bool) -> None:
    if report.untranslated:
        table = Table("not read", "why", title="Names that cannot be translated", title_justify="left", box=None)
        for name, why in sorted(report.untranslated.items()):
            table.add_row(escape(name), escape(why))
        if verbose or len(report.untranslated) <= 4:
            console.print(table)
        else:
            console.print(Text(f"{len(report.untranslated)} names are known and not read; --verbose says why.", "dim"))
    if verbose and report.sources:
        table = Table("signal", "read from", "note", "steps", title="What was read", title_justify="left", box=None)
        for signal, (name, note) in sorted(report.sources.items()):
            table.add_row(signal, escape(name), escape(note), str(report.signals.get(signal, 0)))
        console.print(table)


def _gravest_first(chain: Sequence[Incident]) -> tuple[int, int, int]:
    lasting = any(i.is_open and i.severity == "critical" for i in chain)
    grave = any(i.severity == "critical" for i in chain)
    return (0 if lasting else 1 if grave else 2), chain[0].attempt, chain[0].onset_step
