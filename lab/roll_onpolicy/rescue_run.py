"""Runs of ROLL's pipeline for ``rescue``, one a seed.

Run by an interpreter with what ROLL imports; each seed is a fork of the process that has imported it. ``--setting``:
*stock* (ROLL's own worker), *refuse* (the watched worker, ``on_policy: exact`` with refusal, from the YAML alone) or
*exact* (``on_policy: exact`` with the driver's half). A run ends early when it is dead, as the ladder's, or when
``PATIENCE`` updates in a row were refused.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

PATIENCE = 12


class EndedError(Exception):
    """The run is dead, or stands."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", required=True)
    parser.add_argument("--rung", required=True)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--setting", choices=("stock", "refuse", "exact"), required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--warm-steps", type=int, default=700)
    parser.add_argument("--out", required=True, help="path of a record, with {seed} in it")
    parser.add_argument("--run", default="rescue/{seed}", help="name of a run at the service, with {seed} in it")
    return parser.parse_args()


def watched(module: Any, options: argparse.Namespace, worker_class: type) -> tuple[type, type]:
    """(pipeline class, worker class) of the setting."""
    if options.setting == "stock":
        return module.RLVRPipeline, worker_class
    from foreshock.adapters.roll import MonitoredActorPGWorker
    from foreshock.adapters.roll.driver import watched_pipeline

    driven = options.setting == "exact"
    return (watched_pipeline(module.RLVRPipeline) if driven else module.RLVRPipeline), MonitoredActorPGWorker


def main() -> int:
    options = arguments()
    sys.path[:0] = [options.home, str(Path(options.home) / "mcore_adapter" / "src")]
    import torch

    torch.set_num_threads(1)
    from lab.roll_onpolicy import real_pipeline

    module = real_pipeline.prepare(options.home)
    failed = 0
    for seed in options.seeds:
        child = os.fork()
        if child == 0:
            try:
                one(module, options, seed)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)  # gloo and Ray threads keep a CPU-only process alive
        failed += os.waitpid(child, 0)[1] != 0
    sys.stderr.flush()
    os._exit(1 if failed else 0)


def one(module: Any, options: argparse.Namespace, seed: int) -> None:
    """One run, from its first rollout to its record."""
    import torch
    from roll.pipeline.rlvr.actor_pg_worker import ActorPGWorker

    from lab.roll_onpolicy import real_pipeline
    from lab.roll_onpolicy.rungs import named
    from lab.roll_onpolicy.train import Plan

    os.environ["FORESHOCK_RUN"] = options.run.format(seed=seed)
    torch.manual_seed(1_000_000 + seed)
    rung = named(options.rung)
    rung = rung.in_bf16() if options.dtype == "bf16" else rung
    plan = Plan(steps=options.steps, prompts=options.prompts, warm_steps=options.warm_steps)
    plan = replace(plan, settings=replace(plan.settings, ranks=1))
    pipeline_class, worker_class = watched(module, options, ActorPGWorker)
    with tempfile.TemporaryDirectory() as folder:
        made = real_pipeline.pipeline(module, pipeline_class, worker_class, options.home, rung, seed, plan, folder)
        seen = Seen(made, options)
        status = seen.run(module)
    result = {
        "rung": options.rung, "dtype": options.dtype, "seed": seed, "setting": options.setting,
        "status": status, "steps": seen.steps, "refused": seen.refused, "seconds": round(seen.seconds, 1),
    }  # fmt: skip
    Path(options.out.format(seed=seed)).write_text(json.dumps(result, sort_keys=True))


class Seen:
    """What happened, step by step: read from the worker after each step, nothing changed."""

    def __init__(self, made: Any, options: argparse.Namespace):
        self.made, self.options = made, options
        self.steps: list[dict[str, Any]] = []
        self.refused: list[dict[str, Any]] = []
        self.seconds = 0.0
        self.pair: list[tuple[Any, Any, Any]] = []
        self._watch_loss()
        if options.setting != "stock":
            self._attach()
        track = made.tracker
        track.log = self.after

    def _attach(self) -> None:
        from foreshock.adapters.roll.watch import attach

        self.made.worker._foreshock = attach(self.made.worker)
        if self.options.setting == "exact":
            from foreshock.adapters.roll.driver import Driver

            self.made._foreshock = Driver(self.made)

    def _watch_loss(self) -> None:
        """Reads (current, old, mask) where the real ``loss_func`` has just computed them."""
        strategy = self.made.worker.strategy
        original = strategy.train_step

        def train_step(batch: Any, loss_func: Any) -> Any:
            def looked_at(data: Any, output: Any) -> Any:
                result = loss_func(data, output)
                cached = self.made.worker._cached_metrics
                mask = data.batch["response_mask"][:, 1:] > 0
                delta = (cached["log_probs"].detach() - cached["old_log_probs"]).double()[mask]
                self.pair.append((0.5 * delta.square().sum(), mask.sum(), delta.abs().max() if len(delta) else 0.0))
                return result

            return original(batch, looked_at)

        strategy.train_step = train_step

    def after(self, values: dict[str, Any], step: int) -> None:
        """ROLL's tracker is called at the end of every step."""
        line = dict(self.made.scheduler.steps[-1])
        total = sum(float(t) for _, t, _ in self.pair)
        line["policy.kl_k2"] = sum(float(s) for s, _, _ in self.pair) / total if total else None
        line["grad_norm"] = values.get("actor_train/grad_norm")
        self.pair.clear()
        watch = self.made.worker.__dict__.get("_foreshock")
        line["refused"] = watch.updates.refused if watch is not None else ""
        if line["refused"]:
            self.refused.append({"step": step, "cause": line["refused"]})
        self.steps.append(line)
        if len(self.steps) >= PATIENCE and all(s["refused"] for s in self.steps[-PATIENCE:]):
            raise EndedError("refused")
        if len(self.steps) >= PATIENCE and all(s["truncated"] > 0.98 for s in self.steps[-PATIENCE:]):
            raise EndedError("dead")

    def run(self, module: Any) -> str:
        from foreshock.adapters.roll.driver import watch_groups
        from foreshock.adapters.roll.worker import StopAskedError

        if self.options.setting == "exact":
            watch_groups(module, lambda: self.made._foreshock)
        gc.freeze()  # ROLL collects garbage after every call of a worker; all of ROLL's modules need no look each time
        begun = time.process_time()
        try:
            self.made.run()
            status = "completed"
        except EndedError as why:
            status = str(why)
        except StopAskedError as why:
            status = f"stopped: {why}"
        except ValueError as why:
            # A policy that has died produces batches that ROLL's own functions refuse. Any other error is ours.
            if not traceback.extract_tb(why.__traceback__)[-1].filename.startswith(self.options.home):
                raise
            status = f"raised: {why}"
        self.seconds = time.process_time() - begun
        watch = self.made.worker.__dict__.get("_foreshock")
        if watch is not None:
            watch.monitor.finish("completed")
        return status


if __name__ == "__main__":
    raise SystemExit(main())
