"""ROLL's own ``RLVRPipeline.run``, ``Cluster``, ``ActorPGWorker`` and reward functions on a CPU, over the small policy.

What is real: the pipeline's loop with its partitions, row orders, advantages and checkpoints; the cluster's dispatch
and collection of what its workers' ``register`` notes say; the worker's ``compute_log_probs``, ``train_step``,
``loss_func`` and ``do_checkpoint``. Objects cross between driver and worker pickled, as Ray sends them.

What stands in, and what stops the real one: ``RLVRPipeline.__init__`` and ``Cluster.__init__`` start Ray actors on
accelerators (attributes are set directly); vLLM and sglang need an accelerator (responses come from the small policy);
the sampling scheduler feeds such an engine (``Scheduler`` gives finished batches of the same keys); the reference pass
is not used by this configuration's loss (zeros); Megatron (``small_strategy``).
"""

from __future__ import annotations

import importlib
import logging
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from lab.roll_onpolicy import cpu_shim, engine, problems, source
from lab.roll_onpolicy.problems import PROMPT, SEQUENCE
from lab.roll_onpolicy.real_path import _config
from lab.roll_onpolicy.rungs import Rung
from lab.roll_onpolicy.small_strategy import SmallStrategy
from lab.roll_onpolicy.train import Plan

DOMAIN = "math_rule"
RAY_USERS = (
    "roll.pipeline.rlvr.rlvr_pipeline", "roll.pipeline.base_pipeline", "roll.distributed.scheduler.protocol",
    "roll.distributed.scheduler.decorator", "roll.distributed.executor.cluster",
)  # fmt: skip


class Here:
    """A method whose ``remote`` runs at once in this process; arguments and result are pickled, as Ray does."""

    def __init__(self, method: Any):
        self._method = method

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        sent, named = pickle.loads(pickle.dumps((args, kwargs)))  # packed on the same line, as Ray does # nosec B301
        return pickle.loads(pickle.dumps(self._method(*sent, **named)))  # nosec B301


class Handle:
    """As a Ray actor's handle."""

    def __init__(self, actor: Any):
        self._actor = actor

    def __getattr__(self, name: str) -> Here:
        return Here(getattr(self._actor, name))


class Reference:
    """The reference worker of a run whose loss has no KL term."""

    def __init__(self, proto: Any):
        self.proto, self.dp_size, self.world_size = proto, 1, 1

    def compute_log_probs(self, batch: Any, blocking: bool = True) -> Any:
        zeros = torch.zeros(len(batch), batch.batch["input_ids"].shape[1] - 1)
        return self.proto.from_dict(tensors={"log_probs": zeros})


class Engine:
    """The rollout cluster, seen from the pipeline: it is started, stopped and asked for its settings."""

    dp_size = world_size = 1

    def __init__(self, proto: Any, config: Any):
        self.proto = proto
        self.worker_config = config.actor_infer

    def stop_server(self, *args: Any, **kwargs: Any) -> Any:
        return self.proto(meta_info={"metrics": {}})

    def start_server(self, *args: Any, **kwargs: Any) -> None: ...

    def load_states(self, *args: Any, **kwargs: Any) -> None: ...

    def offload_states(self, *args: Any, **kwargs: Any) -> None: ...


