"""Frames per second through a real service, rules on, beside others that take scalars, in one run.

    python -m benchmarks.ingest [--json FILE] [--seconds 5] [--database sqlite|postgresql] [--peers-python PYTHON]

For each database and for envelopes of 16 frames and of one: a fresh `foreshock serve`, 8 ranks a step, each frame two
pairs and 30 scalars; first as fast as it takes them, then at half the target's load (half of what it took, where that
is less) for three times as long, with a reader of `health`. Service, load generator and PostgreSQL share the machine's
cores. Exits 1 where a target is missed; the table comes last.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.ingest.service import Service, service

TARGETS = {
    ("postgresql", 16): ("frames_per_s", 10_000), ("sqlite", 16): ("frames_per_s", 5_000),
    ("postgresql", 1): ("requests_per_s", 2_000), ("sqlite", 1): ("requests_per_s", 2_000),
}  # fmt: skip
INGEST_P99_MS, HEALTH_P99_MS, TIMES_THE_BEST_SERVER = 50.0, 10.0, 10
KEPT_UP = 0.95
"""Share of the steps at half the load that are evaluated when it ends: the last ones are still gathering."""
PEERS = ("mlflow", "trackio", "wandb", "aim", "tensorboard")
SERVERS = ("mlflow",)
RUNS = {16: 4, 1: 8}
LOAD_LIMIT_S = 900


def load(at: Service, frames: int, seconds: float, prefix: str, rate: float = 0.0) -> dict[str, Any]:
    """One run of the load generator, with what it cost the service."""
    cpu, disk = at.cpu_s(), at.disk_bytes()
    done = subprocess.run(
        [
            sys.executable, "-m", "benchmarks.ingest.load", at.url,
            "--runs", str(RUNS[frames]), "--frames", str(frames), "--seconds", str(seconds),
            "--rate", str(rate), "--prefix", prefix,
            "--most", str(int(seconds * (1_000 if frames > 1 else 4_000))),
        ],
        stdout=subprocess.PIPE, text=True, check=True, timeout=LOAD_LIMIT_S,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout)
    evaluated = sum(at.last_step(run) + 1 for run in found.pop("runs"))
    used = at.cpu_s() - cpu
    frames_stored = max(1, found["frames"])
    return {
        **found,
        "service_cpu_s": round(used, 2),
        "cpu_us_per_frame": round(1e6 * used / frames_stored, 1),
        "frames_per_cpu_s": round(frames_stored / used, 1) if used else None,
        "disk_bytes_per_frame": round((at.disk_bytes() - disk) / frames_stored),
        "steps_stored": found["frames"] // 8,
        "steps_evaluated": evaluated,
        "frames_evaluated_per_s": round(8 * evaluated / found["seconds"], 1),
    }


def measure(kind: str, frames: int, seconds: float) -> dict[str, Any]:
    name, wanted = TARGETS[(kind, frames)]
    per_request = frames if name == "frames_per_s" else 1
    with service(kind) as at:
        load(at, frames, 1.0, "warm")
        full = load(at, frames, seconds, "full")
        half = load(at, frames, 3 * seconds, "half", rate=min(full[name], wanted) / per_request / 2)
    met = {
        name: full[name] >= wanted,
        "ingest_p99_ms": (half["p99_ms"] or 1e9) <= INGEST_P99_MS,
        "health_p99_ms": (half["health_p99_ms"] or 1e9) <= HEALTH_P99_MS,
        "rules_keep_up_at_half": half["steps_evaluated"] >= KEPT_UP * half["steps_stored"],
    }
    return {"database": kind, "frames_an_envelope": frames, "full": full, "half": half, "met": met}


def peers(python: str, seconds: float) -> list[dict[str, Any]]:
    """Each peer in its own interpreter; one that cannot run says why."""
    script = str(Path(__file__).with_name("peers.py"))
    found = []
    for name in PEERS:
        command = [python, script, name, "--seconds", str(seconds)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LOAD_LIMIT_S, check=False)
        last = (done.stdout.strip().splitlines() or [""])[-1]
        if done.returncode == 0 and last.startswith("{"):
            found.append(json.loads(last))
        else:
            found.append({"name": name, "error": (done.stderr.strip().splitlines() or ["no output"])[-1][:200]})
    return found


def _ms(latency: float | None) -> str:
    """A latency, or a dash where nothing was answered."""
    return "–" if latency is None else f"{latency:.1f}"


def table(results: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    print(
        "database    frames  frames/s  requests/s  values/s  CPU µs/frame  p50 ms  p99 ms | half: p50  p99  health p99"
    )
    for one in results:
        full, half = one["full"], one["half"]
        print(
            f"{one['database']:10s} {one['frames_an_envelope']:7d} {full['frames_per_s']:9.0f}"
            f" {full['requests_per_s']:11.0f} {full['values_per_s']:9.0f} {full['cpu_us_per_frame']:13.0f}"
            f" {_ms(full['p50_ms']):>7} {_ms(full['p99_ms']):>7} | {_ms(half['p50_ms']):>9} {_ms(half['p99_ms']):>4}"
            f" {_ms(half['health_p99_ms']):>11}"
        )
        print(
            f"{'':18s} bytes a frame: {full['wire_bytes_per_frame']} on the wire,"
            f" {full['disk_bytes_per_frame']} on disk; rules: {full['steps_evaluated']} of {full['steps_stored']} steps"
            f" evaluated when the load ended, {full['frames_evaluated_per_s']:.0f} frames/s"
        )
        print(
            f"{'':18s} at half the load, {half['frames_per_s']:.0f} frames/s: {half['steps_evaluated']} of"
            f" {half['steps_stored']} steps, {half['cpu_us_per_frame']:.0f} µs of the service's CPU a frame"
        )
    for other in others:
        print(f"{other['name']:18s} {other.get('scalars_per_s', other.get('error'))} scalars/s")
    for one in results:
        for name, good in one["met"].items():
            print(f"{'met   ' if good else 'MISSED'} {one['database']} x{one['frames_an_envelope']} {name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--database", choices=["sqlite", "postgresql"], action="append")
    parser.add_argument("--frames", type=int, choices=[16, 1], action="append", help="frames an envelope")
    parser.add_argument("--peers-python", default="", help="interpreter of the peers (make out/peers/.ready)")
    options = parser.parse_args()
    began = os.getloadavg()
    kinds = options.database or ["sqlite", "postgresql"]
    results = [measure(kind, frames, options.seconds) for kind in kinds for frames in options.frames or (16, 1)]
    others = peers(options.peers_python, options.seconds) if options.peers_python else []
    best = max((o.get("scalars_per_s", 0) for o in others if o["name"] in SERVERS), default=0)
    ours = max(one["full"]["values_per_s"] for one in results)
    # Peers that were asked for and could not run have not been beaten.
    beaten = not options.peers_python or 0 < TIMES_THE_BEST_SERVER * best <= ours
    good = all(all(one["met"].values()) for one in results) and beaten
    document = {
        "load_average": {"before": began, "after": os.getloadavg()}, "results": results, "peers": others,
        "times_the_best_peer_server": round(ours / best, 1) if best else None, "met": good,
    }  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(document, indent=1))
    table(results, others)
    print(f"times the best peer server: {document['times_the_best_peer_server']}; load average {began[0]:.1f}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
