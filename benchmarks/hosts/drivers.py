"""What the adapters of verl, slime, OpenRLHF, SkyRL, NeMo-RL and prime-rl add to what their hosts do, on this CPU.

    python -m benchmarks.hosts.drivers [--only verl slime …] [--pairs 40] [--json FILE]
    SLIME_HOME=… OPENRLHF_HOME=… python -m benchmarks.hosts.drivers

Each adapter's own code for one micro-batch (verl, slime, OpenRLHF: in the workers) or one step (SkyRL, NeMo-RL: on the
driver, the whole batch; prime-rl: in a process of its own). Where the host's own loss can be imported here it is run on
the same tensors, forward and backward, with and without in turn: verl's from its distribution, slime's and OpenRLHF's
from a checkout. What comes before a loss, the model's forward and backward, is left out, so shares are upper bounds.
Time is the CPU time of the calling thread; medians of the pairs' differences.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

os.environ.update(OMP_NUM_THREADS="1", FORESHOCK_URL="http://127.0.0.1:9", FORESHOCK_RUN="bench/drivers")
os.environ.update(FORESHOCK_SPOOL_DIR=tempfile.mkdtemp(), FORESHOCK_FINISH_S="0.1")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/collectors/adapters")]

import torch  # noqa: E402

import foreshock  # noqa: E402

ROWS, BATCH, LENGTH, PROMPT = 8, 512, 2048, 128
"""Sequences of a micro-batch and of a step, sampled tokens at most, prompt tokens."""
VOCABULARY, SLIME_LENGTH = 4096, 512
"""slime's loss begins at the logits, of which a CPU holds fewer."""


class Case(NamedTuple):
    """One host: `bare()` is the host's own, `watched()` the same with the adapter; without a host's, bare is None."""

    what: str
    tokens: int
    bare: Callable[[], Any] | None
    watched: Callable[[], Any]
    end: Callable[[int], Any]


def monitor() -> foreshock.Monitor:
    """Measures, seals, and has nobody to send to."""
    return foreshock.init("bench/drivers", role="trainer", rank=0, world=1)


def sampled(rows: int, length: int = LENGTH) -> dict[str, torch.Tensor]:
    """Old and engine's log-probs, advantages, ids and a mask [rows, length] of responses of different lengths."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(length // 4, length + 1, (rows, 1), generator=draw)
    mask = (torch.arange(length)[None] < lengths).float()
    old = -torch.rand(rows, length, generator=draw) * 3 * mask
    return {
        "mask": mask, "old": old, "rollout": (old + 0.02 * torch.randn(rows, length, generator=draw)) * mask,
        "advantages": torch.randn(rows, 1, generator=draw).expand(-1, length) * mask,
        "ids": torch.randint(0, VOCABULARY, (rows, length), generator=draw), "lengths": lengths[:, 0],
    }  # fmt: skip


def verl() -> Case:
    """`ppo_loss` of the installed verl on a jagged micro-batch; the adapter's wrapper of it."""
    import verl_fake as fake
    from tensordict import TensorDict
    from verl.utils import tensordict_utils

    from foreshock.adapters.verl import worker as adapter

    with tempfile.TemporaryDirectory() as folder:
        worker = fake.make_worker(fake.make_config(Path(folder)))
    loss_fn, rows = worker.actor.loss_fn, sampled(ROWS)
    note = {"run": "bench/verl", "launch": "one", "bypass": False, "settings": {"url": os.environ["FORESHOCK_URL"]}}
    watch = adapter.Watch(worker, note)

    def jagged(parts: list[torch.Tensor]) -> Any:
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    def responses(name: str) -> Any:
        return jagged([row[:n] for row, n in zip(rows[name], rows["lengths"].tolist(), strict=True)])

    prompts, answers = [torch.arange(PROMPT) for _ in range(ROWS)], responses("ids").unbind()
    whole = [torch.cat(pair) for pair in zip(prompts, answers, strict=True)]
    data = TensorDict(
        {"prompts": jagged(prompts), "responses": responses("ids"), "input_ids": jagged(whole),
         "old_log_probs": responses("old"), "rollout_log_probs": responses("rollout"),
         "advantages": responses("advantages"), "loss_mask": responses("mask"), "response_mask": responses("mask")},
        batch_size=[ROWS],
    )  # fmt: skip
    tokens = int(rows["mask"].sum())
    for name, value in (("dp_size", 1), ("batch_num_tokens", float(tokens)), ("global_batch_size", ROWS)):
        tensordict_utils.assign_non_tensor(data, **{name: value})
    current = torch.cat([torch.cat([torch.zeros(PROMPT), row]) for row in responses("old").unbind()]).roll(-1)

    def once(loss: Callable[..., Any]) -> None:
        leaf = current.clone().requires_grad_()
        logps = torch.nested.nested_tensor_from_jagged(leaf * 1.0, offsets=data["input_ids"].offsets())
        loss(model_output={"log_probs": logps}, data=data, dp_group=None)[0].backward()

    def watched(*args: Any, **kwargs: Any) -> Any:
        return watch._loss(loss_fn, *args, **kwargs)

    return Case("a micro-batch", tokens, lambda: once(loss_fn), lambda: once(watched), watch.monitor.end_step)