class Scheduler:
    """Finished batches with the keys of ``postprocess_generate``, sampled with the trainer's weights of this step."""

    def __init__(self, proto: Any, strategy: SmallStrategy, rung: Rung, seed: int, plan: Plan, output_logprobs: bool):
        self.proto, self.strategy, self.rung, self.seed, self.plan = proto, strategy, rung, seed, plan
        self.output_logprobs, self.asked = output_logprobs, 0
        self.draw = torch.Generator().manual_seed(90_000 + seed)
        self.steps: list[dict[str, float]] = []

    def get_batch(self, data: Any, batch_size: int, **kwargs: Any) -> Any:
        self.strategy.begin_step()
        asked = problems.draw(self.plan.prompts, 1_000_000 * (self.seed + 1) + self.asked)
        asked = asked.repeated(self.plan.settings.group)
        self.asked += 1
        held = {name: w.detach() for name, w in self.strategy.masters.items()}
        rollout = engine.generate(held, asked, self.draw, self.rung.engine, self.rung.top_k)
        scores = problems.reward(rollout.ids_NS[:, PROMPT:], rollout.length_N, rollout.ended_N, asked)
        self._note(data.meta_info["global_step"], scores, asked, rollout)
        response = rollout.response_mask_NS.long()
        attention = response.clone()
        attention[:, :PROMPT] = 1
        tensors = {
            "input_ids": rollout.ids_NS, "prompts": rollout.ids_NS[:, :PROMPT], "responses": rollout.ids_NS[:, PROMPT:],
            "attention_mask": attention, "response_mask": response, "prompt_mask": attention - response,
            "position_ids": torch.clip(attention.cumsum(-1) - 1, min=0), "scores": scores,
            "response_level_rewards": scores.clone(), "token_level_rewards": torch.zeros(len(scores), SEQUENCE - 1),
        }  # fmt: skip
        if self.output_logprobs:
            tensors["infer_logprobs"] = rollout.logp_NT
        batch = self.proto.from_dict(tensors=tensors)
        for key in ("domain", "tag"):
            batch.non_tensor_batch[key] = np.array([DOMAIN] * len(scores), dtype=object)
        batch.meta_info["metrics"] = {}
        return batch

    def _note(self, step: int, scores: Any, asked: Any, rollout: engine.Rollout) -> None:
        learnable = scores[asked.kind_N == 0]
        self.steps.append({
            "step": step, "reward": float(learnable.mean()) if len(learnable) else float("nan"),
            "truncated": float((~rollout.ended_N).float().mean()), "updates": self.strategy.updates,
        })  # fmt: skip

    def get_scheduler_state(self) -> dict[str, Any]:
        return {}

    def pause_sampling(self, *args: Any, **kwargs: Any) -> None: ...

    def shutdown(self) -> None: ...


class Unpickled:
    """A scheduler's handle: its answers are made for the caller alone, so nothing is copied."""

    def __init__(self, actor: Any):
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._actor, name))


def prepare(home: str) -> Any:
    """ROLL's pipeline module, with ``ray.get`` answering what is there already. Process-global: call it once."""
    os.environ.setdefault("LOG_LEVEL", "ERROR")
    import ray

    module = importlib.import_module("roll.pipeline.rlvr.rlvr_pipeline")
    importlib.import_module("roll.pipeline.rlvr.actor_pg_worker")
    logging.disable(logging.ERROR)
    now = SimpleNamespace(get=lambda refs, timeout=None: refs, ObjectRef=ray.ObjectRef)
    for name in RAY_USERS:
        importlib.import_module(name).__dict__["ray"] = now
    cpu_shim.install_platforms()
    cpu_shim.install_no_ray()
    importlib.import_module("roll.utils.worker_state").WorkerState.save_rng_state = staticmethod(lambda **kwargs: None)
    return module


def configuration(folder: str, plan: Plan, ordered: bool, checkpoint_every: int) -> Any:
    """The seed's settings, scaled, by ROLL's names. ``ordered``: no dynamic batching in the scoring passes."""
    config = _config(plan.settings)
    rows = plan.prompts * plan.settings.group
    passes = {
        "use_dynamic_batching_in_infer": not ordered, "use_dynamic_batching_in_train": True,
        "max_tokens_per_microbatch_in_infer": plan.settings.budget_infer,
        "max_tokens_per_microbatch_in_train": plan.settings.budget_train,
        "sequence_length_round_in_infer": plan.settings.round_to,
        "sequence_length_round_in_train": plan.settings.round_to, "use_sequence_packing": False,
    }  # fmt: skip
    training = SimpleNamespace(per_device_train_batch_size=1, gradient_accumulation_steps=rows)
    strategy = SimpleNamespace(strategy_name="megatron_train", strategy_config={"tensor_model_parallel_size": 1})
    config.actor_train = SimpleNamespace(
        name="actor_train", pg_variant="ppo", training_args=training, infer_batch_size=8, strategy_args=strategy,
        checkpoint_config=None, model_args=SimpleNamespace(dtype="fp32"), offload_nccl=False, **passes,
    )  # fmt: skip
    config.reference = SimpleNamespace(**passes)
    generating = SimpleNamespace(num_return_sequences=plan.settings.group, temperature=1.0, to_dict=dict)
    config.actor_infer = SimpleNamespace(
        generating_args=generating, model_args=SimpleNamespace(dtype="bf16"),
        strategy_args=SimpleNamespace(strategy_name="sglang"),
    )  # fmt: skip
    config.__dict__.update(
        max_steps=plan.steps, async_pipeline=False, eval_steps=0, rollout_dump_dir=None, save_logging_board_dir=None,
        gamma=1.0, lambd=1.0, advantage_clip=None, whiten_rewards=False, critic_warmup=0, logging_steps=10**9,
        rpc_timeout=None, save_steps=checkpoint_every, output_dir=folder, enable_reference=False, reference_configs={},
        sequence_length=SEQUENCE, seed=42, to_dict=lambda: {"host": "roll"}, resume_from_checkpoint=False,
        whiten_advantages=plan.settings.whiten, reward_clip=None, checkpoint_config={"async_upload": False},
    )  # fmt: skip
    base = importlib.import_module("roll.configs.base_config")
    if hasattr(base, "TrainInferCorrectionConfig"):  # ≥ v0.2.0: with every field that its driver reads
        config.train_infer_correction = base.TrainInferCorrectionConfig()
    return config


