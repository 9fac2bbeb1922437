"""`foreshock demo`: an embedded service, a real small RL job that would collapse, caught and rescued."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from foreshock_service.demo import report as reporting
from foreshock_service.demo import screen
from foreshock_service.demo.expectations import EXPECTATIONS, judge
from foreshock_service.demo.plot import PANELS, draw
from foreshock_service.demo.processes import DemoError, Job, Service, Training, clear, end
from foreshock_service.demo.watching import settle, train

MODES = ("observe", "approve", "auto")


def demo(
    illness: Annotated[str, typer.Option(help=f"One of: {', '.join(EXPECTATIONS)}.")] = "stale_parameters",
    seed: Annotated[int, typer.Option(min=0, help="Seed of all three runs.")] = 0,
    mode: Annotated[str, typer.Option(help="Mode of the treated run: observe, approve or auto.")] = "auto",
    steps: Annotated[int, typer.Option(min=30, help="Training steps of each run.")] = 85,
    onset: Annotated[int, typer.Option(min=12, help="First ill step.")] = 25,
    out: Annotated[Path, typer.Option(help="Folder for the database, the logs and the picture.")] = Path(
        "foreshock-demo"
    ),
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write the report as JSON.")] = None,
    port: Annotated[int | None, typer.Option(help="The service's port; default: a free one.")] = None,
    serve: Annotated[bool, typer.Option(help="Keep the service and its page up afterwards, until Ctrl-C.")] = False,
) -> None:
    """Run the same seed healthy, ill and left alone, and ill with Foreshock acting.

    Exit 0 when it was seen and rescued, 1 when not, 2 when a process died, 130 when interrupted.
    """
    console = Console()
    if illness not in EXPECTATIONS:
        raise typer.BadParameter(f"unknown illness {illness!r}; one of {', '.join(EXPECTATIONS)}")
    if mode not in MODES:
        raise typer.BadParameter(f"unknown mode {mode!r}; one of {', '.join(MODES)}")
    if onset + 10 > steps:
        raise typer.BadParameter(f"an onset at step {onset} leaves fewer than ten ill steps of {steps}")
    try:
        clear(out)
    except DemoError as error:
        console.print(f"[red]{error}[/]", highlight=False)
        raise typer.Exit(2) from None
    service = Service(out, port)
    jobs = [Job("healthy", "none", "auto"), Job("untreated", illness, "observe"), Job("treated", illness, mode)]
    trainings: list[Training] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the jobs and the service as Ctrl-C does
    try:
        service.start()
        console.print(f"service at [link={service.url}]{service.url}[/link], database and logs in {out}")
        trainings = [Training(job, seed, onset, steps, service.url, out) for job in jobs]
        train(console, trainings, service.url, steps)
        reader = reporting.Reader(service.url)
        settle(service.url, trainings)
        report = reporting.build(illness, seed, onset, trainings, reader)
        checks = judge(report, mode)
        report["checks"] = [vars(check) for check in checks]
        signals = [signal for signal, _, _ in PANELS]
        draw(report, {t.job.name: reader.series(t.job.run, signals) for t in trainings}, out / "demo.png")
        target = json_file or out / "demo.json"
        target.write_text(json.dumps(report, indent=2) + "\n")
        screen.conclude(console, report, checks)
        console.print(f"picture: {out / 'demo.png'}   report: {target}")
        if serve:
            console.print(f"the page stays at {service.url} until Ctrl-C")
            _wait(service)
    except DemoError as error:
        console.print(f"[red]{error}[/]", highlight=False)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        console.print("interrupted; the jobs and the service are ended")
        raise typer.Exit(130) from None
    finally:
        for training in trainings:
            end(training.process, grace_seconds=3.0)
        service.stop()
    if not all(check.passed for check in checks):
        raise typer.Exit(1)


def _wait(service: Service) -> None:
    try:
        while service.process is not None and service.process.poll() is None:
            time.sleep(0.5)
    except KeyboardInterrupt:
        pass
