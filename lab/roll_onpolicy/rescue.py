"""What the watched worker does to the ladder's crashing rungs, on ROLL's own pipeline, worker and reward functions.

    ROLL_HOME=… ROLL_PYTHON=… python -m lab.roll_onpolicy.rescue --out FOLDER [--jobs 2] [--resume] [--small]

``ROLL_HOME``: a checkout of ROLL of 2025-11 (``688ecd3f``), whose own order of rows mixes the groups. ``ROLL_PYTHON``:
an interpreter with what ROLL imports. Each run (``rescue_run``) is ROLL's own ``RLVRPipeline.run`` over fakes of what
needs an accelerator, with ROLL's own worker (*stock*) or ``MonitoredActorPGWorker`` and a real Foreshock
service in mode ``auto``: *exact* (``FORESHOCK_ROLL_ON_POLICY=exact``, with the driver's half) and *refuse* (the same
with ``FORESHOCK_ROLL_REFUSE=1``, from the YAML alone). Writes ``runs/`` and ``rescue.json``, ``rescue.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from foreshock_service.demo.processes import Service
from lab.roll_onpolicy import summary
from lab.roll_onpolicy.processes import run_to_end

ROOT = Path(__file__).resolve().parents[2]
CRASHING = (
    "mixed groups", "old of another batch", "rows misordered", "stale training, lag 8", "seed with mixed groups",
)  # fmt: skip
HEALTHY = "identical"
#: a training pass that really differs at every step: the limit is the operator's, above the seed's numeric noise
NOISY = {"seed with mixed groups": "0.01"}
SETTINGS: dict[str, dict[str, str]] = {
    "refuse": {"FORESHOCK_ROLL_ON_POLICY": "exact", "FORESHOCK_ROLL_REFUSE": "1"},
    "stock": {},
    "exact": {"FORESHOCK_ROLL_ON_POLICY": "exact", "FORESHOCK_ROLL_DRIVER": "1"},
}


@dataclass(frozen=True)
class Job:
    """The runs of one rung, dtype and setting."""

    rung: str
    dtype: str
    setting: str
    seeds: tuple[int, ...]

    @property
    def name(self) -> str:
        """Of its files and of its runs at the service, with {seed} in it."""
        words = "".join(c if c.isalnum() else "-" for c in self.rung)
        return f"{words}__{self.dtype}__{self.setting}__{{seed}}"


def jobs_of(options: argparse.Namespace) -> Iterator[Job]:
    """Every seed of the crashing rungs and of the healthy one in float32; the healthy one in bfloat16; a dropout."""
    every = tuple(range(options.seeds))
    wanted = [Job("dropout 0.1", "fp32", "refuse", every[:2])]
    wanted += [Job(rung, "fp32", setting, every) for setting in SETTINGS for rung in (HEALTHY, *CRASHING)]
    wanted += [Job(HEALTHY, "bf16", setting, every[:2]) for setting in ("stock", "exact")]
    for job in wanted:
        path = str(options.out / "runs" / f"{job.name}.json")
        left = tuple(s for s in job.seeds if not (options.resume and Path(path.format(seed=s)).exists()))
        if left and (not options.only or any(job.name.startswith(w) for w in options.only)):
            yield replace(job, seeds=left)


def run_job(job: Job, options: argparse.Namespace, url: str) -> list[str]:
    """Makes the job's records, with what the service said of each run; gives their statuses.

    Raises RuntimeError with what a failed process last wrote.
    """
    runs = (options.out / "runs").resolve()
    command = [options.python, "-W", "ignore", "-m", "lab.roll_onpolicy.rescue_run", "--home", options.home]
    command += ["--rung", job.rung, "--dtype", job.dtype, "--setting", job.setting, "--steps", str(options.steps)]
    command += ["--seeds", *map(str, job.seeds), "--out", str(runs / f"{job.name}.json"), "--run", f"rescue/{job.name}"]
    if options.small:
        command += ["--prompts", "8", "--warm-steps", "120"]
    work = (options.out / "work").resolve()
    work.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FORESHOCK_ROLL")}
    environment = kept | {
        "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "collectors")]),
        "ROLL_LOG_DIR": str(work), "FORESHOCK_RAISE": "1", "FORESHOCK_URL": "" if job.setting == "stock" else url,
        "FORESHOCK_MODE": "auto", "FORESHOCK_POLL_S": "1", "FORESHOCK_SPOOL_DIR": str(work / "spool"),
    } | SETTINGS[job.setting]  # fmt: skip
    if job.setting == "refuse" and job.rung in NOISY:
        environment["FORESHOCK_ROLL_LIMIT"] = NOISY[job.rung]
    status, said = run_to_end(command, work, environment)
    if status:
        raise RuntimeError(f"{job.name} ended with {status}: {said[-2000:]}")
    became = []
    for seed in job.seeds:
        name = job.name.format(seed=seed)
        became.append(str(json.loads((runs / f"{name}.json").read_text())["status"]))
        ask(runs / f"{name}.json", url)
    return became


def ask(path: Path, url: str) -> None:
    """Adds what the service says of a watched run to its record, once."""
    record = json.loads(path.read_text())
    if record["setting"] != "stock" and "incidents" not in record:
        path.write_text(json.dumps(record | said_of(url, f"rescue/{path.stem}"), sort_keys=True))


def said_of(url: str, run: str, patience_s: float = 10.0) -> dict[str, Any]:
    """Incidents (rule, severity, step) and commands (kind, state) of a run, once the service has read it all."""
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        about = httpx.get(f"{url}/v1/runs/{run}").json()
        if about.get("status") in ("finished", "crashed", "stopped"):
            break
        time.sleep(0.2)
    incidents = httpx.get(f"{url}/v1/incidents", params={"run": run}).json()["incidents"]
    commands = httpx.get(f"{url}/v1/runs/{run}/commands").json()["commands"]
    return {
        "incidents": [[i["rule"], i["severity"], i["opened_step"]] for i in incidents[::-1]],
        "commands": [[c["kind"], c["state"]] for c in commands[::-1]],
    }


def verdict(run: dict[str, Any], healthy: list[float]) -> str:
    """*healthy*, *refused* (and at which step first), or what became of it."""
    if run["status"] == "refused":
        return "refused"
    if run["status"].startswith("raised"):
        return "crashes"
    outcome = summary.outcome(summary.level(run), healthy)
    if run["refused"] and outcome != "learns":
        return "refused"
    return "healthy" if outcome == "learns" else outcome


def table(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a rung and dtype: by setting, the end of every seed, its verdict, and the cause of what was refused."""
    by: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for run in sorted(runs, key=lambda r: int(r["seed"])):
        by.setdefault((run["rung"], run["dtype"]), {}).setdefault(run["setting"], []).append(run)
    rows = []
    for (rung, dtype), settings in by.items():
        base = by.get((HEALTHY, dtype), {}).get("stock") or []
        healthy = [summary.level(run) for run in base]
        row: dict[str, Any] = {"rung": rung, "dtype": dtype}
        for setting, group in settings.items():
            pairs = [s["policy.kl_k2"] for r in group for s in r["steps"] if s["policy.kl_k2"] is not None]
            row[setting] = {
                "end": [summary.level(r) for r in group], "verdict": [verdict(r, healthy) for r in group],
                "policy.kl_k2 max": max(pairs, default=None),
                "first refused": sorted({r["refused"][0]["step"] for r in group if r["refused"]}),
                "refused share": [len(r["refused"]) / len(r["steps"]) for r in group],
                "causes": _causes(group),
                "incidents": sorted({rule for r in group for rule, severity, _ in r.get("incidents", [])
                                     if severity == "critical"}),
                "commands": sorted({kind for r in group for kind, _ in r.get("commands", [])}),
            }  # fmt: skip
        rows.append(row)
    order = [HEALTHY, *CRASHING]
    return sorted(rows, key=lambda r: (r["dtype"] != "fp32", order.index(r["rung"]) if r["rung"] in order else 99))


