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


COLOURS = {"healthy": "green", "warning": "yellow", "critical": "red", "unknown": "white", "waiting": "white"}


def show(bars: Progress, task: TaskID, health: dict[str, Any] | None, note: str) -> None:
    """Moves one run's bar to where the service saw it last."""
    verdict = health["verdict"] if health else "waiting"
    step = (health or {}).get("last_step") or 0
    bars.update(task, completed=step, verdict=verdict, colour=COLOURS[verdict], note=note)


def conclude(console: Console, report: dict[str, Any], checks: list[Check]) -> None:
    """The three runs, what was seen and done, and whether the demo showed what it had to."""
    runs = Table(title=f"{report['illness']}, seed {report['seed']}, onset at step {report['onset_step']}")
    for column in ("run", "final reward", "final validation", "reward broke at", "incidents", "commands"):
        runs.add_column(column)
    for name in ("healthy", "untreated", "treated"):
        row = report[name]
        seen = [f"{i['rule']} ({i['severity']}) at {i['opened_step']}" for i in report["incidents"] if i["run"] == name]
        done = [f"{c['kind']}: {c['state']} at {c['done_step']}" for c in report["commands"] if c["run"] == name]
        broke = row["reward_broke_step"]
        runs.add_row(
            name,
            f"{row['final_reward']:.2f}",
            f"{row['final_validation']:.2f}",
            "never" if broke is None else f"step {broke}",
            "\n".join(seen) or "none",
            "\n".join(done) or "none",
        )
    console.print(runs)
    for check in checks:
        mark = "[green]yes[/]" if check.passed else "[red]NO[/]"
        console.print(f"{mark}  {check.name}: {check.detail}", highlight=False)
