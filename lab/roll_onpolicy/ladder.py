"""Run the ladder: ``python -m lab.roll_onpolicy.ladder --out FOLDER [--small] [--jobs 2]``.

Writes ``ladder.json`` (every figure of the table), ``ladder.md`` and plots, and ``runs/`` with each run's steps. The
same command gives the same table; ended early, ``--resume`` goes on. ``timings.json`` has each run's seconds of CPU.
With ``ROLL_HOME`` set, or ``--home``, ROLL's own functions carry the partition, the log-probs, the advantages and the
loss; rungs that need the other version's normalisation are listed as not run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lab.roll_onpolicy import summary
from lab.roll_onpolicy.rungs import FIVE_SEEDS, IN_BF16, LADDER, ONE_SEED, SMALL, Rung
from lab.roll_onpolicy.train import Plan

#: the figures of a step that the plots and the summary read
KEPT = ("reward", "reward_all", "length", "truncated", "entropy", "approxkl", "grad_norm", "loss", "mixed")


@dataclass(frozen=True)
class Job:
    """One run: rung, dtype of the trainer's passes, seed, and where ROLL's source is ('' for our own path)."""

    rung: Rung
    dtype: str
    seed: int
    plan: Plan
    home: str

    @property
    def slug(self) -> str:
        words = "".join(c if c.isalnum() else "-" for c in self.rung.name)
        return f"{words}__{self.dtype}__{self.seed}"


def run_job(job: Job) -> dict[str, Any]:
    """The run's steps, reduced to what is kept. One thread: the order of sums is part of the result."""
    import torch

    torch.set_num_threads(1)
    from lab.roll_onpolicy.own_path import OwnPath
    from lab.roll_onpolicy.path import Path as TrainerPath
    from lab.roll_onpolicy.train import Run

    path: TrainerPath = OwnPath()
    rung = job.rung.in_bf16() if job.dtype == "bf16" else job.rung
    if job.home:
        from lab.roll_onpolicy.real_path import RealPath

        path = real = RealPath(job.home)
        if rung.normalisation == "micro_batch" and real.normalisation != "micro_batch":
            reason = "this source normalises over the whole mini-batch"
            return {"rung": rung.name, "dtype": job.dtype, "seed": job.seed, "not_run": reason}
        rung = replace(rung, normalisation=real.normalisation)
    steps = [
        {"step": line["step"], "policy": line["policy"], "mismatch": line["mismatch"]} | {k: line[k] for k in KEPT}
        for line in Run(rung, path, job.seed, job.plan).run()
    ]
    return {"rung": job.rung.name, "dtype": job.dtype, "seed": job.seed, "path": path.name, "steps": steps}


def timed_job(job: Job) -> tuple[dict[str, Any], float]:
    """(the run, its seconds of CPU)."""
    begun = time.process_time()
    return run_job(job), time.process_time() - begun


def seeds_of(rung: Rung, dtype: str, seeds: int) -> int:
    """How many seeds a rung is given: one where it repeats the baseline, two more in float32 where a run may crash."""
    if rung.name in ONE_SEED:
        return 1
    return seeds + 2 if rung.name in FIVE_SEEDS and dtype == "fp32" else seeds


def jobs_of(options: argparse.Namespace) -> list[Job]:
    plan = Plan(steps=options.steps)
    rungs = list(LADDER)
    dtypes = {"fp32": {r.name for r in LADDER}, "bf16": set(IN_BF16)}
    if options.small:
        plan = replace(plan, steps=min(options.steps, 10), prompts=8, warm_steps=120)
        rungs, options.seeds = [r for r in LADDER if r.name in SMALL], 1
        dtypes = {"fp32": set(SMALL), "bf16": {"other partition, split-K"}}
    if options.only:
        rungs = [r for r in rungs if any(word in r.name for word in options.only)]
    return [
        Job(r, dtype, seed, plan, options.home)
        for seed in range(1 if options.small else options.seeds + 2)
        for dtype in ("fp32", "bf16")
        for r in rungs
        if r.name in dtypes[dtype] and seed < seeds_of(r, dtype, options.seeds)
    ]


def run_all(jobs: list[Job], folder: Path, workers: int, resume: bool) -> list[dict[str, Any]]:
    """Every run, written as it ends; with ``resume`` those already written are read instead."""
    folder.mkdir(parents=True, exist_ok=True)
    todo = [j for j in jobs if not (resume and (folder / f"{j.slug}.json").exists())]
    begun, timings = time.monotonic(), folder.parent / "timings.json"
    spent: dict[str, float] = json.loads(timings.read_text()) if resume and timings.exists() else {}

    def keep(job: Job, done: tuple[dict[str, Any], float]) -> None:
        spent[job.slug] = round(done[1], 1)
        (folder / f"{job.slug}.json").write_text(json.dumps(done[0], sort_keys=True))
        timings.write_text(json.dumps(spent, indent=1, sort_keys=True))
        print(f"{time.monotonic() - begun:7.0f} s  {job.slug}", flush=True)

    if workers > 1:
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            for job, result in zip(todo, pool.map(timed_job, todo), strict=True):
                keep(job, result)
    else:
        for job in todo:
            keep(job, timed_job(job))
    return [json.loads((folder / f"{j.slug}.json").read_text()) for j in jobs]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", action="store_true", help="five rungs, one seed, ten steps: for CI")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[], help="rungs whose name has one of these words")
    parser.add_argument("--home", default=os.environ.get("ROLL_HOME", ""), help="ROLL's source; default $ROLL_HOME")
    parser.add_argument("--resume", action="store_true", help="keep the runs already in the folder")
    parser.add_argument("--megatron", type=Path, help="megatron.json of megatron_rungs, to be shown in the table")
    parser.add_argument("--no-plots", action="store_true")
    parser.add_argument("--summarise", action="store_true", help="run nothing: the table of the runs in the folder")
    options = parser.parse_args(arguments)
    if options.summarise:
        results = [json.loads(p.read_text()) for p in sorted((options.out / "runs").glob("*.json"))]
    else:
        results = run_all(jobs_of(options), options.out / "runs", options.jobs, options.resume)
    table = summary.table(results)
    megatron = json.loads(options.megatron.read_text()) if options.megatron else None
    (options.out / "ladder.json").write_text(json.dumps({"rungs": table, "megatron": megatron}, indent=1))
    (options.out / "ladder.md").write_text(summary.markdown(table, megatron))
    if not options.no_plots and not options.small:
        from lab.roll_onpolicy import plots

        plots.draw(results, table, options.out)
    print(options.out / "ladder.md")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
