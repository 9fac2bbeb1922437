"""The ladder's small policy behind the interface of ROLL's training strategies, so that ROLL's own worker can drive it.

Stands where ``MegatronTrainStrategy`` would, with its calls and its order: ``load_states`` before a pass, ROLL's own
micro-batch iterators, ``loss_func`` a micro-batch, one ``optimizer.step()``, one ``scheduler.step()``. Log-probs are
ROLL's own kernel (``real_path.FakeStrategy``). One data-parallel rank. ``megatron_worker`` runs the real strategy; this
one trains for a hundred steps in seconds. A rung's stale parameters and numerics are applied here, per pass.
"""

from __future__ import annotations

import copy
import importlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lab.roll_onpolicy import policy
from lab.roll_onpolicy.policy import Weights
from lab.roll_onpolicy.real_path import FakeStrategy
from lab.roll_onpolicy.rungs import Rung
from lab.roll_onpolicy.train import Plan
from lab.roll_onpolicy.warmup import warm_weights


class Held:
    """What a model is to the worker and the adapter: the parameters that the next forward uses."""

    def __init__(self, weights: Weights):
        self.weights = weights

    def parameters(self) -> Iterator[Tensor]:
        return iter(self.weights.values())

    def train(self, mode: bool = True) -> None:
        """Modes are a rung's numerics, given to each pass."""

    def eval(self) -> None:
        """See ``train``."""


class Schedule:
    """Linear warm-up, then constant, as the seed's."""

    def __init__(self, optimizer: torch.optim.Optimizer, plan: Plan):
        self.optimizer, self.plan, self.count = optimizer, plan, 0
        self._set()

    def _set(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.rate * min(1.0, (self.count + 1) / self.plan.warmup_steps)

    def step(self) -> None:
        self.count += 1
        self._set()

    def get_last_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]


