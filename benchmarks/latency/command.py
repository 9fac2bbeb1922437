"""From `end_step()` of a violating step to the command in the SDK's queue: loopback HTTP, service in its own process.

    python benchmarks/latency/command.py [--trials 200] [--database sqlite|postgresql]

Each trial is a run of its own in `auto` mode: one healthy step, then one with a non-finite gradient. The rule holds for
one step; the service stores the frame durably, evaluates it, opens the incident, approves `skip_update`, wakes the
long-poll; the SDK's thread wins the acceptance and queues the command. Target: p99 at most 100 ms.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time

from databases import database

import foreshock

SERVE = """
from foreshock_service.server import listen
from foreshock_service.settings import Settings
listen(Settings(), lambda url: print(url, flush=True))
"""


def trial(url: str, spool: str, name: str) -> tuple[float, str]:
    """Seconds from `end_step` to the queued command, and its kind."""
    monitor = foreshock.init(run=f"bench/{name}", url=url, mode="auto", controller=True, spool_dir=spool)
    monitor.on("skip_update", lambda command: None)
    monitor.log({"reward.mean": 0.5, "grad.norm": 1.0})
    monitor.end_step(1)
    _until(lambda: monitor._acceptance is not None and monitor._acceptance.attempt is not None)
    time.sleep(0.15)  # the poller asks again after the first news of the run
    monitor.log({"reward.mean": 0.5, "grad.norm": 1.0, "grad.nonfinite": 1.0})
    began = time.perf_counter()
    monitor.end_step(2)
    monitor._inbox.wait(20.0)
    took = time.perf_counter() - began
    found = monitor._inbox.take(2)
    kind = found[0].command.kind if found else "none"
    monitor.finish("completed")
    return took, kind


def _until(true: object, seconds: float = 20.0) -> None:
    assert callable(true)
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise SystemExit("the service never answered")
        time.sleep(0.002)


def measure(kind: str, trials: int) -> bool:
    with database(kind) as database_url, tempfile.TemporaryDirectory() as spool:
        environment = {
            **os.environ, "FORESHOCK_DATABASE_URL": database_url, "FORESHOCK_PORT": "0", "FORESHOCK_LOG_LEVEL": "error",
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
