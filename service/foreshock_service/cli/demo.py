"""`foreshock demo`: an embedded service, a real small RL job that would collapse, caught and rescued."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console

from foreshock_service.demo import report as reporting
from foreshock_service.demo import screen
from foreshock_service.demo.expectations import EXPECTATIONS, judge
from foreshock_service.demo.plot import PANELS, draw
from foreshock_service.demo.processes import DemoError, Job, Service, Training, end

POLL_SECONDS = 0.4
PARALLEL = 2
SETTLE_SECONDS = 20.0


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
    """Run the same seed healthy, ill and left alone, and ill with Foreshock acting; exit 1 if it was not rescued."""
    console = Console()
    if illness not in EXPECTATIONS:
        raise typer.BadParameter(f"unknown illness {illness!r}; one of {', '.join(EXPECTATIONS)}")
    out.mkdir(parents=True, exist_ok=True)
    service = Service(out, port)
    jobs = [Job("healthy", "none", "auto"), Job("untreated", illness, "observe"), Job("treated", illness, mode)]
    trainings: list[Training] = []
    try:
        service.start()
        console.print(f"service at [link={service.url}]{service.url}[/link], database and logs in {out}")
        trainings = [Training(job, seed, onset, steps, service.url, out) for job in jobs]
        _train(console, trainings, service.url, steps)
        reader = reporting.Reader(service.url)
        _settle(service.url, trainings)
        report = reporting.build(illness, seed, onset, trainings, reader)
        checks = judge(report, mode)
        report["checks"] = [vars(check) for check in checks]
        signals = [signal for signal, _, _ in PANELS]
        draw(report, {t.job.name: reader.series(f"demo/{t.job.name}", signals) for t in trainings}, out / "demo.png")
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
    finally:
        for training in trainings:
            end(training.process, grace_seconds=3.0)
        service.stop()
    if not all(check.passed for check in checks):
        raise typer.Exit(1)


def _train(console: Console, trainings: list[Training], url: str, steps: int) -> None:
    """Runs the jobs, `PARALLEL` at a time, and shows what the service sees of them."""
    waiting = list(trainings)
    with screen.progress(console) as bars, httpx.Client(base_url=f"{url}/v1", timeout=5.0) as http:
        tasks = {
            t.job.name: bars.add_task(t.job.name, total=steps, verdict="waiting", colour="white", note="")
            for t in trainings
        }
        while True:
            running = [t for t in trainings if t.running()]
            while waiting and len(running) < PARALLEL:
                running.append(waiting.pop(0))
                running[-1].start()
            for training in trainings:
                screen.show(bars, tasks[training.job.name], *_look(http, training))
            if not running and not waiting:
                return
            time.sleep(POLL_SECONDS)


def _look(http: httpx.Client, training: Training) -> tuple[dict[str, object] | None, str]:
    """The service's view of a run and a word about its gravest open incident; (None, "") before it is known."""
    if training.process is None:
        return None, ""
    try:
        answer = http.get(f"/runs/demo/{training.job.name}/health")
    except httpx.HTTPError:
        return None, "service not answering"
    if answer.status_code != 200:
        return None, "warming up"
    health = answer.json()
    incidents = sorted(health["incidents"], key=lambda i: i["severity"])
    return health, f"{incidents[0]['rule']} since step {incidents[0]['opened_step']}" if incidents else ""


def _settle(url: str, trainings: list[Training]) -> None:
    """Waits until the last step of every run is evaluated: the jobs flush at their end, evaluation follows."""
    deadline = time.monotonic() + SETTLE_SECONDS
    with httpx.Client(base_url=f"{url}/v1", timeout=5.0) as http:
        for training in trainings:
            last = training.result()["steps"]
            while time.monotonic() < deadline:
                health = http.get(f"/runs/demo/{training.job.name}/health").json()
                if (health.get("last_step") or 0) >= last:
                    break
                time.sleep(0.1)
            else:
                raise DemoError(f"step {last} of the {training.job.name} run was not evaluated in time")


def _wait(service: Service) -> None:
    try:
        while service.process is not None and service.process.poll() is None:
            time.sleep(0.5)
    except KeyboardInterrupt:
        pass