def slime() -> Case:
    """`policy_loss_function` on logits: slime's own with SLIME_HOME, on a real parallel state; else a stand-in."""
    import slime_fake as fake

    from foreshock.adapters import slime as adapter

    home, loss = os.environ.get("SLIME_HOME"), fake.fake_loss()
    if home:
        from megatron.core import parallel_state

        sys.path.append(home)
        where = f"file://{tempfile.mkdtemp()}/rendezvous"
        torch.distributed.init_process_group("gloo", init_method=where, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        loss = importlib.import_module("slime.backends.megatron_utils.loss")
    rows, args = sampled(ROWS, SLIME_LENGTH), fake.make_args()
    lengths = rows["lengths"].tolist()

    def responses(name: str) -> list[torch.Tensor]:
        return [row[:n] for row, n in zip(rows[name], lengths, strict=True)]

    batch: dict[str, Any] = {
        "unconcat_tokens": [torch.cat([torch.zeros(4, dtype=torch.long), row]) for row in responses("ids")],
        "loss_masks": responses("mask"), "rollout_log_probs": responses("rollout"), "log_probs": responses("old"),
        "advantages": responses("advantages"), "response_lengths": lengths, "total_lengths": [n + 4 for n in lengths],
        "rollout_mask_sums": [row.sum() for row in responses("mask")],
    }  # fmt: skip
    logits = torch.randn(1, sum(batch["total_lengths"]), VOCABULARY)
    table = torch.zeros(1, requires_grad=True)
    optimizer = fake.Optimizer(table)
    place = adapter.batches.Place(0, 1, True, True)
    watch = adapter.SlimeAdapter(args, monitor(), True, place, optimizer, fake.Scheduler(optimizer))
    plain = {name: getattr(loss, name) for name in ("policy_loss_function", "get_log_probs_and_entropy")}

    def once(observed: bool) -> None:
        leaf = logits.requires_grad_()
        leaf.grad = None
        around = {"policy_loss_function": watch._loss, "get_log_probs_and_entropy": watch._scoring}
        for name, original in plain.items():
            ours = (lambda *a, n=name, o=original, **k: around[n](o, *a, **k)) if observed else original
            setattr(loss, name, ours)
        result = loss.policy_loss_function(args, batch, leaf, lambda x: x.mean())
        result[0].backward()

    what = "a micro-batch, from logits" + ("" if home else " (a stand-in's loss)")
    tokens = int(rows["mask"].sum())
    return Case(what, tokens, lambda: once(False), lambda: once(True), watch.monitor.end_step)


def openrlhf() -> Case:
    """`PolicyLoss` on a padded micro-batch: OpenRLHF's own with OPENRLHF_HOME, else a stand-in."""
    import openrlhf_fake as fake

    from foreshock.adapters.openrlhf_worker import WorkerPart

    home, args, rows = os.environ.get("OPENRLHF_HOME"), fake.make_args(), sampled(ROWS)
    worker = fake.PolicyModelActor(1, 0, args)
    if home:
        made = _openrlhf_loss(Path(home) / "openrlhf/models")
        worker.trainer.actor_loss_fn = made(enable_vllm_is_correction=True, vllm_is_truncated_threshold=[0.5, 5.0])
    loss = worker.trainer.actor_loss_fn
    bare = loss.forward
    settings = {"url": os.environ["FORESHOCK_URL"]}
    part = WorkerPart(worker, {"run": "bench/openrlhf", "launch": "one", "settings": settings})
    watched = loss.forward
    part._experience = SimpleNamespace(sequences=rows["ids"], base_action_log_probs=None)

    def once(forward: Callable[..., Any]) -> None:
        leaf = rows["old"].clone().requires_grad_()
        found = forward(
            leaf * 1.0, rows["old"], rows["advantages"], action_mask=rows["mask"], rollout_log_probs=rows["rollout"]
        )
        (found[0] if isinstance(found, tuple) else found).backward()

    what = "a micro-batch" + ("" if home else " (a stand-in's loss)")
    return Case(what, int(rows["mask"].sum()), lambda: once(bare), lambda: once(watched), part.monitor.end_step)


def _openrlhf_loss(folder: Path) -> Any:
    """The class, with only its own helper module beside it; that one imports deepspeed, which the loss does not use."""
    sys.modules.setdefault("deepspeed", ModuleType("deepspeed"))
    package = sys.modules["openrlhf_models"] = ModuleType("openrlhf_models")
    package.__path__ = [str(folder)]
    return importlib.import_module("openrlhf_models.loss").PolicyLoss


def skyrl() -> Case:
    """`on_step_end` of the callback: the whole step's batch on the driver."""
    import skyrl_fake as fake

    from foreshock.adapters.skyrl import SkyRLCallback

    rows = sampled(BATCH)
    callback = SkyRLCallback(fake.RayPPOTrainer(), monitor())
    batch = {
        "sequences": rows["ids"], "loss_mask": rows["mask"], "action_log_probs": rows["old"],
        "rollout_logprobs": rows["rollout"], "advantages": rows["advantages"],
    }  # fmt: skip
    told = SimpleNamespace(batch=batch)
    watched = lambda: callback.on_step_end(None, told, SimpleNamespace())  # noqa: E731
    return Case("a step, on the driver", int(rows["mask"].sum()), None, watched, callback.monitor.end_step)


def nemo_rl() -> Case:
    """Ahead of `policy.train`: the whole step's batch on the driver."""
    import nemo_rl_fake as fake

    from foreshock.adapters.nemo_rl import NeMoRLAdapter

    rows = sampled(BATCH)
    watch = NeMoRLAdapter(fake.Policy(), fake.Checkpointer(), fake.make_config(), monitor())
    watch.config.policy["generation"]["vllm_cfg"] = {"logprobs_mode": "processed_logprobs"}
    batch = {
        "input_ids": rows["ids"], "token_mask": rows["mask"], "sample_mask": torch.ones(BATCH),
        "prev_logprobs": rows["old"], "generation_logprobs": rows["rollout"], "advantages": rows["advantages"],
    }  # fmt: skip
    tokens = int(rows["mask"][:, 1:].sum())
    return Case("a step, on the driver", tokens, None, lambda: watch._look(batch, fake.Loss()), watch.monitor.end_step)


def prime_rl() -> Case:
    """One exported step's file, read and observed by the follower, beside the job."""
    from foreshock.adapters.prime_rl import Follower

    rows, folder = sampled(64), Path(tempfile.mkdtemp())
    step = folder / "token_exports/step_0"
    step.mkdir(parents=True)
    with (step / "rank_0.jsonl").open("w") as file:
        for row, n in enumerate(rows["lengths"].tolist()):
            columns = {"trainer_logprobs": "old", "inference_logprobs": "rollout", "loss_mask": "mask"}
            line = {ours: rows[name][row, :n].tolist() for ours, name in columns.items()}
            line |= {"advantages": rows["advantages"][row, :n].tolist(), "token_ids": rows["ids"][row, :n].tolist()}
            file.write(json.dumps(line | {"schema_version": 1}) + "\n")
    (step / "STABLE").touch()
    follower = Follower(folder, monitor())
    tokens = int(rows["mask"].sum())
    return Case("a step of 64 sequences, beside the job", tokens, None, lambda: follower._tokens(0),
                follower.monitor.end_step)  # fmt: skip


CASES: dict[str, Callable[[], Case]] = {
    "verl": verl, "slime": slime, "openrlhf": openrlhf, "skyrl": skyrl, "nemo_rl": nemo_rl, "prime_rl": prime_rl,
}  # fmt: skip


def timed(run: Callable[[], Any]) -> float:
    began = time.thread_time()
    run()
    return 1e3 * (time.thread_time() - began)


def measure(case: Case, pairs: int) -> dict[str, Any]:
    """Medians in milliseconds."""
    bare, added = [], []
    for index in range(pairs + 3):
        if case.bare is None:
            added.append(timed(case.watched))
        else:
            first, second = (case.bare, case.watched) if index % 2 else (case.watched, case.bare)
            took = {first: timed(first), second: timed(second)}
            bare.append(took[case.bare])
            added.append(took[case.watched] - took[case.bare])
        case.end(index)
    found = {"what": case.what, "tokens": case.tokens, "pairs": pairs}
    found["added_ms"] = round(statistics.median(added[3:]), 3)
    if bare:
        found["bare_ms"] = round(statistics.median(bare[3:]), 3)
        found["added_share"] = round(found["added_ms"] / found["bare_ms"], 4)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for name in options.only:
        each = found[name] = measure(CASES[name](), options.pairs)
        own = f"{each['bare_ms']:9.2f} ms" if "bare_ms" in each else "        — "
        share = f"{each['added_share']:.1%}" if "bare_ms" in each else "—"
        print(f"{name:9s} {each['what']:42s} {each['tokens']:8d} tokens  host's own loss {own}  "
              f"added {each['added_ms']:8.3f} ms  {share}", flush=True)  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # the monitor's backlog is not worth waiting for
