"""The driver's half on ROLL's own `RLVRPipeline.run`, by an interpreter that has ROLL: see `test_roll_pipeline.py`.

The lab's harness (`lab.roll_onpolicy.real_pipeline`) builds ROLL's pipeline, cluster and worker on a CPU, fakes only
for what needs an accelerator. At step `--wait-at` the loop waits until a command is in the SDK's queue. Writes which
steps were trained in which order, a digest of the weights at the head of each, and the correction weights that came in.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--home", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--wait-at", type=int, default=-1)
    parser.add_argument("--rung", default="identical")
    options = parser.parse_args()
    sys.path[:0] = [options.home, str(Path(options.home) / "mcore_adapter" / "src")]
    import torch

    torch.set_num_threads(1)
    from lab.roll_onpolicy import real_pipeline
    from lab.roll_onpolicy.rungs import named
    from lab.roll_onpolicy.train import Plan

    module = real_pipeline.prepare(options.home)
    from foreshock.adapters.roll import MonitoredActorPGWorker
    from foreshock.adapters.roll.driver import Driver, watch_groups, watched_pipeline
    from foreshock.adapters.roll.watch import attach

    plan = Plan(steps=options.steps, prompts=8, warm_steps=60)
    plan = replace(plan, settings=replace(plan.settings, ranks=1))
    classes = (watched_pipeline(module.RLVRPipeline), MonitoredActorPGWorker)
    rung = named(options.rung)
    made = real_pipeline.pipeline(module, *classes, options.home, rung, 0, plan, options.folder, checkpoint_every=2)
    made.worker._foreshock = attach(made.worker)
    made._foreshock = Driver(made)
    watch_groups(module, lambda: made._foreshock)
    seen = Seen(made, options.wait_at)
    returned = made.run()
    result = {
        "trained": seen.trained, "tracked": seen.tracked, "weights": seen.weights, "digests": seen.digests,
        "returned": returned, "step": made.state.step, "history": [m["system/step"] for m in made.state.log_history],
        "errors": made._foreshock.guard.errors + made.worker._foreshock.guard.errors,
    }  # fmt: skip
    options.out.write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # gloo and Ray threads keep a CPU-only process alive


class Seen:
    """Looks on where the scheduler is asked, where the strategy trains, and where ROLL's tracker is told."""

    def __init__(self, made: Any, wait_at: int):
        self.made, self.wait_at = made, wait_at
        self.trained: list[int] = []
        self.tracked: list[int] = []
        self.weights: list[float] = []
        self.digests: list[str] = []
        scheduler, strategy = made.scheduler, made.worker.strategy
        self._ask, self._train = scheduler.get_batch, strategy.train_step
        scheduler.get_batch, strategy.train_step = self.ask, self.train
        made.tracker.log = lambda values, step: self.tracked.append(step)

    def ask(self, data: Any, **named: Any) -> Any:
        step = data.meta_info["global_step"]
        self.trained.append(step)
        sha = hashlib.sha256()
        for weight in self.made.worker.strategy.masters.values():
            sha.update(weight.detach().numpy().tobytes())
        self.digests.append(sha.hexdigest()[:16])
        if step == self.wait_at and self.trained.count(step) == 1:
            until = time.monotonic() + 20
            while not len(self.made._foreshock.monitor._process.inbox) and time.monotonic() < until:
                time.sleep(0.02)
        return self._ask(data, **named)

    def train(self, batch: Any, loss_func: Any) -> Any:
        def looked_at(data: Any, output: Any) -> Any:
            result = loss_func(data, output)
            keys = data.batch.keys()
            if "train_infer_is_weight" in keys:
                most.append(float((data.batch["train_infer_is_weight"] - 1).abs().max()))
            return result

        most: list[float] = [0.0]
        done = self._train(batch, looked_at)
        self.weights.append(max(most))
        return done


if __name__ == "__main__":
    main()
