"""slime's training loop as `train_one_step` has it, on a table of logits: its hooks, its loss, optimizer and scheduler.

`fake_loss` stands where `slime.backends.megatron_utils.loss` stands; run as a script with SLIME_HOME on the path (and
Megatron-core installed) the real module takes its place, on a real parallel state over gloo. Hooks are called by the
paths that are given to slime's command line.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

VOCAB, PROMPT, SAMPLES = 12, 3, 8
BEFORE_STEP = "foreshock.adapters.slime.before_train_step"
POSTPROCESS = "foreshock.adapters.slime.rollout_data"


def make_args(**changed: Any) -> Namespace:
    """The settings that slime's loss reads, at slime's defaults."""
    return Namespace(**({
        "rollout_temperature": 1.0, "use_rollout_logprobs": False, "use_opsm": False, "advantage_estimator": "grpo",
        "eps_clip": 0.2, "eps_clip_high": 0.28, "eps_clip_c": None, "get_mismatch_metrics": False, "use_tis": False,
        "tis_clip": 2.0, "tis_clip_low": 0.0, "custom_tis_function_path": None, "calculate_per_token_loss": False,
        "custom_pg_loss_reducer_function_path": None, "entropy_coef": 0.0, "use_kl_loss": False,
        "keep_old_actor": False, "loss_type": "policy_loss", "recompute_loss_function": False,
        "allgather_cp": False, "save": None,
        "log_probs_chunk_size": -1, "start_rollout_id": 0, "true_on_policy_mode": False, "qkv_format": "thd",
        "rollout_top_p": 1.0, "rollout_top_k": -1, "use_rollout_top_p_replay": False,
    } | changed))  # fmt: skip


def fake_loss() -> Any:
    """The two functions that the adapter wraps, and the one that looks them up."""
    module = SimpleNamespace()

    def get_log_probs_and_entropy(logits: Tensor, *, unconcat_tokens: Any, response_lengths: Any, **_: Any) -> Any:
        found: dict[str, list[Tensor]] = {"log_probs": [], "entropy": []}
        end = 0
        for tokens, length in zip(unconcat_tokens, response_lengths, strict=True):
            end += len(tokens)
            scores = torch.log_softmax(logits[0, end - length - 1 : end - 1], -1)
            found["log_probs"].append(scores.gather(-1, tokens[-length:, None])[:, 0])
            found["entropy"].append(-(scores.exp() * scores).sum(-1))
        return torch.empty(0), found

    def policy_loss_function(args: Any, batch: Any, logits: Tensor, reduce: Callable[[Tensor], Tensor]) -> Any:
        scored = module.get_log_probs_and_entropy(
            logits, args=args, unconcat_tokens=batch["unconcat_tokens"], total_lengths=batch["total_lengths"],
            response_lengths=batch["response_lengths"], with_entropy=True,
        )[1]  # fmt: skip
        current, old = torch.cat(scored["log_probs"]), batch.get("log_probs")
        before = current.detach() if not old else torch.cat(old)
        ratio, advantages = (current - before).exp(), torch.cat(batch["advantages"])
        loss = torch.max(-ratio * advantages, -ratio.clamp(0.8, 1.28) * advantages)
        engine = torch.cat(batch["rollout_log_probs"])
        if args.use_tis:
            loss = loss * (before - engine).exp().clamp(args.tis_clip_low, args.tis_clip)
        difference = reduce((before - engine).abs()).detach()
        return reduce(loss), {"train_rollout_logprob_abs_diff": difference}

    def loss_function(args: Any, batch: Any, num_microbatches: int, size: int, logits: Tensor) -> Any:
        def reduce(values: Tensor) -> Tensor:
            parts = torch.split(values, batch["response_lengths"])
            return torch.stack([part.mean() for part in parts]).sum()

        loss, log = module.policy_loss_function(args, batch, logits, reduce)
        return (
            loss / size,
            torch.tensor(1),
            {"keys": list(log), "values": torch.stack([torch.tensor(0.0), *log.values()])},
        )

    vars(module).update(locals())
    return module


class Optimizer:
    """Megatron's answer to `step`, around Adam."""

    def __init__(self, table: Tensor) -> None:
        self.table, self.inner = table, torch.optim.Adam([table], lr=0.05)
        self.param_groups = self.inner.param_groups

    def step(self) -> tuple[bool, float, None]:
        norm = float(self.table.grad.norm()) if self.table.grad is not None else 0.0
        self.inner.step()
        return True, norm, None


class Scheduler:
    """Samples seen, and a rate from them."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.seen = optimizer, 0

    def step(self, increment: int) -> None:
        self.seen += increment
        for group in self.optimizer.param_groups:
            group["lr"] = 0.05 / (1 + self.seen / 100)


def load_function(path: str) -> Any:
    """As slime's: looked up at each call."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


