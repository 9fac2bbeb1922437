"""Others that take scalars, in an interpreter of their own: 30 scalars a step for some seconds; prints JSON.

    PEERS/bin/python benchmarks/ingest/peers.py NAME [--seconds 5]

`mlflow`: REST `log-batch` of 990 metrics a request against `mlflow server` on SQLite, four clients, each one request in
flight. `trackio`, `wandb` (offline), `aim` (a local repository), `tensorboard` (tensorboardX): the library's own `log`
in one process, until everything is on disk. Needs nothing of this project.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from typing import Any

SCALARS = {f"metric/{i}": 0.1 * i for i in range(30)}
Taken = tuple[int, float]
"""Scalars, and the seconds that they took."""
BATCH_STEPS = 33
"""log-batch takes 1,000 metrics at most."""


def trackio(folder: str, seconds: float) -> Taken:
    os.environ |= {"TRACKIO_DIR": folder, "HF_HUB_OFFLINE": "1", "TRACKIO_DISABLE_TELEMETRY": "1"}
    import trackio as library

    library.init(project="bench", embed=False)
    return _log(library.log, library.finish, seconds)


def wandb(folder: str, seconds: float) -> Taken:
    os.environ |= {"WANDB_MODE": "offline", "WANDB_DIR": folder, "WANDB_SILENT": "true"}
    import wandb as library

    run = library.init(project="bench")
    return _log(run.log, run.finish, seconds)


def aim(folder: str, seconds: float) -> Taken:
    from aim import Run

    run = Run(repo=folder, experiment="bench", system_tracking_interval=None, capture_terminal_logs=False)
    step = 0

    def log(scalars: dict[str, float]) -> None:
        nonlocal step
        run.track(scalars, step=step)
        step += 1

    return _log(log, run.close, seconds)


def tensorboard(folder: str, seconds: float) -> Taken:
    from tensorboardX import SummaryWriter

    writer = SummaryWriter(folder)
    step = 0

    def log(scalars: dict[str, float]) -> None:
        nonlocal step
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)
        step += 1

    return _log(log, writer.close, seconds)


def mlflow(folder: str, seconds: float) -> Taken:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    store = ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", folder]
    server = subprocess.Popen(
        [sys.executable, "-m", "mlflow", "server", *store, "--port", str(port), "--workers", "1"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        experiment = _wait_for(port)
        runs = [_call(port, "runs/create", {"experiment_id": experiment})["run"]["info"]["run_id"] for _ in range(4)]
        until = time.perf_counter() + seconds
        counts = [0] * len(runs)
        threads = [threading.Thread(target=_post_batches, args=(port, r, until, counts, i)) for i, r in enumerate(runs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(counts), seconds
    finally:
        os.killpg(server.pid, 15)
        server.wait(20)


def _wait_for(port: int) -> str:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        try:
            return str(_call(port, "experiments/create", {"name": "bench"})["experiment_id"])
        except OSError:
            time.sleep(0.5)
    raise SystemExit("mlflow server did not start")


def _call(port: int, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/api/2.0/mlflow/{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def _post_batches(port: int, run: str, until: float, counts: list[int], index: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    step = 0
    while time.perf_counter() < until:
        metrics = [
            {"key": name, "value": value, "timestamp": 1, "step": s}
            for s in range(step, step + BATCH_STEPS)
            for name, value in SCALARS.items()
        ]
        body = json.dumps({"run_id": run, "metrics": metrics})
        connection.request("POST", "/api/2.0/mlflow/runs/log-batch", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        if answer.status != 200:
            raise SystemExit(f"mlflow answered {answer.status}")
        counts[index] += len(metrics)
        step += BATCH_STEPS


def _log(log: Callable[[dict[str, float]], Any], finish: Callable[[], Any], seconds: float) -> Taken:
    """Logs for `seconds`; the time counts until `finish` has returned, the library's start does not."""
    began, steps = time.perf_counter(), 0
    while time.perf_counter() < began + seconds:
        log(SCALARS)
        steps += 1
    finish()
    return steps * len(SCALARS), time.perf_counter() - began


PEERS: dict[str, Callable[[str, float], Taken]] = {
    "mlflow": mlflow, "trackio": trackio, "wandb": wandb, "aim": aim, "tensorboard": tensorboard,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(PEERS))
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.chdir(folder)
        scalars, seconds = PEERS[options.name](folder, options.seconds)
    print(json.dumps({"name": options.name, "scalars_per_s": round(scalars / seconds), "seconds": round(seconds, 2)}))


if __name__ == "__main__":
    main()
