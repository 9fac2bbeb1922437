"""verl's real synchronous trainer, loop, update, loss and rollout correction on the CPU; what needs a GPU is faked.

Real: `PPOTrainerSync.fit` and all it calls, the configuration (composed from verl's YAML), the update of
`ActorRolloutRefWorker`, `TrainingWorker` and `BaseEngine`, `ppo_loss`, `core_algos`, the data loader, `Tracking`.
Fakes, by name: `FakeQueue` (TransferQueue's key-value calls, in this process), `FakeEngine` (a table of logits for a
model, Adam), `FakeGroup` (a worker group of one worker), `FakeRollouts` (agent loops and replay buffer), `FakeReplicas`
(engines that sleep and take weights).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import verl
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.checkpoint_callback import CheckpointCallback
from verl.trainer.ppo.metric_utils import RolloutMoELoadBalanceMetricsAccumulator
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine.base import BaseEngine
from verl.workers.engine.utils import postprocess_batch_func, prepare_micro_batches
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.losses import ppo_loss

VOCAB, PROMPT, LONGEST, PROMPTS, GROUP = 12, 3, 6, 4, 2


def make_config(folder: Path, *overrides: str) -> Any:
    """verl's own configuration: four prompts, two answers each, two updates a step."""
    GlobalHydra.instance().clear()
    home = os.path.join(os.path.dirname(verl.__file__), "trainer", "config")
    with initialize_config_dir(config_dir=home, version_base=None):
        return compose(
            config_name="ppo_trainer",
            overrides=[
                f"data.train_batch_size={PROMPTS}", f"actor_rollout_ref.rollout.n={GROUP}",
                f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // 2}", "algorithm.adv_estimator=grpo",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2", "actor_rollout_ref.rollout.name=vllm",
                "actor_rollout_ref.rollout.calculate_log_probs=true", "actor_rollout_ref.model.path=none",
                "trainer.logger=[console]", "trainer.val_before_train=false", "trainer.test_freq=-1",
                "trainer.save_freq=-1", f"trainer.default_local_dir={folder}", "trainer.project_name=lab",
                "trainer.experiment_name=x", "critic.enable=false", "trainer.n_gpus_per_node=1", *overrides,
            ],
        )  # fmt: skip