def pipeline(
    module: Any, base: type, worker_class: type, home: str, rung: Rung, seed: int, plan: Plan, folder: str,
    checkpoint_every: int = 20,
) -> Any:  # fmt: skip
    """A pipeline of class ``base`` (ROLL's own, or a subclass) whose one worker is a ``worker_class``; not yet run."""
    text = Path(module.__file__).read_text()
    orders = text.find('"prompt_id"] = torch.arange') < text.find('name="cal_ref_log_probs"')
    scaled = "global_valid_samples" in importlib.import_module("roll.utils.functionals").agg_loss.__code__.co_varnames
    config = configuration(folder, plan, rung.groups == "ordered" and not orders, checkpoint_every)
    kernel = source._log_probs(home)
    proto = importlib.import_module("roll.distributed.scheduler.protocol").DataProto
    worker = _worker(worker_class, config)
    worker.strategy = SmallStrategy(worker, rung, seed, plan, kernel, scaled_loss=scaled)
    scheduler = Scheduler(proto, worker.strategy, rung, seed, plan, output_logprobs=scaled)
    made: Any = object.__new__(base)
    made.__dict__.update(
        pipeline_config=config, actor_train=_cluster(worker, rung), actor_infer=Engine(proto, config),
        reference=Reference(proto), rewards={}, reward_model_cluster=None, is_lora=False, use_ref_model=True,
        generate_schedulers={DOMAIN: Unpickled(scheduler)}, domain_batch_size={DOMAIN: plan.prompts}, running={},
        val_dataset=None, kl_ctrl=SimpleNamespace(value=0.0, update=lambda **kwargs: None),
        state=importlib.import_module("roll.utils.worker_state").WorkerState(), model_update_groups=[],
        tracker=SimpleNamespace(log=lambda values, step: None), resource_manager=SimpleNamespace(num_gpus=1),
        checkpoint_manager=SimpleNamespace(upload=lambda **kwargs: None), resume_futures=[],
        tokenizer=SimpleNamespace(batch_decode=lambda ids, **kwargs: [""] * len(ids)),
        worker=worker, scheduler=scheduler,
    )  # fmt: skip
    made.checkpoint_clusters = [made.actor_train]
    return made


def _worker(worker_class: type, config: Any) -> Any:
    worker: Any = object.__new__(worker_class)
    rank_info = importlib.import_module("roll.distributed.executor.worker").RankInfo
    worker.__dict__.update(
        rank_info=rank_info(), rank=0, world_size=1, worker_name="actor_train-0", cluster_name="actor_train",
        worker_config=config.actor_train, pipeline_config=config, _logger=logging.getLogger("worker"),
        logger=logging.getLogger("worker"), _logprobs_cache={}, _pg_config_cache={},
    )  # fmt: skip
    for flag in ("_pg_variant_logged", "_topr_sample_logged", "_cispo_config_logged", "_kimi15_config_logged"):
        setattr(worker, flag, True)
    return worker


def _cluster(worker: Any, rung: Rung) -> Any:
    """ROLL's ``Cluster`` around one worker in this process; the rung's fault of rows is put on what it scores."""
    module = importlib.import_module("roll.distributed.executor.cluster")
    made = module.Cluster.__new__(module.Cluster)
    made.__dict__.update(
        cluster_name="actor_train", worker_cls=type(worker), worker_config=worker.worker_config, world_size=1,
        workers=[Handle(worker)], _worker_rank_info=None, initialized=False,
    )  # fmt: skip
    made._bind_worker_method()
    score, previous = made.compute_log_probs, list[Any]()

    def compute_log_probs(batch: Any, **kwargs: Any) -> Any:
        scored = score(batch, **kwargs)
        ours = scored[0] if isinstance(scored, list) else scored
        old = ours.batch["log_probs"]
        if rung.old_from == "misordered":
            ours.batch["log_probs"] = old[torch.sort(batch.batch["attention_mask"].sum(1), stable=True).indices]
        if rung.old_from == "previous":
            ours.batch["log_probs"] = previous.pop() if previous else old
            previous.append(old)
        return scored

    made.compute_log_probs = compute_log_probs
    return made
