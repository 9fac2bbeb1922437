"""What the demo shows in the terminal: a line a run while it lasts, tables when it is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from foreshock_service.demo.expectations import Check

Show = Callable[[str, dict[str, Any] | None, str], None]
"""(run, what the service says of its health, a word about its gravest incident)"""
COLOURS = {"healthy": "green", "warning": "yellow", "critical": "red", "unknown": "white", "waiting": "white"}
PLAIN_EVERY = 20
"""Steps between two lines of a run where the output is no terminal."""


@contextmanager
def progress(console: Console, names: Sequence[str], steps: int) -> Iterator[Show]:
    """A bar a run with its verdict behind it; where the output is no terminal, a line whenever something changed."""
    if not console.is_terminal:
        yield _lines(console, steps)
        return
    columns = (
        TextColumn("{task.description:<10}"),
        BarColumn(bar_width=30),
        TextColumn("step {task.completed:>3.0f}/{task.total:.0f}"),
        TextColumn("[{task.fields[colour]}]{task.fields[verdict]:<9}"),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bars:
        start: dict[str, Any] = {"total": steps, "verdict": "waiting", "colour": "white", "note": "", "start": False}
        tasks = {name: bars.add_task(name, **start) for name in names}

        def show(name: str, health: dict[str, Any] | None, note: str) -> None:
            verdict, step = _verdict(health), _step(health)
            if health or note:
                bars.start_task(tasks[name])
            bars.update(tasks[name], completed=step, verdict=verdict, colour=COLOURS[verdict], note=note)
            if step >= steps:
                bars.stop_task(tasks[name])

        yield show


def _lines(console: Console, steps: int) -> Show:
    said: dict[str, tuple[int, str, str]] = {}

    def show(name: str, health: dict[str, Any] | None, note: str) -> None:
        step, verdict = _step(health), _verdict(health)
        now = (step // PLAIN_EVERY if step < steps else steps, verdict, note)
        if (health or note) and said.get(name) != now:
            said[name] = now
            console.print(f"{name:<10} step {step:>3}/{steps}  {verdict:<9}  {note}".rstrip(), highlight=False)

    return show


def _step(health: dict[str, Any] | None) -> int:
    return int((health or {}).get("last_step") or 0)


def _verdict(health: dict[str, Any] | None) -> str:
    return str(health["verdict"]) if health else "waiting"


RUNS = ("healthy", "untreated", "treated")


def conclude(console: Console, report: dict[str, Any], checks: list[Check]) -> None:
    """The three runs, what was seen and done, and whether the demo showed what it had to."""
    runs = Table(title=f"{report['illness']}, seed {report['seed']}, onset at step {report['onset_step']}")
    for column in ("run", "final reward", "final validation", "reward broke"):
        runs.add_column(column)
    for name in RUNS:
        row = report[name]
        broke = row["reward_broke_step"]
        scores = (f"{row['final_reward']:.2f}", f"{row['final_validation']:.2f}")
        runs.add_row(name, *scores, "never" if broke is None else f"at step {broke}")
    console.print(runs)
    for name in RUNS:
        for line in _events(report, name):
            console.print(f"[bold]{name}[/]  {line}", highlight=False)
    for check in checks:
        mark = "[green]yes[/]" if check.passed else "[red]NO[/]"
        console.print(f"{mark}  {check.name}: {check.detail}", highlight=False)


def _events(report: dict[str, Any], run: str) -> list[str]:
    """A line an incident and a command of one run, in the order of their steps."""
    lines = [
        (i["opened_step"] or 0, f"step {i['opened_step']}: {i['severity']} {i['rule']} opened, now {i['status']}")
        for i in report["incidents"]
        if i["run"] == run
    ]
    for c in report["commands"]:
        if c["run"] == run:
            when = c["issued_step"] if c["done_step"] is None else c["done_step"]
            judged = f", judged: {c['verdict']}" if c["verdict"] else ""
            lines.append((when or 0, f"step {when}: command {c['kind']} {c['state']}{judged}"))
    return [line for _, line in sorted(lines, key=lambda item: item[0])]