class Actor:
    """One training rank. `train(rollout_id)` is slime's order of calls; `logged` what its loss reports, per step."""

    def __init__(self, loss: Any, args: Namespace, hooked: bool = True, offset: float = 0.2) -> None:
        self.loss, self.args, self.hooked, self.offset = loss, args, hooked, offset
        draw = torch.Generator().manual_seed(3)
        self.table = torch.randn(VOCAB, VOCAB, generator=draw).requires_grad_()
        self.optimizer = Optimizer(self.table)
        self.scheduler = Scheduler(self.optimizer)
        self.draw = torch.Generator().manual_seed(5)
        self.model = [SimpleNamespace(role="actor")]
        self.logged: list[dict[str, float]] = []
        self.losses: list[float] = []

    def rollout(self) -> dict[str, list[Any]]:
        data: dict[str, list[Any]] = {name: [] for name in ("unconcat_tokens", "loss_masks", "rollout_log_probs")}
        for _ in range(SAMPLES):
            length = int(torch.randint(2, 7, (1,), generator=self.draw))
            data["unconcat_tokens"].append(torch.randint(0, VOCAB, (PROMPT + length,), generator=self.draw))
            data["loss_masks"].append(torch.ones(length))
        data["response_lengths"] = [len(mask) for mask in data["loss_masks"]]
        data["total_lengths"] = [len(tokens) for tokens in data["unconcat_tokens"]]
        data["rollout_mask_sums"] = [mask.sum() for mask in data["loss_masks"]]
        data["advantages"] = [torch.randn(n, generator=self.draw) for n in data["response_lengths"]]
        data["raw_reward"] = [float(advantage.mean()) for advantage in data["advantages"]]
        with torch.no_grad():
            old = self.score(data)
        data["log_probs"] = [row.clone() for row in old]
        data["rollout_log_probs"] = [row - self.offset * torch.rand(row.shape, generator=self.draw) for row in old]
        return data

    def logits(self, data: dict[str, Any]) -> Tensor:
        return self.table[torch.cat(data["unconcat_tokens"])][None]

    def score(self, data: dict[str, Any]) -> list[Tensor]:
        scored: list[Tensor] = self.loss.get_log_probs_and_entropy(
            self.logits(data), args=self.args, unconcat_tokens=data["unconcat_tokens"],
            total_lengths=data["total_lengths"], response_lengths=data["response_lengths"], with_entropy=True,
        )[1]["log_probs"]  # fmt: skip
        return scored

    def train(self, rollout_id: int) -> None:
        data = self.rollout()
        steps = 2
        if self.hooked:
            load_function(POSTPROCESS)(self.args, rollout_id, data | {"num_microbatches": [2] * steps})
        for step_id in range(steps):
            self.table.grad = None
            if self.hooked:
                hook = load_function(BEFORE_STEP)
                hook(self.args, rollout_id, step_id, self.model, self.optimizer, self.scheduler)
            share, summed = SAMPLES // (2 * steps), 0.0
            for start in (step_id * 2 * share, step_id * 2 * share + share):
                batch = {name: rows[start : start + share] for name, rows in data.items()}
                loss, _, log = self.loss.loss_function(self.args, batch, 2, 2 * share, self.logits(batch))
                loss.backward()
                self.losses.append(float(loss.detach()))
                summed += float(log["values"][1 + log["keys"].index("train_rollout_logprob_abs_diff")])
            self.logged.append({"train_rollout_logprob_abs_diff": summed / (2 * share)})
            success, _, _ = self.optimizer.step()
            assert success
            self.scheduler.step(increment=2 * share)

    def state(self) -> bytes:
        held = self.optimizer.inner.state_dict()["state"]
        parts = [self.table.detach(), *(value for each in held.values() for value in each.values())]
        return b"".join(part.numpy().tobytes() for part in parts) + repr(self.scheduler.seen).encode()


def main() -> None:  # pragma: no cover - in a process of its own
    """The real loss, three rollouts; prints what is left behind."""
    from megatron.core import parallel_state, tensor_parallel

    torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    assert tensor_parallel
    loss = import_module("slime.backends.megatron_utils.loss")
    real = import_module("slime.utils.misc").load_function
    assert callable(real(BEFORE_STEP))
    assert callable(real(POSTPROCESS))
    actor = Actor(loss, make_args(recompute_loss_function="recompute" in sys.argv), hooked="bare" not in sys.argv)
    for rollout_id in range(3):
        actor.train(rollout_id)
    if "bare" not in sys.argv:
        adapter = import_module("foreshock.adapters.slime")
        adapter._adapter.monitor.finish("completed")
    print(json.dumps({"logged": actor.logged, "losses": actor.losses, "state": actor.state().hex()}))


if __name__ == "__main__":
    main()
