"""`foreshock check`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foreshock_service.cli.out import say

if TYPE_CHECKING:
    from foreshock_service.check.judge import Report
    from foreshock_service.rules.pack import Pack


def check(
    logs: Annotated[
        list[Path], typer.Argument(metavar="LOG…", help="Logs, or folders with one; `-` is standard input.")
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="The verdict as JSON; a list where there are several logs.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the signals and incidents (PNG, SVG or PDF).")] = None,
    rules: Annotated[Path | None, typer.Option(help="YAML rule pack laid over the shipped one.")] = None,
    follow: Annotated[
        bool, typer.Option(help="Keep reading a growing log; what happens is told as it happens.")
    ] = False,
    idle_s: Annotated[
        float, typer.Option(min=0, help="With --follow: end after so many seconds without anything new; 0: never.")
    ] = 0.0,
    interval: Annotated[
        int, typer.Option(min=1, help="Steps between two lines, where the log has no step numbers.")
    ] = 1,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show where each signal was read from.")] = False,
) -> None:
    """Judge existing logs: TensorBoard, verl, TRL, W&B, CSV, JSONL. Exit 0 healthy, 1 incidents, 2 unreadable."""
    from foreshock_service.rules.pack import PackError, load_pack

    if (follow or plot is not None) and len(logs) > 1:
        raise _refused("--follow and --plot take one log")
    try:
        pack = load_pack(rules)
    except PackError as error:
        raise _refused(str(error)) from None
    reports = [_checked(log, pack, follow, idle_s, interval, plot is not None, as_json) for log in logs]
    if as_json:
        told: list[dict[str, Any]] = [report.to_json() for report in reports]
        say(json.dumps(told[0] if len(told) == 1 else told, ensure_ascii=False, indent=2))
        for log, report in zip(logs, reports, strict=True):
            if report.problem:
                say(f"foreshock: {log}: {report.problem}", err=True)
    else:
        _show(logs, reports, verbose)
    if plot is not None:
        _draw(reports[0], plot, logs[0].name)
    words = {report.verdict for report in reports}
    raise typer.Exit(2 if "unreadable" in words else 1 if words - {"healthy"} else 0)


def _checked(log: Path, pack: Pack, follow: bool, idle_s: float, interval: int, trace: bool, silent: bool) -> Report:
    from foreshock_service.check.render import change_line
    from foreshock_service.check.run import check as check_log
    from foreshock_service.cli.console import SafeConsole

    console = SafeConsole(highlight=False)
    watch = None
    if follow and not silent:

        def watch(what: str, incident: Any, step: int) -> None:
            console.print(change_line(what, incident, step))

    return check_log(
        Path("/dev/stdin") if str(log) == "-" else log,
        pack,
        interval=interval,
        follow_idle_s=idle_s if follow else None,
        trace=trace,
        watch=watch,
    )


def _show(logs: list[Path], reports: list[Report], verbose: bool) -> None:
    from foreshock_service.check.render import render
    from foreshock_service.cli.console import SafeConsole

    console = SafeConsole(highlight=False, width=None if sys.stdout.isatty() else 120)
    for log, report in zip(logs, reports, strict=True):
        render(console, str(log), report, verbose=verbose)


def _draw(report: Report, path: Path, title: str) -> None:
    from foreshock_service.check.plot import NoPlot, plot

    try:
        plot(report, path, title)
    except NoPlot as error:
        say(f"foreshock: {error}", err=True)
        if report.verdict != "unreadable":
            raise typer.Exit(2) from None


def _refused(why: str) -> typer.Exit:
    say(f"foreshock: {why}", err=True)
    return typer.Exit(2)
