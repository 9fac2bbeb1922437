"""The whole real path on a CPU: ROLL's ``ActorPGWorker`` on its ``MegatronTrainStrategy`` on Megatron-core, DP=2.

Run by ``torchrun --nproc_per_node 2`` (``megatron_rungs`` does so); one process a rank, gloo. What is real: the
worker's ``compute_log_probs``, ``train_step`` and ``loss_func``; the strategy's constructor, ``initialize``,
``forward_step``,
``train_step``, ``load_states`` and ``offload_states``; the off-load patch; ``McaGPTModel`` built and loaded from a
Hugging Face folder by ROLL's own model provider; Megatron's DDP, distributed optimizer and schedules; the driver's
``dynamic_batching_shard``, reward and advantage functions.

What stands in, and what stops the real one:

* ``Worker.__init__`` and the ``Barrier`` actor need a Ray cluster with placement groups: attributes are set directly.
* Transformer Engine needs a GPU: ``transformer_impl: local`` (Megatron's own spec, same weights).
  Its attention is given the causal mask that Transformer Engine would build by itself.
* the rollout engine needs a GPU: responses are drawn from the model itself, by ``rollouts``.
* pinned and asynchronous copies do not exist on a CPU: every move is a synchronous copy (``cpu_shim``).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import types
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

warnings.filterwarnings("ignore")
os.environ.setdefault("LOG_LEVEL", "ERROR")

VOCAB, PROMPT, RESPONSE, PROMPTS, GROUP = 128, 16, 96, 8, 8
SEQUENCE = PROMPT + RESPONSE
ROUND = 1 if SEQUENCE % 8 else 8
#: the seed's 43,008 and 30,732 tokens are 3.0 and 2.14 full sequences of 14,336
BUDGET_INFER, BUDGET_TRAIN = 3 * SEQUENCE, int(2.1436 * SEQUENCE)


def add_source(home: str, megatron: str | None) -> None:
    """Put ROLL, its mcore_adapter and (if given) a Megatron-core folder on the path."""
    paths = [home, str(Path(home) / "mcore_adapter" / "src")]
    if megatron:
        paths.append(megatron)
    sys.path[:0] = paths


def tiny_checkpoint(folder: str) -> None:
    """A two-layer Qwen2 with a word-level tokenizer, saved as Hugging Face does. Same weights on every rank."""
    import torch
    from tokenizers import Tokenizer  # type: ignore[import-untyped]
    from tokenizers.models import WordLevel  # type: ignore[import-untyped]
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(7)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.15, tie_word_embeddings=False,
        pad_token_id=0, eos_token_id=1, bos_token_id=1,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, VOCAB)}
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<eos>")), pad_token="<pad>", eos_token="<eos>"
    )
    tokenizer.save_pretrained(folder)


def pipeline_config(recompute_old: bool) -> SimpleNamespace:
    """The seed's settings, by ROLL's names, as the worker and the driver functions read them."""
    correction = SimpleNamespace(is_weight=SimpleNamespace(enabled=False), filters=[])
    return SimpleNamespace(
        max_grad_norm=1.0, sequence_length=SEQUENCE, resume_from_checkpoint=False, ppo_epochs=1, seed=42,
        pg_clip=0.2, pg_clip_low=0.2, pg_clip_high=0.28, use_pg_clip_range=True, dual_clip_loss=False,
        loss_agg_mode="seq-mean-token-mean", use_kl_loss=False, kl_loss_coef=0.0, rl_loss_coef=1.0,
        entropy_loss_coef=0.0, difficulty_loss_weight=False, length_loss_weight=False, importance_sampling="token",
        max_len_mask=True, difficulty_mask=False, error_max_len_clip=False, adv_estimator="grpo", norm_mean_type=None,
        norm_std_type=None, reward_clip=None, add_token_level_kl=False, kl_penalty="kl", whiten_advantages=True,
        enable_old_logprobs_recompute=recompute_old, train_infer_correction=correction,
        actor_train=SimpleNamespace(pg_variant="ppo"),
        actor_infer=SimpleNamespace(generating_args=SimpleNamespace(num_return_sequences=GROUP)),
    )  # fmt: skip


class _TrainingArgs:
    """What ``WorkerConfig.training_args.to_dict()`` yields for the seed, scaled down."""

    def __init__(self, options: argparse.Namespace, folder: str):
        self.per_device_train_batch_size = 1
        self.gradient_accumulation_steps = PROMPTS * GROUP // 2
        self.max_steps = 1000
        self._options, self._folder = options, folder

    def to_dict(self) -> dict[str, Any]:
        return {
            "output_dir": self._folder, "learning_rate": self._options.lr, "weight_decay": 0.0, "warmup_steps": 0,
            "lr_scheduler_type": "constant", "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": self.gradient_accumulation_steps, "max_steps": self.max_steps,
            "bf16": self._options.dtype == "bf16", "use_cpu": True, "ddp_backend": "gloo", "report_to": [],
            "seed": 42, "transformer_impl": "local", "save_safetensors": True, "disable_tqdm": True,
        }  # fmt: skip


def worker_config(options: argparse.Namespace, folder: str) -> SimpleNamespace:
    """``actor_train`` of the seed, by ROLL's names."""
    strategy = {
        "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "expert_model_parallel_size": 1,
        "use_distributed_optimizer": True, "overlap_grad_reduce": options.overlap,
    }  # fmt: skip
    if options.recompute:
        strategy["recompute_granularity"] = "full"
    model_args = SimpleNamespace(
        model_name_or_path=folder, moe_aux_loss_coef=None, lora_target=None, freeze_module_prefix=None, adapter=None,
        model_type=None, disable_gradient_checkpointing=not options.recompute, export_dir=None, device_map=None,
        lora_rank=None, additional_target=None,
    )  # fmt: skip
    return SimpleNamespace(
        name="actor_train", training_args=_TrainingArgs(options, folder), model_args=model_args,
        strategy_args=SimpleNamespace(strategy_config=strategy, strategy_name="megatron_train"),
        use_remove_padding=False, use_sequence_packing=False, use_dynamic_batching_in_train=True,
        use_dynamic_batching_in_infer=True, infer_batch_size=2, apply_loss_scale=True, logits_in_fp32=True,
        router_replay=SimpleNamespace(mode="disabled"), offload_nccl=False, sequence_packing_args=None,
        checkpoint_config=None, pg_variant="ppo", max_tokens_per_microbatch_in_train=BUDGET_TRAIN,
        max_tokens_per_microbatch_in_infer=BUDGET_INFER,
    )  # fmt: skip


