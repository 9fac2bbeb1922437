"""What the demo shows in the terminal: a line a run while it lasts, tables when it is over."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from foreshock_service.demo.expectations import Check


def progress(console: Console) -> Progress:
    """Bars with the run's verdict behind them."""
    return Progress(
        TextColumn("{task.description:<10}"),
        BarColumn(bar_width=30),
        TextColumn("step {task.completed:>3.0f}/{task.total:.0f}"),
        TextColumn("[{task.fields[colour]}]{task.fields[verdict]:<9}"),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        console=console,
    )


RUNS = ("healthy", "untreated", "treated")
COLOURS = {"healthy": "green", "warning": "yellow", "critical": "red", "unknown": "white", "waiting": "white"}


def show(bars: Progress, task: TaskID, health: dict[str, Any] | None, note: str) -> None:
    """Moves one run's bar to where the service saw it last."""
    verdict = health["verdict"] if health else "waiting"
    step = (health or {}).get("last_step") or 0
    bars.update(task, completed=step, verdict=verdict, colour=COLOURS[verdict], note=note)


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