def _causes(group: list[dict[str, Any]]) -> list[str]:
    """The first cause of each run's refusals, one example of each wording."""
    alike: dict[str, str] = {}
    for run in group:
        for refusal in run["refused"][:1]:
            alike.setdefault(re.sub(r"[\d.e+-]+", "#", refusal["cause"]), refusal["cause"])
    return sorted(alike.values())


def _cell(found: dict[str, Any] | None) -> str:
    if not found:
        return ""
    words = found["verdict"]
    counts = ", ".join(f"{word} {words.count(word)}/{len(words)}" for word in dict.fromkeys(words))
    ends = " ".join(f"{value:.2f}" for value in found["end"])
    return f"{counts}; {ends}" if set(words) != {"refused"} else counts


def markdown(rows: list[dict[str, Any]]) -> str:
    """The page's table."""
    lines = [
        "| rung | dtype | stock worker: what happens; reward at the end, by seed | `exact`, driver's half | "
        "`exact` with refusal, YAML alone | refused first at step, because | critical incidents |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        refuse, exact = row.get("refuse", {}), row.get("exact", {})
        why = "; ".join(refuse.get("causes", []))
        first = ", ".join(str(step) for step in refuse.get("first refused", []))
        critical = ", ".join(sorted({*refuse.get("incidents", []), *exact.get("incidents", [])}))
        lines.append(
            f"| {row['rung']} | {row['dtype']} | {_cell(row.get('stock'))} | {_cell(exact)} | {_cell(refuse)} | "
            f"{f'{first}: {why}' if first else ''} | {critical} |"
        )
    return "\n".join(lines) + "\n"


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--home", default=os.environ.get("ROLL_HOME", ""))
    parser.add_argument("--python", default=os.environ.get("ROLL_PYTHON", sys.executable))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[], help="runs whose name begins so")
    parser.add_argument("--resume", action="store_true", help="keep the runs already in the folder")
    parser.add_argument("--small", action="store_true", help="half the problems, a short warm-up: for a test")
    parser.add_argument("--summarise", action="store_true", help="run nothing: the table of the runs in the folder")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    options = arguments(given)
    (options.out / "runs").mkdir(parents=True, exist_ok=True)
    if not options.summarise:
        if not options.home:
            raise SystemExit("rescue: --home or ROLL_HOME must name a checkout of ROLL (688ecd3f)")
        todo = list(jobs_of(options))
        service = Service(options.out)
        service.start()
        begun = time.monotonic()
        try:
            for path in (options.out / "runs").glob("*.json"):
                ask(path, service.url)  # of an earlier call that was ended before it had asked
            with ThreadPoolExecutor(options.jobs) as pool:
                for job, became in zip(todo, pool.map(lambda j: run_job(j, options, service.url), todo), strict=True):
                    print(f"{time.monotonic() - begun:6.0f} s  {job.name}: {', '.join(became)}", flush=True)
        finally:
            service.stop()
    rows = table([json.loads(path.read_text()) for path in sorted((options.out / "runs").glob("*.json"))])
    (options.out / "rescue.json").write_text(json.dumps(rows, indent=1) + "\n")
    (options.out / "rescue.md").write_text(markdown(rows))
    print(options.out / "rescue.md")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