def real_worker(options: argparse.Namespace, folder: str) -> Any:
    """ROLL's own ``ActorPGWorker`` with ROLL's own ``MegatronTrainStrategy``, initialised by their own code."""
    from roll.distributed.executor.worker import RankInfo
    from roll.distributed.strategy import megatron_strategy as strategies
    from roll.models.model_providers import default_actor_model_provider
    from roll.pipeline.rlvr.actor_pg_worker import ActorPGWorker

    barrier = SimpleNamespace(remote=lambda *args: None)
    if hasattr(strategies, "Barrier"):  # a Ray actor, used in model_update alone
        strategies.Barrier = SimpleNamespace(options=lambda **kwargs: barrier)
    worker = ActorPGWorker.__new__(ActorPGWorker)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    worker.rank_info = RankInfo(world_size=world, rank=rank, dp_rank=rank, dp_size=world)
    worker.rank, worker.world_size, worker.worker_name, worker.cluster_name = rank, world, "actor_train", "actor_train"
    worker.worker_config, worker.pipeline_config = (
        worker_config(options, folder),
        pipeline_config(options.old == "scored"),
    )
    worker._logger, worker._logprobs_cache, worker._pg_config_cache = logging.getLogger("worker"), {}, {}
    for flag in ("_pg_variant_logged", "_topr_sample_logged", "_cispo_config_logged", "_kimi15_config_logged"):
        setattr(worker, flag, True)
    worker.strategy = strategies.MegatronTrainStrategy(worker)
    worker.strategy.initialize(model_provider=default_actor_model_provider)
    worker.tokenizer = worker.strategy.tokenizer
    worker.strategy.models_unwrapped[0].register_forward_pre_hook(causal_mask, with_kwargs=True)
    if options.dropout:
        for module in worker.strategy.models_unwrapped[0].modules():
            if hasattr(module, "hidden_dropout"):
                module.hidden_dropout = options.dropout
    if options.offload:
        worker.strategy.offload_states()
    return worker


