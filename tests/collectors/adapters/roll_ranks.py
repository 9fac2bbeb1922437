"""The watched worker on ROLL's own strategy, one process a rank: run by torchrun from `test_roll_real.py`.

The lab's harness (`lab.roll_onpolicy.megatron_worker`) builds ROLL's real worker on a CPU; here its class is the
watched one. `--plan` is JSON, {step: [action, …]}: applied on every rank before a step, as the driver's half would; the
kind `save` is ROLL's own `do_checkpoint`, and a `rollback` names the step that was saved.
Writes what each step did, and a digest of parameters, moments and schedule around it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from lab.roll_onpolicy import megatron_worker as harness


def digest(worker: Any) -> dict[str, str]:
    """Parameters, optimizer moments and schedule of this rank, to the bit."""
    import torch

    def of(tensors: list[Any]) -> str:
        sha = hashlib.sha256()
        for tensor in tensors:
            sha.update(tensor.detach().to(torch.float64).numpy().tobytes())
        return sha.hexdigest()[:16]

    strategy = worker.strategy
    moments = []
    for chained in getattr(strategy.optimizer, "chained_optimizers", [strategy.optimizer]):
        for state in chained.optimizer.state.values():
            moments += [value for value in state.values() if torch.is_tensor(value)]
    return {
        "parameters": of([p.data for p in strategy.models_unwrapped[0].parameters()]), "moments": of(moments),
        "schedule": json.dumps(strategy.scheduler.state_dict(), default=str, sort_keys=True),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plan", default="{}")
    parser.add_argument("--engine", choices=("none", "same", "noisy"), default="none")
    parser.add_argument("--mixed", action="store_true")
    mine, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    options = harness.arguments()
    harness.add_source(options.home, options.megatron)
    logging.disable(logging.ERROR)
    import torch

    torch.set_num_threads(1)
    from lab.roll_onpolicy import cpu_shim

    cpu_shim.install()
    import mcore_adapter  # noqa: F401
    import roll.platforms  # noqa: F401

    cpu_shim.install_platforms()
    cpu_shim.install_no_ray()
    from roll.pipeline.rlvr import actor_pg_worker

    from foreshock.adapters import roll as adapter
    from foreshock.adapters.roll.watch import attach

    harness.rollouts = with_shared_prompts(harness.rollouts)
    harness.with_stale = Restoring
    stock = actor_pg_worker.ActorPGWorker
    watched = adapter.monitored(stock, "MonitoredActorPGWorker")
    actor_pg_worker.ActorPGWorker = watched
    plan = json.loads(mine.plan)
    with tempfile.TemporaryDirectory() as folder:
        harness.tiny_checkpoint(folder)
        worker = harness.real_worker(options, folder)
        worker.pipeline_config.actor_infer.strategy_args = argparse.Namespace(strategy_name="sglang")
        worker.pipeline_config.output_dir = str(Path(options.out).parent / "output")
        worker.worker_config.checkpoint_config = {"async_upload": False}
        worker.strategy.checkpoint_manager = argparse.Namespace(upload=lambda **kwargs: None)
        worker._foreshock = attach(worker)
        assert (worker._foreshock is not None) == bool(os.environ.get("FORESHOCK_URL"))
        step = Step(worker, options, mine)
        lines = []
        for index in range(options.steps):
            answers = [act(worker, a["kind"], a.get("arguments", {})) for a in plan.get(str(index), [])]
            before = digest(worker)
            line = step.run(index)
            lines.append(line | {"answers": answers, "before_digest": before, "after_digest": digest(worker)})
        if worker._foreshock is not None:
            worker._foreshock.monitor.finish("completed")
    if worker.rank == 0:
        Path(options.out).write_text(json.dumps({"steps": lines, "errors": errors(worker)}, indent=1, default=str))
    torch.distributed.barrier()
    os._exit(0)  # gloo and Ray threads keep a CPU-only process alive


def act(worker: Any, kind: str, arguments: dict[str, Any]) -> Any:
    from foreshock.adapters.roll.scalars import checkpoint_path

    if kind == "save":
        worker.do_checkpoint(arguments["step"])
        return "saved", checkpoint_path(worker, arguments["step"])
    if kind == "rollback":
        arguments = arguments | {"checkpoint": checkpoint_path(worker, arguments["step"])}
    return worker.foreshock_apply(kind, arguments)


def with_shared_prompts(draw: Any) -> Any:
    """The harness's rows have a prompt each; here the rows of a group share theirs."""

    def rollouts(step: int, weights_seed: int = 0) -> dict[str, Any]:
        import torch

        rows = draw(step, weights_seed)
        group, ids = rows["group_id"], rows["input_ids"]
        first = torch.stack([(group == g).nonzero()[0, 0] for g in group])
        prompt = (rows["attention_mask"] > 0) & (rows["response_mask"] == 0)
        rows["input_ids"] = torch.where(prompt, ids[first], ids)
        return dict(rows)

    return rollouts


class Restoring(harness.with_stale):
    """The harness ends its staleness at the optimizer's step; where that is refused, it ends here."""

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        watch = self.worker._foreshock
        if self.saved is not None and watch is not None and watch.updates.skipped:
            for p, value in zip(self.parameters(), self.saved, strict=True):
                p.data.copy_(value)


class Step(harness.Step):
    """The harness's step with an engine: its log-probs are the trainer's own at the head of the step, or noisy ones."""

    def __init__(self, worker: Any, options: argparse.Namespace, mine: argparse.Namespace):
        super().__init__(worker, options)
        self.chosen = mine

    def advantages(self, batch: Any) -> Any:
        import torch

        if self.chosen.engine != "none" and "old_log_probs" in batch.batch.keys():  # noqa: SIM118 - a TensorDict
            engine = batch.batch["old_log_probs"].clone()
            if self.chosen.engine == "noisy":
                engine += 0.3 * torch.randn(engine.shape, generator=torch.Generator().manual_seed(1))
            batch.batch["infer_logprobs"] = engine
        if self.chosen.mixed:  # what ROLL did from 2025-10-29 to 2026-02-04: rows by length when groups are formed
            batch.reorder(torch.argsort(batch.batch["response_mask"].sum(-1)))
            batch.batch["prompt_id"] = torch.arange(len(batch))
        return super().advantages(batch)


def errors(worker: Any) -> int:
    return worker._foreshock.guard.errors if worker._foreshock is not None else 0


if __name__ == "__main__":
    main()
