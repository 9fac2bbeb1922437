"""A named fake of ROLL's actor worker and strategy: the members that the adapter stands on, and no others.

`SHAPE` lists them; `test_roll_real.py` checks that ROLL's real classes have every one with these parameters. One rank,
no Ray, no Megatron: a table of logits per token is the model, plain SGD the optimizer.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

VOCAB, PROMPT, RESPONSE, PROMPTS, GROUP = 16, 3, 5, 4, 4
SEQUENCE = PROMPT + RESPONSE
SHAPE = {
    "roll.pipeline.rlvr.actor_pg_worker:ActorPGWorker": {
        "initialize": ["pipeline_config"], "train_step": ["data"], "loss_func": ["data", "output_tensor"],
        "do_checkpoint": ["global_step"], "forward_func_log_probs": ["data", "output_tensor"],
    },
    "roll.distributed.strategy.megatron_strategy:MegatronTrainStrategy": {
        "train_step": ["batch", "loss_func"], "forward_step": ["batch", "forward_func"],
        "op_compute_log_probs": ["logits", "input_ids", "attention_mask"], "load_states": ["include"],
        "offload_states": ["include"], "load_checkpoint": ["load_dir", "tag"],
    },
    "roll.distributed.scheduler.protocol:DataProto": {"from_dict": ["tensors"], "slice": ["start", "end"]},
}  # fmt: skip


class Batch(dict[str, Tensor]):
    """As a TensorDict: keys, rows, and a batch size."""

    @property
    def batch_size(self) -> tuple[int]:
        return (len(next(iter(self.values()))),)


class Proto:
    """As DataProto: tensors by row, arrays by row, notes that slices share."""

    def __init__(self, batch: Batch, non_tensor_batch: dict[str, Any], meta_info: dict[str, Any]):
        self.batch, self.non_tensor_batch, self.meta_info = batch, non_tensor_batch, meta_info

    @classmethod
    def from_dict(cls, tensors: dict[str, Tensor]) -> Proto:
        return cls(Batch(tensors), {}, {})

    def slice(self, start: int, end: int) -> Proto:
        return Proto(
            Batch({k: v[start:end] for k, v in self.batch.items()}),
            {k: v[start:end] for k, v in self.non_tensor_batch.items()}, self.meta_info,
        )  # fmt: skip

    def to(self, device: Any) -> Proto:
        return self

    def __len__(self) -> int:
        return self.batch.batch_size[0]


class Model:
    """Logits by token id; `noise` stands for a training pass that disagrees."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(3)
        self.table = torch.randn(VOCAB, VOCAB, generator=draw).requires_grad_()
        self.training, self.noise = True, 0.0

    def parameters(self) -> Iterator[Tensor]:
        yield self.table

    def train(self, mode: bool = True) -> None:
        self.training = mode

    def eval(self) -> None:
        self.training = False

    def __call__(self, ids: Tensor) -> Tensor:
        return self.table[ids] * (1.0 + (self.noise if self.training else 0.0))


class Schedule:
    """As Megatron's: what is loaded is added to where it stands."""

    def __init__(self) -> None:
        self.num_steps = 0

    def step(self, increment: int = 1) -> None:
        self.num_steps += increment

    def get_last_lr(self) -> list[float]:
        return [0.1]