class FakeQueue:
    """TransferQueue's key-value calls: rows of fields and tags by key."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.tags: dict[str, dict[str, Any]] = {}

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: Any = None, tags: Any = None) -> KVBatchMeta:
        for index, key in enumerate(keys):
            self.tags.setdefault(key, {}).update(tags[index] if tags else {})
            row = self.rows.setdefault(key, {})
            for name, column in fields.items() if fields is not None else ():
                value = column[index]
                row[name] = value.data if isinstance(value, NonTensorData) else value
        return self.meta(keys, partition_id)

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: Any = None) -> TensorDict:
        names = [name for name in select_fields or self.rows[keys[0]] if name in self.rows[keys[0]]]
        found: dict[str, Any] = {}
        for name in names:
            column = [self.rows[key][name] for key in keys]
            if isinstance(column[0], Tensor):
                found[name] = torch.nested.as_nested_tensor(column, layout=torch.jagged)
            else:
                found[name] = NonTensorStack.from_list([NonTensorData(value) for value in column])
        return TensorDict(found, batch_size=len(keys))

    def kv_clear(self, keys: list[str], partition_id: str) -> None:
        for key in keys:
            self.rows.pop(key, None)

    def kv_list(self, partition_id: str) -> dict[str, Any]:
        return {}

    def meta(self, keys: list[str], partition_id: str) -> KVBatchMeta:
        return KVBatchMeta(keys=list(keys), tags=[self.tags[key] for key in keys], partition_id=partition_id)


class FakeEngine(BaseEngine):
    """A table of logits by token id; a micro-batch goes through verl's own preparation, loss and backward."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(3)
        self.table = torch.randn(VOCAB, VOCAB, generator=draw).requires_grad_()
        self.optimizer = torch.optim.Adam([self.table], lr=0.05)
        self.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.noise = 0.0
        """Added to the training pass's log-probs: a pass that disagrees."""

    is_param_offload_enabled = is_optimizer_offload_enabled = False

    def train_mode(self, **_: Any) -> Any:
        return torch.enable_grad()

    def eval_mode(self, **_: Any) -> Any:
        return torch.no_grad()

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_size(self) -> int:
        return 1

    def get_data_parallel_group(self) -> Any:
        return None

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True

    def optimizer_zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def optimizer_step(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_([self.table], 1.0)
        self.optimizer.step()
        return float(norm)

    def lr_scheduler_step(self) -> float:
        self.lr_scheduler.step()
        return float(self.lr_scheduler.get_last_lr()[0])

    def log_probs(self, input_ids: Tensor) -> Tensor:
        """Jagged, as verl's: of the next token, at each position of whole sequences."""
        ids = input_ids.values()
        scores = torch.log_softmax(self.table[ids], -1)
        chosen = scores.gather(-1, torch.roll(ids, -1)[:, None])[:, 0]
        return torch.nested.nested_tensor_from_jagged(chosen, offsets=input_ids.offsets())

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        tu.assign_non_tensor(data, batch_num_tokens=float(data["loss_mask"].values().sum()), dp_size=1)
        parts, indices = prepare_micro_batches(data=data)
        outputs = []
        for part in parts:
            logps = self.log_probs(part["input_ids"])
            if self.noise and not forward_only:
                logps = logps + self.noise
            if loss_function is None:
                outputs.append({"model_output": {"log_probs": logps.detach()}, "loss": 1.0, "metrics": {}})
                continue
            loss, metrics = loss_function(model_output={"log_probs": logps}, data=part, dp_group=None)
            if not forward_only:
                loss.backward()
            outputs.append({"loss": loss.detach().item(), "metrics": metrics})
        return postprocess_batch_func(output_lst=outputs, indices=indices, data=data)

    def state(self) -> bytes:
        """Parameters, moments and rate, to the bit."""
        held = self.optimizer.state_dict()["state"]
        parts = [self.table.detach(), *(value for each in held.values() for value in each.values())]
        return b"".join(part.numpy().tobytes() for part in parts) + repr(self.lr_scheduler.get_last_lr()).encode()


def make_worker(config: Any) -> Any:
    """A real ActorRolloutRefWorker around a real TrainingWorker, past the constructors that want devices."""
    actor = object.__new__(TrainingWorker)
    actor.__dict__.update(
        engine=FakeEngine(), model_config={}, flops_counter=None, device_name="cpu", loss_fn=None,
        profiler=SimpleNamespace(step=lambda: None, rank=0, check_enable=lambda: False),
        engine_config=SimpleNamespace(
            use_dynamic_bsz=False, max_token_len_per_gpu=None, micro_batch_size_per_gpu=2, use_fused_kernels=False,
            forward_only=False, infer_max_token_len_per_gpu=None, infer_micro_batch_size_per_gpu=4,
        ),
    )  # fmt: skip
    actor.set_loss_fn(partial(ppo_loss, config=omega_conf_to_dataclass(config.actor_rollout_ref.actor)))
    worker = object.__new__(ActorRolloutRefWorker)
    worker.__dict__.update(actor=actor, config=config.actor_rollout_ref, enable_routing_replay=False, role="actor")
    return worker


class FakeGroup:
    """A RayWorkerGroup of one worker in this process; colocated, so its methods hide behind a prefix."""

    PREFIX = "actor_rollout_"

    def __init__(self, config: Any, queue: FakeQueue) -> None:
        self.worker, self.queue, self._dispatch_info = make_worker(config), queue, {"actor": [0]}
        self.execute_with_func_generator = type(f"{self.PREFIX}execute_with_func_generator", (), {})()
        self.broken: Exception | None = None

    def execute_all_sync(self, method: str, *args: Any) -> list[Any]:
        if self.broken is not None:
            raise self.broken
        return [getattr(self.worker, method.removeprefix(self.PREFIX))(*args)]

    execute_all_async = execute_all_sync

    def _query_dispatch_info(self, mesh: str) -> list[int]:
        return self._dispatch_info[mesh]

    def _data(self, batch: KVBatchMeta) -> TensorDict:
        data = self.queue.kv_batch_get(batch.keys, str(batch.partition_id))
        for name, value in copy.deepcopy(batch.extra_info or {}).items():
            tu.assign_non_tensor_data(data, name, value)
        return data

    def compute_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        data = self._data(batch)
        with torch.no_grad():
            logps = self.worker.actor.engine.log_probs(data["input_ids"])
        entropy = torch.nested.nested_tensor_from_jagged(torch.ones_like(logps.values()), offsets=logps.offsets())
        fields = TensorDict({"log_probs": logps, "entropy": entropy}, batch_size=len(batch))
        return self.queue.kv_batch_put(batch.keys, str(batch.partition_id), fields)

    def update_actor(self, batch: KVBatchMeta) -> TensorDict:
        output = self.worker.update_actor(self._data(batch))
        output["metrics"]["mfu"] = 0.0  # told by a FLOPs counter that knows real models only
        return output

    def save_checkpoint(self, path: str, *_: Any, **__: Any) -> None:
        os.makedirs(path, exist_ok=True)
        engine = self.worker.actor.engine
        held = (engine.table.detach(), engine.optimizer.state_dict(), engine.lr_scheduler.state_dict())
        torch.save(held, os.path.join(path, "all.pt"))

    def load_checkpoint(self, local_path: str, del_local_after_load: bool = True) -> None:
        engine = self.worker.actor.engine
        table, optimizer, schedule = torch.load(os.path.join(local_path, "all.pt"), weights_only=False)
        engine.table.data.copy_(table)
        engine.optimizer.load_state_dict(optimizer)
        engine.lr_scheduler.load_state_dict(schedule)
        assert not del_local_after_load


class FakeReplicas:
    """Engines: `table` is what they sample from; they must sleep before weights are pushed or checkpoints loaded."""

    def __init__(self, group: FakeGroup) -> None:
        self.group, self.asleep, self.pushed = group, True, 0
        self.table = torch.zeros(VOCAB, VOCAB)

    def sleep_replicas(self) -> None:
        self.asleep = True

    def update_weights(self, global_steps: int) -> None:
        assert self.asleep
        self.table = self.group.worker.actor.engine.table.detach().clone()
        self.asleep, self.pushed = False, self.pushed + 1


class FakeRollouts:
    """Agent loops and replay buffer: answers sampled from the replicas' weights, whole groups at once."""

    def __init__(self, queue: FakeQueue, replicas: FakeReplicas) -> None:
        self.queue, self.replicas, self.keys = queue, replicas, list[str]()
        self.draw = torch.Generator().manual_seed(7)
        self.seen: list[int] = []
        """First token of each prompt that was asked for."""

    def generate_sequences(self, batch: Any) -> None:
        assert not self.replicas.asleep
        self.keys = []
        for uid, prompt in zip(batch["uid"], batch["raw_prompt"], strict=True):
            self.seen.append(int(prompt[0]))
            for session in range(GROUP):
                self._put(f"{uid}_{session}_0", torch.tensor([int(token) for token in prompt]), str(uid))

    def _put(self, key: str, prompt: Tensor, uid: str) -> None:
        length = int(torch.randint(2, LONGEST + 1, (1,), generator=self.draw))
        ids, logps = prompt.tolist(), []
        for _ in range(length):
            scores = torch.log_softmax(self.replicas.table[ids[-1]], -1)
            ids.append(int(torch.multinomial(scores.exp(), 1, generator=self.draw)))
            logps.append(float(scores[ids[-1]]))
        responses = torch.tensor(ids[len(prompt) :])
        ones = torch.ones(length, dtype=torch.int64)
        rewards = torch.zeros(length)
        rewards[-1] = float((responses % 3 == 0).float().mean())
        self.queue.rows[key] = {
            "prompts": prompt, "responses": responses, "response_mask": ones, "loss_mask": ones,
            "input_ids": torch.tensor(ids), "rollout_log_probs": torch.tensor(logps), "rm_scores": rewards,
            "uid": uid, "num_turns": 2,
        }  # fmt: skip
        self.queue.tags[key] = {"seq_len": len(ids), "min_global_steps": 0, "max_global_steps": 0}
        self.keys.append(key)

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        for key in self.keys:
            self.queue.tags[key].update(min_global_steps=global_steps - 1, max_global_steps=global_steps - 1)
        return self.queue.meta(self.keys, partition_id), {}


def collate(rows: list[list[int]]) -> dict[str, Any]:
    prompts = np.empty(len(rows), dtype=object)
    prompts[:] = rows
    return {"raw_prompt": prompts}


def make_trainer(folder: Path, patch: Callable[..., None], steps: int = 4, *overrides: str) -> Any:
    """A PPOTrainerSync as `init()` leaves it. `patch(owner, name, value)` is undone by the test."""
    torch.manual_seed(0)
    config = make_config(folder, *overrides)
    queue = FakeQueue()
    patch(trainer_base, "tq", queue)
    group = FakeGroup(config, queue)
    replicas = FakeReplicas(group)
    rollouts = FakeRollouts(queue, replicas)
    prompts = [[1 + i % (VOCAB - 1), i % 5, i % 7] for i in range(PROMPTS * 10)]
    trainer = object.__new__(PPOTrainerSync)
    trainer.__dict__.update(
        config=config, trainer_mode="sync", parameter_sync_step=1, local_trigger_step=0, global_steps=0,
        use_critic=False, use_reference_policy=False, use_teacher_policy=False, ref_in_actor=False,
        checkpoint_callback=CheckpointCallback(), actor_rollout_wg=group, checkpoint_manager=replicas,
        replay_buffer=rollouts, rollouts=rollouts, distillation_config=None, tokenizer=SimpleNamespace(eos_token_id=0),
        reward_loop_manager=SimpleNamespace(reward_loop_worker_handles=["rule"]),
        resource_pool_manager=SimpleNamespace(get_n_gpus=lambda: 1), total_training_steps=steps, steps_per_epoch=10,
        train_dataloader=StatefulDataLoader(prompts, batch_size=PROMPTS, collate_fn=collate), train_dataloader_it=None,
        _rollout_moe_lb_metrics_accumulator=RolloutMoELoadBalanceMetricsAccumulator(model_config=None),
        llm_server_manager=None,
    )  # fmt: skip
    trainer._init_dump_executor()
    trainer.on_init_end()
    return trainer
