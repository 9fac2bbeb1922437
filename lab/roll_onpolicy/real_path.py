"""``path.Path`` by ROLL's own functions (``source.load``).

One part stands in: ``FakeStrategy``. The real ``MegatronInferStrategy`` needs Megatron-core and, as shipped,
Transformer Engine; its ``op_compute_log_probs`` is repeated here line by line for one tensor- and context-parallel
rank and calls
ROLL's own kernel. ``megatron_worker`` runs the real strategy where Megatron-core is installed.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lab.roll_onpolicy import source
from lab.roll_onpolicy.path import Advantages, LossInput, LossOutput, MicroBatch, Partition, Rows, Settings


class FakeStrategy:
    """Named a fake: see above. ``log_probs`` is ROLL's own ``vocab_parallel_logprobs``."""

    def __init__(self, log_probs: Any, fused_argument: bool):
        self._log_probs, self._extra = log_probs, ((False,) if fused_argument else ())

    def op_compute_log_probs(self, logits: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        labels = input_ids[:, 1:].clone()
        labels[attention_mask[:, 1:] == 0] = 0
        labels = torch.cat([labels, torch.zeros_like(labels[:, :1])], dim=1)
        # float32 logits are overwritten in place by the kernel; bfloat16 ones, as ROLL trains, are copied first
        scored: Tensor = self._log_probs(logits.clone(), labels, *self._extra)
        return scored[:, :-1] * attention_mask[:, 1:]

    def op_compute_entropy(self, logits: Tensor, attention_mask: Tensor) -> Tensor:
        with torch.no_grad():
            scored = torch.log_softmax(logits.float(), -1)
            return (-(scored.exp() * scored).sum(-1))[:, :-1] * attention_mask[:, 1:]


def _config(settings: Settings) -> SimpleNamespace:
    correction = SimpleNamespace(is_weight=SimpleNamespace(enabled=False), filters=[])
    return SimpleNamespace(
        pg_clip=0.2, pg_clip_low=settings.clip_low, pg_clip_high=settings.clip_high, use_pg_clip_range=True,
        dual_clip_loss=False, loss_agg_mode="seq-mean-token-mean", use_kl_loss=False, kl_loss_coef=0.0,
        rl_loss_coef=1.0, entropy_loss_coef=0.0, difficulty_loss_weight=False, length_loss_weight=False, ppo_epochs=1,
        max_len_mask=settings.mask_truncated, difficulty_mask=False, error_max_len_clip=False, adv_estimator="grpo",
        norm_mean_type=None, norm_std_type=None, reward_clip=None, add_token_level_kl=False, kl_penalty="kl",
        enable_old_logprobs_recompute=True, train_infer_correction=correction,
        actor_train=SimpleNamespace(pg_variant="ppo"),
        actor_infer=SimpleNamespace(generating_args=SimpleNamespace(num_return_sequences=settings.group)),
    )  # fmt: skip


class RealPath:
    """See ``path.Path``. ``normalisation`` and ``groups`` are those of the source, not of the settings."""

    name = "roll"

    def __init__(self, home: str):
        self.source = source.load(home)
        self.normalisation, self.groups = self.source.normalisation, self.source.groups
        strategy = FakeStrategy(self.source.log_probs, self.normalisation == "global")
        worker: Any = object.__new__(self.source.worker)
        worker.strategy, worker._logger = strategy, logging.getLogger("roll-worker")
        worker._pg_config_cache, worker._logprobs_cache = {}, {}
        for flag in ("_pg_variant_logged", "_topr_sample_logged", "_cispo_config_logged", "_kimi15_config_logged"):
            setattr(worker, flag, True)
        self.worker, self.strategy = worker, strategy

    def _proto(self, rows: Rows) -> Any:
        attention = rows.attention_NS.long()
        tensors = {
            "input_ids": rows.ids_NS, "attention_mask": attention, "response_mask": rows.response_NS.long(),
            "position_ids": torch.clip(attention.cumsum(-1) - 1, min=0), "row": torch.arange(rows.scores_N.numel()),
            "scores": rows.scores_N, "response_level_rewards": rows.scores_N.clone(),
            "responses": torch.zeros(rows.scores_N.numel(), rows.response_length, dtype=torch.long),
        }  # fmt: skip
        return self.source.proto.from_dict(tensors=tensors)

    def _shard(self, proto: Any, budget: int, settings: Settings, phase: str) -> Any:
        sharded, _ = self.source.batching.dynamic_batching_shard(
            proto, settings.ranks, budget, settings.round_to, log_prefix=phase
        )
        return sharded

    def partition(self, rows: Rows, budget: int, settings: Settings) -> Partition:
        """ROLL's shard, its mini-batch and micro-batch iterators, read off by row number."""
        sharded = self._shard(self._proto(rows), budget, settings, "lab")
        ranks: Partition = []
        for shard in sharded.chunk(chunks=settings.ranks):
            minis = list(self.source.batching.make_mini_batch_iter_for_dynamic_batching(shard, 1, 64))
            if len(minis) != 1:
                raise ValueError(f"{len(minis)} optimizer steps for one rollout: the run is not purely on-policy")
            micros = self.source.batching.make_micro_batch_iter_for_dynamic_batching(minis[0])
            ranks.append([MicroBatch(m.batch["row"].clone(), m.batch["input_ids"].shape[1]) for m in micros])
        return ranks

    def log_probs(self, logits: Tensor, ids: Tensor, response: Tensor) -> Tensor:
        return self.strategy.op_compute_log_probs(logits, ids, response.long())

    def advantages(self, rows: Rows, settings: Settings) -> Advantages:
        """ROLL's reward and advantage functions, in the row order in which the settings' version calls them."""
        fn, config, proto = self.source.functionals, _config(settings), self._proto(rows)
        count = rows.scores_N.numel()
        zeros = torch.zeros(count, rows.ids_NS.shape[1] - 1)
        proto.batch["old_log_probs"], proto.batch["ref_log_probs"] = zeros, zeros.clone()
        if settings.groups == "mixed":  # the reference pass, then the old log-probs
            for phase in ("reference/compute_log_probs", "actor_train/compute_log_probs"):
                proto = self._shard(proto, settings.budget_infer, settings, phase)
        proto.non_tensor_batch["domain"] = np.array(["math_rule"] * count, dtype=object)
        (domain,) = proto.group_by("domain").values()
        prompts = (domain.batch["row"] // settings.group).view(-1, settings.group)
        mixed = float((prompts != prompts[:, :1]).any(1).float().mean())
        domain, _ = fn.get_sample_level_mask(domain, config)
        domain, _ = fn.reward_postprocess(domain, config, {})
        control = SimpleNamespace(value=0.0, update=lambda **kwargs: None)
        domain, _ = fn.compute_token_reward(domain, config, control)
        domain = fn.compute_advantage(
            data=domain, gamma=1.0, lambd=1.0, adv_estimator="grpo", whiten_advantages=settings.whiten,
            whiten_rewards=False, response_mask=domain.batch["final_response_mask"].clone(),
        )  # fmt: skip
        back = torch.argsort(domain.batch["row"])
        return Advantages(domain.batch["advantages"][back], domain.batch["final_response_mask"][back].float(), mixed)

    def loss(self, part: LossInput, settings: Settings) -> LossOutput:
        """The real ``ActorPGWorker.loss_func``; scaled as its strategy scales it before the schedule divides."""
        self.worker.pipeline_config = _config(settings)
        response = part.response.long()
        data = self.source.proto.from_dict(tensors={
            "input_ids": part.ids, "response_mask": response, "final_response_mask": part.final,
            "old_log_probs": part.old_logp, "ref_log_probs": torch.zeros_like(part.old_logp),
            "advantages": part.advantages, "train_infer_is_weight": torch.ones_like(part.old_logp),
        })  # fmt: skip
        data.meta_info["batch_num_tokens"] = {
            "response_mask": part.total_tokens,
            "final_response_mask": part.final.sum(),
        }
        data.meta_info["global_valid_samples"] = {
            "response_mask": part.total_rows, "final_response_mask": part.valid_final,
        }  # fmt: skip
        loss, metrics = self.worker.loss_func(data, part.logits)
        if self.normalisation == "global":  # MegatronTrainStrategy's apply_loss_scale
            loss = loss * part.micro_batches * part.ranks
        approxkl = metrics.get("actor/approxkl@sum", metrics.get("actor/approxkl"))
        return LossOutput(loss, self.worker._cached_metrics["log_probs"], float(approxkl))