def causal_mask(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Transformer Engine's causal attention ignores the mask that ROLL passes; the local spec needs a causal one."""
    import torch

    length = kwargs["input_ids"].shape[1]
    kwargs["attention_mask"] = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), diagonal=1)
    return args, kwargs


def rollouts(step: int, weights_seed: int = 0) -> dict[str, Any]:
    """One rollout batch of the seed's shape: PROMPTS x GROUP rows, right-padded, a few truncated. Plain tensors."""
    import torch

    draw = torch.Generator().manual_seed(1000 * weights_seed + step)
    rows = PROMPTS * GROUP
    prompt = torch.randint(4, PROMPT + 1, (PROMPTS,), generator=draw).repeat_interleave(GROUP)
    hard = torch.rand(PROMPTS, generator=draw).repeat_interleave(GROUP)
    length = (torch.exp(2.2 + 1.4 * hard + 0.5 * torch.randn(rows, generator=draw))).long().clamp(2, RESPONSE)
    length[torch.rand(rows, generator=draw) < 0.05] = RESPONSE
    place = torch.arange(SEQUENCE)[None]
    attention = (place < (prompt + length)[:, None]).long()
    response = ((place >= prompt[:, None]) & (place < (prompt + length)[:, None])).long()
    tokens = torch.randint(2, VOCAB, (rows, SEQUENCE), generator=draw) * attention
    score = (torch.rand(rows, generator=draw) > hard).float() * (length < RESPONSE)
    return {
        "input_ids": tokens, "attention_mask": attention, "response_mask": response, "scores": score,
        "position_ids": torch.clip(attention.cumsum(-1) - 1, min=0), "response_level_rewards": score.clone(),
        "responses": tokens[:, PROMPT:].clone(), "group_id": torch.arange(PROMPTS).repeat_interleave(GROUP),
        "row_id": torch.arange(rows), "ref_log_probs": torch.zeros(rows, SEQUENCE - 1),
        "infer_logprobs": -1.0 * response[:, 1:],
    }  # fmt: skip


