"""Runs the demo's jobs while somebody looks on, and waits until the service has judged their last step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx
from rich.console import Console

from foreshock_service.demo import screen
from foreshock_service.demo.processes import DemoError, Training

POLL_SECONDS = 0.4
PARALLEL = 2
SETTLE_SECONDS = 30.0


def train(console: Console, trainings: Sequence[Training], url: str, steps: int, parallel: int = PARALLEL) -> None:
    """Runs the jobs, `parallel` at a time, and shows what the service sees of them. Raises `DemoError` if one dies."""
    waiting = list(trainings)
    with screen.progress(console, [t.job.name for t in trainings], steps) as show, _asking(url) as http:
        while True:
            running = [t for t in trainings if t.running()]
            while waiting and len(running) < parallel:
                running.append(waiting.pop(0))
                running[-1].start()
            for training in trainings:
                show(training.job.name, *_look(http, training))
            if not running and not waiting:
                return
            time.sleep(POLL_SECONDS)


def settle(url: str, trainings: Sequence[Training]) -> None:
    """Waits until the last step of every run is evaluated: the jobs flush at their end, evaluation follows.

    Raises `DemoError` when that takes longer than half a minute.
    """
    deadline = time.monotonic() + SETTLE_SECONDS
    with _asking(url) as http:
        for training in trainings:
            last = training.result()["steps"]
            while time.monotonic() < deadline:
                health, _ = _look(http, training)
                if health is not None and int(str(health.get("last_step") or 0)) >= last:
                    break
                time.sleep(0.1)
            else:
                raise DemoError(f"step {last} of the {training.job.name} run was not evaluated in time")


@contextmanager
def _asking(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{url}/v1", timeout=10.0) as http:
        yield http


def _look(http: httpx.Client, training: Training) -> tuple[dict[str, object] | None, str]:
    """The service's view of a run and a word about its gravest open incident; (None, why) before it is known."""
    if training.process is None:
        return None, ""
    try:
        answer = http.get(f"/runs/{training.job.run}/health")
    except httpx.HTTPError:
        return None, "service not answering"
    if answer.status_code != 200:
        return None, "warming up"
    health = answer.json()
    incidents = sorted(health["incidents"], key=lambda i: i["severity"])
    return health, f"{incidents[0]['rule']} since step {incidents[0]['opened_step']}" if incidents else ""