class Strategy:
    """As MegatronTrainStrategy, seen from the adapter."""

    def __init__(self, worker: FakeWorker):
        self.worker, self.model, self.scheduler = worker, Model(), Schedule()
        self.optimizer = torch.optim.SGD([self.model.table], lr=0.1, momentum=0.9)
        self.loads = 0

    def op_compute_log_probs(self, logits: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        scored = torch.log_softmax(logits, -1)[:, :-1].gather(-1, input_ids[:, 1:, None])[..., 0]
        return scored * attention_mask[:, 1:]

    def _cuts(self, batch: Proto, dynamic: bool) -> list[tuple[int, int]]:
        if dynamic:
            return [(start, end) for start, end in batch.meta_info["micro_batch_indices"]]
        size = int(batch.meta_info["micro_batch_size"])
        return [(start, start + size) for start in range(0, len(batch), size)]

    def forward_step(self, batch: Proto, forward_func: Callable[..., Any]) -> dict[str, Tensor]:
        self.model.eval()
        parts = []
        for start, end in self._cuts(batch, self.worker.worker_config.use_dynamic_batching_in_infer):
            micro = batch.slice(start, end)
            with torch.no_grad():
                parts.append(forward_func(micro, self.model(micro.batch["input_ids"]))[1]["log_probs"])
        return {"log_probs": torch.cat(parts)}

    def train_step(self, batch: Proto, loss_func: Callable[..., Any]) -> dict[str, Any]:
        self.model.train()
        metrics: dict[str, Any] = {}
        for start, end in self._cuts(batch, self.worker.worker_config.use_dynamic_batching_in_train):
            micro = batch.slice(start, end)
            loss, said = loss_func(micro, self.model(micro.batch["input_ids"]))
            loss.backward()
            for key, value in said.items():
                metrics.setdefault(key, []).append(value)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return metrics | {"actor_train/grad_norm": 0.5}

    def load_states(self, include: Any = None) -> None:
        self.loads += 1

    def offload_states(self, include: Any = None) -> None:
        self.loads -= 1

    def load_checkpoint(self, load_dir: str, tag: str = "checkpoint") -> None:
        state = torch.load(os.path.join(load_dir, "state.pt"))
        with torch.no_grad():
            self.model.table.copy_(state["table"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.step(increment=state["schedule"])

    def save(self, folder: str) -> None:
        os.makedirs(folder, exist_ok=True)
        state = {"table": self.model.table.detach().clone(), "optimizer": copy.deepcopy(self.optimizer.state_dict())}
        torch.save(state | {"schedule": self.scheduler.num_steps}, os.path.join(folder, "state.pt"))


class FakeWorker:
    """As ActorPGWorker. `reuse`: takes the detached current log-prob as old, as ROLL may since 2025-12-08."""

    def __init__(self, folder: str):
        infer = SimpleNamespace(
            generating_args=SimpleNamespace(num_return_sequences=GROUP, temperature=1.0),
            strategy_args=SimpleNamespace(strategy_name="sglang"), model_args=SimpleNamespace(dtype="bf16"),
        )  # fmt: skip
        self.pipeline_config = SimpleNamespace(
            pg_clip=0.2, pg_clip_low=0.2, pg_clip_high=0.28, use_pg_clip_range=True, adv_estimator="grpo",
            reward_clip=None, actor_infer=infer, output_dir=folder, enable_old_logprobs_recompute=True,
        )  # fmt: skip
        self.worker_config = SimpleNamespace(
            use_dynamic_batching_in_train=True, use_dynamic_batching_in_infer=True,
            training_args=SimpleNamespace(per_device_train_batch_size=2), checkpoint_config=None,
        )  # fmt: skip
        self.rank_info = SimpleNamespace(rank=0, world_size=1, tp_rank=0, cp_rank=0, tp_size=1, cp_size=1)
        self.worker_name = "actor_train-0"
        self.seen_weights: list[Tensor] = []
        self.losses: list[float] = []

    def initialize(self, pipeline_config: Any = None) -> None:
        self.strategy = Strategy(self)

    def forward_func_log_probs(self, data: Proto, output_tensor: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        scored = self.strategy.op_compute_log_probs(output_tensor, data.batch["input_ids"], data.batch["response_mask"])
        return torch.zeros(()), {"log_probs": scored.clone()}

    def loss_func(self, data: Proto, output_tensor: Tensor) -> tuple[Tensor, dict[str, float]]:
        old = data.batch["old_log_probs"]
        current = self.strategy.op_compute_log_probs(
            output_tensor, data.batch["input_ids"], data.batch["response_mask"]
        )
        if not self.pipeline_config.enable_old_logprobs_recompute:
            old = current.detach()
        ratio, advantages = (current - old).exp(), data.batch["advantages"]
        loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
        correction = getattr(self.pipeline_config, "train_infer_correction", None)
        if correction is not None and correction.is_weight.enabled:
            loss = loss * data.batch["train_infer_is_weight"]
        self.seen_weights.append(data.batch["advantages"].clone())
        total = (loss * data.batch["final_response_mask"]).sum()
        self.losses.append(float(total.detach()))
        approxkl = (0.5 * (current - old) ** 2).mean()
        return total, {"actor/total_loss@sum": float(total.detach()), "actor/approxkl@sum": float(approxkl.detach())}

    def train_step(self, data: Proto) -> Any:
        metrics = self.strategy.train_step(batch=data, loss_func=self.loss_func)
        metrics["actor/lr"] = 0.1
        return SimpleNamespace(meta_info={"metrics": metrics})

    def do_checkpoint(self, global_step: int, is_last_step: bool | None = None) -> str:
        self.strategy.save(os.path.join(self.pipeline_config.output_dir, self.worker_name, f"checkpoint-{global_step}"))
        return "saved"

    do_checkpoint.noted = "as ROLL's register notes"  # type: ignore[attr-defined]


class ReusingWorker(FakeWorker):
    """ROLL since 2025-12-08: the loss asks this for old log-probs."""

    def get_old_log_probs_with_cache(self, data: Proto, log_probs: Tensor) -> Tensor:
        return log_probs.detach()


def rollout(worker: FakeWorker, step: int, mixed: bool = False, engine: float | None = 0.0) -> Proto:
    """PROMPTS × GROUP right-padded rows, scored by the worker; `mixed`: advantages over groups of other prompts."""
    draw = torch.Generator().manual_seed(step)
    count = PROMPTS * GROUP
    prompts = torch.randint(2, VOCAB, (PROMPTS, PROMPT), generator=draw).repeat_interleave(GROUP, 0)
    length = torch.randint(1, RESPONSE + 1, (count,), generator=draw)
    place = torch.arange(SEQUENCE)[None]
    attention = (place < (PROMPT + length)[:, None]).long()
    response = attention * (place >= PROMPT)
    ids = torch.cat([prompts, torch.randint(2, VOCAB, (count, RESPONSE), generator=draw)], 1) * attention
    scores = (torch.rand(count, generator=draw) < 0.5).float()
    order = torch.randperm(count, generator=draw) if mixed else torch.arange(count)
    blocks = scores[order].view(-1, GROUP)
    normal = torch.empty(count)
    normal[order] = ((blocks - blocks.mean(1, keepdim=True)) / (blocks.std(1, keepdim=True) + 1e-6)).flatten()
    rows = Proto.from_dict({
        "input_ids": ids, "attention_mask": attention, "response_mask": response, "scores": scores,
        "final_response_mask": (response[:, 1:] * (length != RESPONSE)[:, None]).float(),
        "response_level_rewards": normal, "responses": ids[:, PROMPT:], "advantages": normal[:, None] * response[:, 1:],
        "position_ids": torch.clip(attention.cumsum(-1) - 1, min=0),
    })  # fmt: skip
    rows.non_tensor_batch["sample_uuid"] = np.array([f"row-{i}" for i in range(count)], dtype=object)
    rows.meta_info |= {
        "global_step": step, "micro_batch_indices": [[0, 6], [6, count]], "micro_batch_lengths": [SEQUENCE] * 2,
        "num_micro_batchs": 2,
    }  # fmt: skip
    rows.batch["old_log_probs"] = worker.strategy.forward_step(rows, worker.forward_func_log_probs)["log_probs"]
    if engine is not None:
        noise = engine * torch.randn(rows.batch["old_log_probs"].shape, generator=draw)
        rows.batch["infer_logprobs"] = rows.batch["old_log_probs"] + noise
    return rows
