"""From `end_step()` of a violating step to the command in the SDK's queue: loopback HTTP, service in its own process.

    python -m benchmarks.latency.command [--trials 200] [--database sqlite|postgresql]

Each trial is a run of its own in `auto` mode: one healthy step, then one with a non-finite gradient. The rule holds for
one step; the service stores the frame durably, evaluates it, opens the incident, approves `skip_update`, wakes the
long-poll; the SDK's thread wins the acceptance and queues the command. Target: p99 at most 100 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

import foreshock
from benchmarks.latency.databases import database

SERVE = """
from foreshock_service.server import listen
from foreshock_service.settings import Settings
listen(Settings(), lambda url: print(url, flush=True))
"""


def trial(url: str, spool: str, name: str) -> tuple[float, str]:
    """Seconds from `end_step` to the command in the SDK's queue, and its kind."""
    monitor = foreshock.init(
        run=f"bench/{name}", url=url, mode="auto", controller=True, spool_dir=spool, capabilities=["skip_update"],
        expected_ranks={"trainer": 1},
    )  # fmt: skip
    monitor.log({"reward.mean": 0.5, "grad.norm": 1.0})
    monitor.end_step(1)
    _until_evaluated(f"{url}/v1/runs/bench/{name}")
    time.sleep(0.2)  # the poller has asked again by then and waits
    monitor.log({"reward.mean": 0.5, "grad.norm": 1.0, "grad.nonfinite": 1.0})
    began = time.perf_counter()
    monitor.end_step(2)
    queue = monitor._process.inbox
    while not len(queue) and time.perf_counter() - began < 20.0:
        queue.wait(0.5)
    took = time.perf_counter() - began
    kind = "skip_update" if len(queue) else "none"
    monitor.finish("completed")
    return took, kind


def _until_evaluated(url: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                if json.load(answer)["last_step"] == 1:
                    return
        except urllib.error.HTTPError as error:
            error.close()
        time.sleep(0.02)
    raise SystemExit(f"step 1 was never evaluated: {url}")


def measure(kind: str, trials: int) -> bool:
    with database(kind) as database_url, tempfile.TemporaryDirectory() as spool:
        environment = {
            **os.environ, "FORESHOCK_DATABASE_URL": database_url, "FORESHOCK_PORT": "0",
            "FORESHOCK_LOG_LEVEL": "warning",
            "FORESHOCK_INGEST_RATE_PER_S": "100000", "FORESHOCK_REQUEST_RATE_PER_S": "100000",
        }  # fmt: skip
        with subprocess.Popen(
            [sys.executable, "-c", SERVE], env=environment, stdout=subprocess.PIPE, text=True
        ) as service:
            assert service.stdout is not None
            url = service.stdout.readline().strip()
            try:
                results = [trial(url, spool, f"{kind}{n}") for n in range(trials)]
            finally:
                service.terminate()
    times = sorted(took for took, kind_ in results if kind_ == "skip_update")
    if not times:
        print(f"{kind:10s} no command arrived in {trials} trials")
        return False
    p50, p99 = times[len(times) // 2], times[min(len(times) - 1, len(times) * 99 // 100)]
    print(
        f"{kind:10s} {len(times)}/{trials} commands  p50 {1000 * p50:.1f} ms  p99 {1000 * p99:.1f} ms"
        f"  max {1000 * times[-1]:.1f} ms"
    )
    return len(times) == trials and p99 <= 0.1


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--database", choices=["sqlite", "postgresql"], action="append")
    options = parser.parse_args()
    good = [measure(name, options.trials) for name in options.database or ("sqlite", "postgresql")]
    sys.exit(0 if all(good) else 1)
