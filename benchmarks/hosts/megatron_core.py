"""What watching adds to a Megatron-core micro-batch (forward, loss closure, backward) on this CPU, over gloo.

    python -m benchmarks.hosts.megatron_core [--pairs 200] [--way heard] [--layers 4] [--hidden 128] [--json FILE]

The same micro-batch runs with and without `watch.loss`, in turn, the order changing with every pair. Time is the CPU
time of the training thread, which is what a quiet machine's clock would show: one thread computes and nothing waits.
Three ways in which current log-probs come: heard in the closure, given by the model, computed from the logits.
Reported: median of the differences within pairs with its quartiles, and its share of the bare median. Target: 2 % or
1 ms a micro-batch; exits 1 where one way misses both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "collectors" / "adapters"))

import megatron_on_cpu as cpu
import torch

ROWS, POSITIONS, VOCABULARY = 4, 256, 4096
HIDDEN, LAYERS = 128, 4
"""As small as a test's. Log-probs that are computed cost by the vocabulary, the model by its width and depth too."""


def micro_batch() -> dict[str, torch.Tensor]:
    """One micro-batch of the size above; half of each row is a response."""
    torch.manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (ROWS, POSITIONS + 1))
    old = -8.0 + torch.randn(ROWS, POSITIONS)
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:].contiguous(),
        "position_ids": torch.arange(POSITIONS).expand(ROWS, -1),
        "mask": (torch.arange(POSITIONS) >= POSITIONS // 2).float().expand(ROWS, -1),
        "old_log_probs": old,
        "rollout_log_probs": old + 0.02 * torch.randn(ROWS, POSITIONS),
    }


def heard(batch: dict[str, torch.Tensor], output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    from megatron.core import tensor_parallel

    logps = -tensor_parallel.vocab_parallel_cross_entropy(output.float(), batch["labels"])
    return policy_loss(batch, logps)


def given(batch: dict[str, torch.Tensor], output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    return policy_loss(batch, -output)


def computed(batch: dict[str, torch.Tensor], output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    return policy_loss(batch, output.float().log_softmax(-1).gather(-1, batch["labels"][..., None])[..., 0])


def policy_loss(batch: dict[str, torch.Tensor], logps: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    ratio = (logps - batch["old_log_probs"]).exp()
    loss = -(torch.minimum(ratio, ratio.clamp(0.8, 1.2)) * batch["mask"]).sum() / batch["mask"].sum()
    return loss, {}


class Bench:
    """A model, a schedule, and one micro-batch through both."""

    def __init__(self, hidden: int, layers: int) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from foreshock.adapters import megatron_core

        self.batch = micro_batch()
        model = cpu.make_gpt(hidden=hidden, layers=layers, vocabulary=VOCABULARY)
        self.ddp, optimizer = cpu.make_optimizer(model)
        self.schedule = get_forward_backward_func()
        # Nobody listens at the address: the way to the service is not what is measured, and may not matter.
        self.watch = megatron_core.attach(
            "bench/megatron", optimizer=optimizer, model=self.ddp, url="http://127.0.0.1:9",
            spool_dir=tempfile.mkdtemp(),
        )  # fmt: skip
        size = POSITIONS
        self.blocked = torch.ones(size, size).triu(1).bool()[None, None].expand(ROWS, -1, -1, -1)

    def run(self, loss: Any, watched: bool) -> float:
        """Seconds of one micro-batch."""
        batch = self.batch

        def forward_step(iterator: Any, model: Any) -> Any:
            next(iterator)
            labels = batch["labels"] if loss is given else None
            output = model(batch["tokens"], batch["position_ids"], self.blocked, labels=labels)
            closure = partial(loss, batch)
            if watched:
                closure = self.watch.loss(
                    closure, labels=batch["labels"], mask=batch["mask"], old_log_probs=batch["old_log_probs"],
                    rollout_log_probs=batch["rollout_log_probs"],
                )  # fmt: skip
            return output, closure

        self.ddp.zero_grad_buffer()
        began = time.thread_time()
        self.schedule(
            forward_step_func=forward_step, data_iterator=iter([batch]), model=self.ddp, num_microbatches=1,
            seq_length=POSITIONS, micro_batch_size=ROWS, forward_only=False,
        )  # fmt: skip
        return time.thread_time() - began


def measure(bench: Bench, loss: Any, pairs: int) -> dict[str, float]:
    """Median cost of watching, in milliseconds and as a share of the bare micro-batch."""
    bench.watch._hears = None
    for watched in (True, False) * 3:
        bench.run(loss, watched)
    bare, added = [], []
    for index in range(pairs):
        order = (False, True) if index % 2 else (True, False)
        took = {watched: bench.run(loss, watched) for watched in order}
        bare.append(took[False])
        added.append(took[True] - took[False])
        if index % 8 == 7:
            bench.watch.end_step(index)
    quarters = statistics.quantiles(added, n=4)
    return {
        "bare_ms": 1e3 * statistics.median(bare),
        "added_ms": 1e3 * statistics.median(added),
        "added_q1_ms": 1e3 * quarters[0],
        "added_q3_ms": 1e3 * quarters[2],
        "share": statistics.median(added) / statistics.median(bare),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--way", choices=("heard", "given", "computed"), help="one way alone")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--hidden", type=int, default=HIDDEN)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ["MASTER_PORT"] = str(_free_port())
    cpu.begin()
    bench = Bench(options.hidden, options.layers)
    found = {}
    for loss in (heard, given, computed):
        if options.way not in (None, loss.__name__):
            continue
        each = found[loss.__name__] = measure(bench, loss, options.pairs)
        print(
            f"{loss.__name__:9s} bare {each['bare_ms']:7.2f} ms   added {each['added_ms']:6.3f} ms "
            f"[{each['added_q1_ms']:.3f}, {each['added_q3_ms']:.3f}]   {each['share']:.2%}",
            flush=True,
        )
    if options.json:
        options.json.write_text(
            json.dumps({n: getattr(options, n) for n in ("pairs", "layers", "hidden")} | found, indent=1)
        )
    bench.watch.monitor.finish()
    return int(any(each["added_ms"] > 1.0 and each["share"] > 0.02 for each in found.values()))


def _free_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
