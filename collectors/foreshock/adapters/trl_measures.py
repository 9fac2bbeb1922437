"""What is measured of TRL's GRPOTrainer: pairs per micro-batch and generation, and its own metrics under our names.

Legend: B rows of a micro-batch, T completion positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from foreshock import Monitor, Semantics
from foreshock.adapters.installed import version_of
from foreshock.guard import guarded

_SCALARS: Final[dict[str, str]] = {
    "reward": "reward.mean",
    "reward_std": "reward.std",
    "frac_reward_zero_std": "group.zero_std",
    "entropy": "entropy.mean",
    "completions/mean_length": "length.mean",
    "completions/max_length": "length.max",
    "completions/clipped_ratio": "length.truncated",
}
"""The trainer's names → ours. TRL's `kl` is against the reference and is measured as a pair instead."""


class Measures:
    """Looks at the host's own tensors, before its backward pass; nothing is computed again."""

    def __init__(self, trainer: Any, monitor: Monitor) -> None:
        self.trainer = trainer
        self.monitor = monitor
        self.guard = monitor.guard
        self.updates = 0
        """Optimizer steps since the generation whose completions are being trained on."""
        self.reward: float | None = None
        """The last validation's."""
        self._loss: Any = None
        self._read: dict[str, tuple[list[float], int]] = {}

    @guarded()
    def generated(self, batch: Mapping[str, Any]) -> None:
        """A generation was scored: the samples' old log-probs against the engine's, once for all their updates."""
        self.updates = 0
        mask_BT = _mask(batch)
        old_BT, rollout_BT = batch.get("old_per_token_logps"), batch.get("sampling_per_token_logps")
        if rollout_BT is None:
            self.monitor.observe("mismatch", old_BT, None, mask_BT)
        elif old_BT is not None:
            self._observe("mismatch", old_BT, rollout_BT, batch, mask_BT, semantics=self._semantics())
        advantages = batch["advantages"].detach().float()
        scalars = {
            "advantage.mean": advantages.mean(),
            "advantage.std": advantages.std(unbiased=False),
            "advantage.abs_max": advantages.abs().max(),
        }
        weights = batch.get("importance_sampling_ratio")
        if weights is not None and str(self.trainer.vllm_importance_sampling_mode).endswith("mask"):
            kept = mask_BT if weights.shape == mask_BT.shape else mask_BT.amax(1, keepdim=True)
            scalars["is_weight.masked"] = ((weights == 0) & (kept > 0)).sum() / kept.sum().clamp(min=1)
        if getattr(self.trainer, "mask_truncated_completions", False):
            scalars["filter.share"] = self._filtered_share(batch)
        self.monitor.log(scalars)

    @guarded()
    def trained(self, inputs: Mapping[str, Any], loss: Any, logps_BT: Any) -> None:
        """A micro-batch went through the training forward."""
        loss = loss.detach()
        self._loss = loss if self._loss is None else self._loss + loss
        if logps_BT is None:
            return  # a fused loss: the pairs are not reported
        mask_BT = _mask(inputs)
        old_BT, rollout_BT = inputs.get("old_per_token_logps"), inputs.get("sampling_per_token_logps")
        self._observe(
            "policy", logps_BT, old_BT, inputs, mask_BT, optimizer_step=self.updates,
            old_source="detached" if old_BT is None else "same_weights", clip_range=self._clip_range(),
        )  # fmt: skip
        if rollout_BT is not None and self.updates == 0:
            semantics = self._semantics()
            if old_BT is None:  # the trainer then takes the current ones for the old
                self._observe("mismatch", logps_BT, rollout_BT, inputs, mask_BT, semantics=semantics)
            self._observe("mismatch_current", logps_BT, rollout_BT, inputs, mask_BT, semantics=semantics)
        reference_BT = inputs.get("ref_per_token_logps")
        if reference_BT is not None:
            self._observe("reference", reference_BT, logps_BT, inputs, mask_BT)

    def _observe(self, pair: str, a: Any, b: Any, inputs: Mapping[str, Any], mask: Any, **more: Any) -> None:
        self.monitor.observe(pair, a, b, mask, token_ids=inputs["completion_ids"], **more)

    def _clip_range(self) -> tuple[float, float] | None:
        low, high = getattr(self.trainer, "epsilon_low", None), getattr(self.trainer, "epsilon_high", None)
        if self.trainer.loss_type in ("cispo", "vespo", "sapo") or low is None or high is None:
            return None
        return (max(0.0, 1.0 - float(low)), 1.0 + float(high))

    def _semantics(self) -> dict[str, Semantics]:
        """The trainer scores the full vocabulary at its temperature; TRL asks vLLM for `processed_logprobs`."""
        args, temperature = self.trainer.args, float(self.trainer.temperature)
        trainer = Semantics(
            engine="transformers", version=version_of("transformers"), temperature=temperature, truncation="none",
            normaliser="full_vocabulary", penalties="none", source="rescore", dtype=str(self.trainer.model.dtype),
        )  # fmt: skip
        if getattr(self.trainer, "rollout_func", None) is not None:
            return {"a": trainer, "b": Semantics(engine="rollout_func", source="decode")}
        kept = ",".join(f"{name}={getattr(args, name, None)}" for name in ("top_k", "top_p", "min_p"))
        engine = Semantics(
            engine="vllm", version=version_of("vllm"), temperature=temperature, truncation=kept, normaliser="kept_set",
            penalties=f"repetition={getattr(args, 'repetition_penalty', 1.0)}", source="decode",
        )  # fmt: skip
        return {"a": trainer, "b": engine}

    def _filtered_share(self, batch: Mapping[str, Any]) -> Any:
        """Share of sampled tokens in rows that `mask_truncated_completions` blanked; pad tokens are not sampled."""
        sampled_BT = batch["completion_ids"] != self.trainer._tokenizer.pad_token_id
        blanked_B = batch["completion_mask"].sum(1) == 0
        return (sampled_BT & blanked_B[:, None]).sum() / sampled_BT.sum().clamp(min=1)

    @guarded()
    def add_metrics(self) -> None:
        """What the trainer noted since the last look, under our names; the lists begin anew when it logs."""
        for name, values in self.trainer._metrics["train"].items():
            known, seen = self._read.get(name, (None, 0))
            seen = seen if known is values else 0
            self._read[name] = (values, len(values))
            ours = _SCALARS.get(name, "")
            if ours:
                for value in values[seen:]:
                    self.monitor.log({ours: value})

    @guarded()
    def validated(self, logs: Mapping[str, Any]) -> None:
        """Takes the evaluation's reward, where these logs hold one."""
        reward = logs.get("eval_reward")
        if reward is not None:
            self.reward = float(reward)
            self.monitor.log({"reward.validation": self.reward})

    def loss(self) -> dict[str, Any]:
        """The update's loss, once."""
        loss, self._loss = self._loss, None
        return {} if loss is None else {"loss": loss}


def _mask(batch: Mapping[str, Any]) -> Any:
    """1 on sampled tokens [B, T]: no padding, no tool's or environment's tokens."""
    mask_BT = batch["completion_mask"]
    return mask_BT * batch["tool_mask"] if "tool_mask" in batch else mask_BT