class Step:
    """One rollout and one update, in the order of ``RLVRPipeline.run``, on every rank alike."""

    def __init__(self, worker: Any, options: argparse.Namespace):
        from roll.distributed.scheduler.protocol import DataProto
        from roll.utils import dynamic_batching, functionals

        self.proto, self.shard, self.fn = DataProto, dynamic_batching.dynamic_batching_shard, functionals
        self.worker, self.options = worker, options
        self.seen: list[tuple[Any, Any, Any, Any]] = []
        self._watch_loss()

    def _watch_loss(self) -> None:
        """Read (current, old, mask, rows) where the real ``loss_func`` has just computed them; values untouched."""
        original = type(self.worker).loss_func

        def loss_func(worker: Any, data: Any, output: Any) -> Any:
            result = original(worker, data, output)
            cached = worker._cached_metrics
            mask = data.batch["response_mask"][:, 1:]
            self.seen.append((cached["log_probs"].detach().clone(), cached["old_log_probs"].clone(), mask.clone(),
                              data.batch["row_id"].clone()))  # fmt: skip
            return result

        self.worker.loss_func = types.MethodType(loss_func, self.worker)

    def mine(self, batch: Any) -> Any:
        return batch.chunk(chunks=self.worker.world_size)[self.worker.rank]

    def gathered(self, tensor: Any) -> Any:
        import torch
        import torch.distributed as dist

        parts: list[Any] = [None] * self.worker.world_size
        dist.all_gather_object(parts, tensor)
        return torch.cat(parts)

    def score(self, batch: Any, budget: int) -> Any:
        batch, _ = self.shard(batch, self.worker.world_size, budget, ROUND, log_prefix="actor_train/compute_log_probs")
        batch.meta_info["is_offload_states"] = False
        part = self.mine(batch)
        scored = self.worker.compute_log_probs(part)
        batch.batch["old_log_probs"] = self.gathered(scored.batch["log_probs"])
        return batch

    def advantages(self, batch: Any) -> Any:
        import numpy as np

        config = self.worker.pipeline_config
        batch.non_tensor_batch["domain"] = np.array(["math_rule"] * len(batch), dtype=object)
        (domain,) = batch.group_by("domain").values()
        domain, _ = self.fn.get_sample_level_mask(domain, config)
        domain, _ = self.fn.reward_postprocess(domain, config, {})
        control = SimpleNamespace(value=0.0, update=lambda **kwargs: None)
        domain, _ = self.fn.compute_token_reward(domain, config, control)
        return self.fn.compute_advantage(
            data=domain, gamma=1.0, lambd=1.0, adv_estimator="grpo", whiten_advantages=True, whiten_rewards=False,
            response_mask=domain.batch["final_response_mask"].clone(),
        )  # fmt: skip

    def run(self, index: int) -> dict[str, Any]:
        import numpy as np
        import torch

        if self.options.offload:  # the model update at the head of the step loads the parameters alone
            from roll.utils.offload_states import OffloadStateType as Part

            self.worker.strategy.load_states(include=[Part.model_params])
            self.worker.strategy.offload_states(include=[Part.other_params, Part.optimizer_states])
        before = fingerprint(self.worker)
        batch = self.proto.from_dict(tensors=rollouts(index, self.options.seed))
        batch.meta_info["loss_mask_keys"] = ["response_mask", "final_response_mask"]
        batch.batch["prompt_id"] = torch.arange(len(batch))
        if self.options.old == "scored":
            batch = self.score(batch, self.options.infer_budget)
        else:  # what the pipeline does since 2025-12-08 when the update is on-policy by construction
            batch.batch["old_log_probs"] = torch.zeros_like(batch.batch["attention_mask"][:, 1:])
            if self.options.old == "reused":
                names = [f"row-{row}" for row in range(len(batch))]
                batch.non_tensor_batch["sample_uuid"] = np.array(names, dtype=object)
        batch.reorder(torch.argsort(batch.batch["prompt_id"]))
        scoring = fingerprint(self.worker)
        batch = self.advantages(batch)
        batch.batch["train_infer_is_weight"] = torch.ones_like(batch.batch["advantages"])
        batch.reorder(torch.argsort(batch.batch["prompt_id"]))
        batch, _ = self.shard(batch, self.worker.world_size, BUDGET_TRAIN, ROUND, log_prefix="actor_train/train_step")
        batch.meta_info["is_offload_states"] = self.options.offload
        batch.meta_info["global_step"] = index
        self.seen.clear()
        with with_stale(self.worker, self.options, index):
            output = self.worker.train_step(self.mine(batch))
        return self.report(index, output.meta_info["metrics"], before, scoring)

    def report(self, index: int, metrics: dict[str, Any], before: float, scoring: float) -> dict[str, Any]:
        import numpy as np
        import torch

        from lab.roll_onpolicy.statistics import pair_statistics

        delta = [torch.nn.functional.pad(torch.stack([a, b, m.to(a.dtype)]), (0, SEQUENCE - 1 - a.shape[1]))
                 for a, b, m, _ in self.seen]  # fmt: skip
        both = torch.cat(delta, dim=1)
        a, b, mask = (self.gathered(part) for part in both)
        after = fingerprint(self.worker) if not self.options.offload else self.loaded_fingerprint()
        flat = {k: float(np.mean(np.ravel(v))) for k, v in metrics.items() if "approxkl" in k or "grad_norm" in k}
        return {
            "step": index, "policy": pair_statistics(a, b, mask), "roll": flat,
            "parameters": {"before": before, "scoring": scoring, "after": after, "moved": before != after},
            "ranks_equal": self.all_equal(after), "rows": int(mask.any(-1).sum()),
        }  # fmt: skip

    def loaded_fingerprint(self) -> float:
        from roll.utils.offload_states import OffloadStateType as Part

        self.worker.strategy.load_states(include=[Part.model_params])
        value = fingerprint(self.worker)
        self.worker.strategy.offload_states(include=[Part.model_params])
        return value

    def all_equal(self, value: float) -> bool:
        import torch.distributed as dist

        parts: list[Any] = [None] * self.worker.world_size
        dist.all_gather_object(parts, value)
        return len(set(parts)) == 1