class SmallStrategy(FakeStrategy):
    """See the module. ``masters`` float32; ``history`` the masters at the head of each step, newest last."""

    offload_nccl = False

    def __init__(self, worker: Any, rung: Rung, seed: int, plan: Plan, kernel: Any, scaled_loss: bool):
        super().__init__(kernel, scaled_loss)
        self.worker, self.rung, self.plan, self.scaled_loss = worker, rung, plan, scaled_loss
        self.batching = importlib.import_module("roll.utils.dynamic_batching")
        self.masters = {name: w.clone().requires_grad_() for name, w in warm_weights(seed % 3, plan.warm_steps).items()}
        self.optimizer = torch.optim.Adam(list(self.masters.values()), plan.rate)
        self.scheduler = Schedule(self.optimizer, plan)
        self.history: deque[Weights] = deque(maxlen=1 + max(rung.stale_scoring, rung.stale_training))
        self.model = Held({})
        self.updates = 0

    def begin_step(self) -> None:
        """At the head of a rollout: what "a step old" will mean."""
        self.history.append({name: w.detach().clone() for name, w in self.masters.items()})

    def _aged(self, lag: int) -> Weights:
        return self.history[max(0, len(self.history) - 1 - lag)] if lag else _detached(self.masters)

    # --- ROLL's states: which pass is about to run -------------------------------------------------------------------

    def load_states(self, include: Any = None, non_blocking: bool = False) -> None:
        parts = {getattr(part, "name", part) for part in include or ()}
        if "model_params" in parts:
            training = "other_params" in parts
            self.model.weights = self._aged(self.rung.stale_training if training else self.rung.stale_scoring)

    def offload_states(self, include: Any = None, non_blocking: bool = False) -> None:
        """Nothing leaves a CPU."""

    def get_data_input(self, batch: Any) -> Any:
        return batch

    # --- passes ------------------------------------------------------------------------------------------------------

    def _micros(self, batch: Any, dynamic: bool, size: int) -> Iterator[Any]:
        if dynamic:
            return iter(self.batching.make_micro_batch_iter_for_dynamic_batching(batch))
        return iter(batch.make_iterator(mini_batch_size=size, epochs=1))

    def forward_step(self, batch: Any, forward_func: Callable[..., Any]) -> dict[str, Tensor]:
        """Scores a batch, rows in its order, padded to its width."""
        width = batch.batch["input_ids"].shape[1] - 1
        dynamic, size = self.worker.worker_config.use_dynamic_batching_in_infer, batch.meta_info["micro_batch_size"]
        parts: dict[str, list[Tensor]] = {}
        weights = policy.as_numerics(self.model.weights, self.rung.scoring)
        for micro in self._micros(batch, dynamic, size):
            logits = policy.forward(weights, micro.batch["input_ids"], self.rung.scoring)
            for name, value in forward_func(micro, logits)[1].items():
                parts.setdefault(name, []).append(torch.nn.functional.pad(value, (0, width - value.shape[1])))
        return {name: torch.cat(values) for name, values in parts.items()}

    @torch.enable_grad()
    def train_step(self, batch: Any, loss_func: Callable[..., Any]) -> dict[str, Any]:
        """One optimizer step over the micro-batches of a mini-batch."""
        size = self.worker.worker_config.training_args.per_device_train_batch_size
        dynamic = self.worker.worker_config.use_dynamic_batching_in_train
        count = batch.meta_info["num_micro_batchs"] if dynamic else len(batch) // size
        self._note_totals(batch)
        leaves = {name: w.clone().requires_grad_() for name, w in self.model.weights.items()}
        weights = policy.as_numerics(leaves, self.rung.training)
        metrics: dict[str, list[Any]] = {}
        for micro in self._micros(batch, dynamic, size):
            logits = policy.forward(weights, micro.batch["input_ids"], self.rung.training)
            loss, said = loss_func(micro, logits)
            loss = loss * count if self.scaled_loss else loss
            (loss / count).backward(retain_graph=True)
            for name, value in said.items():
                metrics.setdefault(name, []).append(value)
        for name, master in self.masters.items():
            master.grad = leaves[name].grad
        norm = float(torch.nn.utils.clip_grad_norm_(list(self.masters.values()), self.plan.clip))
        before = self.optimizer.param_groups[0]["params"][0].detach().clone()
        self.optimizer.step()
        self.updates += int(not torch.equal(before, self.optimizer.param_groups[0]["params"][0]))
        self.scheduler.step()
        self.optimizer.zero_grad()
        return metrics | {f"{self.worker.worker_config.name}/grad_norm": norm}

    def _note_totals(self, batch: Any) -> None:
        """Sizes of the whole mini-batch, by which ROLL ≥ v0.2.0 normalises."""
        response, final = batch.batch["response_mask"][:, 1:], batch.batch["final_response_mask"]
        batch.meta_info["batch_num_tokens"] = {"response_mask": response.sum(), "final_response_mask": final.sum()}
        batch.meta_info["global_valid_samples"] = {
            "response_mask": (response.sum(1) > 0).sum(), "final_response_mask": (final.sum(1) > 0).sum(),
        }  # fmt: skip

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, save_dir: str, global_step: int, ckpt_id: str, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        os.makedirs(save_dir, exist_ok=True)
        state = {
            "masters": {name: w.detach().clone() for name, w in self.masters.items()},
            "optimizer": copy.deepcopy(self.optimizer.state_dict()), "schedule": self.scheduler.count,
        }  # fmt: skip
        torch.save(state, os.path.join(save_dir, "state.pt"))
        return {}

    def load_checkpoint(self, load_dir: str, tag: str = "checkpoint", **kwargs: Any) -> None:
        state = torch.load(os.path.join(load_dir, "state.pt"))  # the lab's own file # nosec B614
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(state["masters"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.count = state["schedule"]


def _detached(weights: Weights) -> Weights:
    return {name: w.detach() for name, w in weights.items()}
