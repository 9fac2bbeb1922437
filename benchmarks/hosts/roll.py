"""What the watched ROLL worker adds to a micro-batch, beside the same worker unwatched.

    python benchmarks/hosts/roll.py [--json FILE] [--pairs 200] [--vocabulary 32768]
    ROLL_HOME=… python benchmarks/hosts/roll.py       # ROLL's own ActorPGWorker.loss_func

A micro-batch is ROLL's `loss_func` on real logits and its backward pass; model forward and backward, which cost far
more, are left out, so the share told here is an upper bound. Pairs alternate in order; the median of their differences
is reported, with the share of the unwatched median. What is added does not depend on the vocabulary, what it is added
to does: at a toy vocabulary the share is large, and the milliseconds are what counts. Exits 1 above 2 % or 1 ms,
whichever is larger.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", FORESHOCK_URL="", FORESHOCK_RUN="bench/roll")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "collectors")]

import torch  # noqa: E402

ROWS, LENGTH = 1, 256


def worker_class(home: str | None) -> tuple[type, Any]:
    """(ROLL's own worker, or the named fake; the DataProto that goes with it)."""
    if home:
        from lab.roll_onpolicy.real_path import RealPath

        path = RealPath(home)
        return type(path.worker), path
    import importlib.util

    spec = importlib.util.spec_from_file_location("roll_fake", ROOT / "tests/collectors/adapters/roll_fake.py")
    assert spec is not None
    assert spec.loader is not None
    fake = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fake)
    return fake.FakeWorker, fake


def batch(proto: Any, vocabulary: int) -> tuple[Any, torch.Tensor]:
    """A micro-batch of ROWS × LENGTH tokens and its logits [ROWS, LENGTH, vocabulary]."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (ROWS, 1), generator=draw)
    attention = (torch.arange(LENGTH)[None] < lengths).long()
    response = attention * (torch.arange(LENGTH)[None] >= 64)
    ids = torch.randint(2, vocabulary, (ROWS, LENGTH), generator=draw) * attention
    logits = torch.randn(ROWS, LENGTH, vocabulary, generator=draw)
    old = torch.log_softmax(logits, -1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0] * response[:, 1:]
    data = proto.from_dict(tensors={
        "input_ids": ids, "attention_mask": attention, "response_mask": response, "old_log_probs": old,
        "ref_log_probs": torch.zeros_like(old), "advantages": torch.randn(old.shape, generator=draw),
        "final_response_mask": response[:, 1:].float(), "infer_logprobs": old + 0.01,
        "train_infer_is_weight": torch.ones_like(old), "scores": torch.ones(ROWS),
    })  # fmt: skip
    tokens, rows = int(response[:, 1:].sum()), ROWS
    for name, value in (("batch_num_tokens", tokens), ("global_valid_samples", rows)):
        data.meta_info[name] = {"response_mask": value, "final_response_mask": value}
    return data, logits


def build(base: type, source: Any, watched: bool) -> Any:
    """A worker whose `loss_func` can be called; watched by a monitor that measures and sends nothing."""
    from types import SimpleNamespace

    from foreshock.adapters.roll.options import Options
    from foreshock.adapters.roll.ranks import Exchange
    from foreshock.adapters.roll.watch import Watch
    from foreshock.adapters.roll.worker import monitored

    chosen = monitored(base) if watched else base
    if hasattr(source, "strategy"):
        from lab.roll_onpolicy import real_path
        from lab.roll_onpolicy.path import Settings

        worker = chosen.__new__(chosen)
        worker.__dict__.update(source.worker.__dict__)
        worker.strategy = real_path.FakeStrategy(source.source.log_probs, source.normalisation == "global")
        worker.pipeline_config = real_path._config(Settings())
        worker.worker_config = SimpleNamespace(use_dynamic_batching_in_train=True, checkpoint_config=None)
        worker.rank_info = SimpleNamespace(rank=0, world_size=1, tp_rank=0, cp_rank=0, tp_size=1, cp_size=1)
    else:
        worker = chosen(tempfile.mkdtemp())
        base.initialize(worker, None)
    if watched:
        import foreshock

        monitor = foreshock.init(run="bench/roll", url="http://127.0.0.1:9", spool_dir=tempfile.mkdtemp())
        worker._foreshock = Watch(worker, monitor, Options(), Exchange())
    return worker


def micro_batch(worker: Any, data: Any, logits: torch.Tensor) -> float:
    """Seconds of this thread's CPU for one loss and its backward pass: what a busy neighbour takes does not count."""
    leaf = logits.clone().requires_grad_()
    begun = time.thread_time()
    loss, _ = worker.loss_func(data, leaf * 1.0)
    loss.backward()
    return time.thread_time() - begun


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--vocabulary", type=int, default=32768)
    options = parser.parse_args()
    torch.set_num_threads(1)
    home = os.environ.get("ROLL_HOME")
    base, source = worker_class(home)
    proto = source.source.proto if home else source.Proto
    data, logits = batch(proto, options.vocabulary)
    plain, watched = build(base, source, False), build(base, source, True)
    pairs = []
    for index in range(options.pairs + 5):
        first, second = (plain, watched) if index % 2 else (watched, plain)
        times = {id(first): micro_batch(first, data, logits), id(second): micro_batch(second, data, logits)}
        pairs.append((times[id(plain)], times[id(watched)]))
        if index % 17 == 16:  # as many micro-batches as the seed's step has
            watched._foreshock.monitor.end_step(index)
    pairs = pairs[5:]
    unwatched = statistics.median(a for a, _ in pairs)
    added = statistics.median(b - a for a, b in pairs)
    result = {
        "source": "ROLL" if home else "the named fake", "rows": ROWS, "length": LENGTH,
        "vocabulary": options.vocabulary, "pairs": len(pairs), "unwatched_ms": round(unwatched * 1e3, 3),
        "added_ms": round(added * 1e3, 3),
        "added_share": round(added / unwatched, 4),
    }  # fmt: skip
    print(json.dumps(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    return 0 if added <= max(1e-3, 0.02 * unwatched) else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # the monitor's backlog is not worth waiting for