class with_stale:  # noqa: N801 - reads as a phrase
    """Puts the previous step's shard of the *other* rank back for the length of the training forward, if asked.

    This is the state in which Megatron leaves a rank between ``optimizer.step()`` and the parameter gather: its own
    half of the flat buffer is new, the other half is old. ROLL refuses ``overlap_param_gather``, so the state is set
    by hand here; ``megatron_stale`` shows it arising by itself with the option on.
    """

    def __init__(self, worker: Any, options: argparse.Namespace, index: int):
        self.worker, self.kind, self.lag = worker, options.stale, options.lag
        self.history: list[Any] = worker.__dict__.setdefault("_lab_history", [])

    def parameters(self) -> list[Any]:
        return list(self.worker.strategy.models_unwrapped[0].parameters())

    def __enter__(self) -> None:
        self.saved = None
        if self.kind == "none":
            return
        now = [p.data.clone() for p in self.parameters()]
        self.history.append(now)
        del self.history[: -1 - self.lag]
        old = self.history[0]
        self.saved = now
        if self.kind == "rank1" and self.worker.rank != 1:
            return
        half = len(now) // 2
        own_first = self.worker.rank == 0
        for place, (p, stale) in enumerate(zip(self.parameters(), old, strict=True)):
            mine = (place < half) == own_first
            if self.kind != "half" or not mine:
                p.data.copy_(stale)
        self._restore_before_step()

    def _restore_before_step(self) -> None:
        optimizer, saved, parameters = self.worker.strategy.optimizer, self.saved, self.parameters()
        original = type(optimizer).step

        def step(inner: Any) -> Any:
            for p, value in zip(parameters, saved or [], strict=True):
                p.data.copy_(value)
            return original(inner)

        optimizer.step = types.MethodType(step, optimizer)

    def __exit__(self, *error: object) -> None:
        self.worker.strategy.optimizer.__dict__.pop("step", None)


def fingerprint(worker: Any) -> float:
    """One number that moves when any parameter moves (float64, position-weighted)."""
    import torch

    flat = torch.cat([p.data.double().flatten() for p in worker.strategy.models_unwrapped[0].parameters()])
    return float((flat * torch.arange(1, flat.numel() + 1, dtype=torch.float64).sin()).sum())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", required=True)
    parser.add_argument("--megatron", default="")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--infer-budget", type=int, default=BUDGET_INFER)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--stale", choices=("none", "half", "all", "rank1"), default="none")
    parser.add_argument("--old", choices=("scored", "reused", "zeros"), default="scored")
    parser.add_argument("--lag", type=int, default=1)
    parser.add_argument("--out", required=True)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    add_source(options.home, options.megatron)
    logging.disable(logging.ERROR)
    import torch

    torch.set_num_threads(1)
    from lab.roll_onpolicy import cpu_shim

    cpu_shim.install()
    import mcore_adapter  # type: ignore[import-not-found]  # noqa: F401
    import roll.platforms  # noqa: F401

    cpu_shim.install_platforms()
    cpu_shim.install_no_ray()
    with tempfile.TemporaryDirectory() as folder:
        tiny_checkpoint(folder)
        worker = real_worker(options, folder)
        step = Step(worker, options)
        lines = [step.run(index) for index in range(options.steps)]
    if worker.rank == 0:
        import megatron.core

        result = {"megatron": megatron.core.__version__, "options": vars(options), "steps": lines}
        Path(options.out).write_text(json.dumps(result, indent=1))
    torch.distributed.barrier()
    os._exit(0)  # gloo and Ray threads keep a CPU-only process alive


if __name__ == "__main__":
    main()
