"""OpenRLHF's two actors in miniature, without Ray: names, signatures and calls as in its source (3c3be623)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

VERSION = "3c3be623"


def make_args(**advantage: Any) -> SimpleNamespace:
    """The options that adapter and fake read, nested as `hierarchize` nests them."""
    said = {
        "is_correction_enable": True,
        "is_correction_threshold": [0.5, 5.0],
        "is_correction_type": "tis",
    } | advantage
    return SimpleNamespace(
        ds=SimpleNamespace(ring_attn_size=1, tensor_parallel_size=1, param_dtype="bf16"),
        ckpt=SimpleNamespace(path="ckpt", save_steps=2, disable_ds=False),
        algo=SimpleNamespace(advantage=SimpleNamespace(**said), kl=SimpleNamespace(use_loss=True, init_coef=0.01)),
        rollout=SimpleNamespace(temperature=0.9, top_p=1.0), train=SimpleNamespace(dynamic_batch_enable=False),
        logger=SimpleNamespace(wandb=SimpleNamespace(key="secret", project="p")),
    )  # fmt: skip


class PolicyLoss(torch.nn.Module):
    """openrlhf/models/loss.py: PPO with truncated importance weights."""

    def __init__(self, args: Any) -> None:
        super().__init__()
        self.clip_eps_low = self.clip_eps_high = 0.2
        self.policy_loss_type = "ppo"
        self.enable_vllm_is_correction = args.algo.advantage.is_correction_enable
        self.vllm_is_truncated_threshold = args.algo.advantage.is_correction_threshold

    def forward(
        self, log_probs: Any, old_log_probs: Any, advantages: Any, action_mask: Any = None,
        rollout_log_probs: Any = None, dp_size: int = 1, batch_num_tokens: Any = None, global_batch_size: Any = None,
    ) -> Any:  # fmt: skip
        ratio = (log_probs - old_log_probs).exp()
        loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        if self.enable_vllm_is_correction:
            low, high = self.vllm_is_truncated_threshold
            loss = (old_log_probs - rollout_log_probs).exp().clamp(low, high).detach() * loss
        return (loss * action_mask).sum() / action_mask.sum()


class Trainer:
    """ActorPPOTrainer."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.strategy = SimpleNamespace(accumulated_gradient=2)
        self.actor_loss_fn = PolicyLoss(args)
        self.shift = torch.zeros((), requires_grad=True)
        self.losses: list[float] = []

    def training_step(self, experience: Any, kl_ctl: float, step: int, loss_batch_info: Any = None) -> Any:
        loss = self.actor_loss_fn(
            experience.action_log_probs + self.shift, experience.action_log_probs, experience.advantages,
            action_mask=experience.action_mask, rollout_log_probs=experience.rollout_log_probs,
            **(loss_batch_info or {}),
        )  # fmt: skip
        self.losses.append(loss.item())
        loss.backward()
        if step % 2 and self.shift.grad is not None:
            with torch.no_grad():
                self.shift -= 0.01 * self.shift.grad
                self.shift.grad = None


class PolicyModelActor:
    """One worker."""

    def __init__(self, world_size: int, rank: int, args: Any) -> None:
        self._world_size, self._rank, self.args = world_size, rank, args
        self.trainer = Trainer(args)
        self.saved: list[str] = []

    def fit(self, kl_ctl: float = 0) -> None:
        draws = torch.Generator().manual_seed(1 + self._rank)
        for step in range(4):
            self.trainer.training_step(experience(draws), kl_ctl, step, {"dp_size": self._world_size})

    def save_checkpoint(
        self, tag: str, client_states: Any = None, metric_value: Any = None, metric_key: Any = None
    ) -> None:
        self.saved.append(tag)


def experience(draws: torch.Generator) -> SimpleNamespace:
    """Two rows of 3 prompt and 5 action positions; the second's last two are padding."""
    mask_BA = torch.ones(2, 5)
    mask_BA[1, 3:] = 0
    old_BA = -torch.rand(2, 5, generator=draws)
    return SimpleNamespace(
        sequences=torch.arange(16).reshape(2, 8), action_mask=mask_BA, action_log_probs=old_BA * mask_BA,
        rollout_log_probs=(old_BA + 0.01) * mask_BA, base_action_log_probs=(old_BA - 0.1) * mask_BA,
        advantages=torch.tensor([[1.0], [-1.0]]).expand(2, 5),
    )  # fmt: skip


class Group:
    """RayActorGroup whose workers live here: a reference is its value."""

    def __init__(self, made: type, args: Any, world: int = 2) -> None:
        self._actor_handlers = [made(world, rank, args) for rank in range(world)]

    def async_run_method(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        return [getattr(actor, method_name)(*args, **kwargs) for actor in self._actor_handlers]


class PPOTrainer:
    """The driver: BasePPOTrainer's calls in its order."""

    def __init__(self, args: Any, group: Group, steps: int = 3) -> None:
        self.args, self.actor_model_group, self.critic_model_group, self.steps = args, group, None, steps

    def fit(self, global_step: int = 0) -> None:
        for _ in range(self.steps):
            status, global_step = self.train_step(None, global_step)
            self.save_logs_and_checkpoints(global_step, status, {"global_step": global_step})
            self.evaluate(global_step)

    def train_step(self, rollout_samples: Any, global_step: int) -> tuple[dict[str, Any], int]:
        self.actor_model_group.async_run_method(method_name="fit", kl_ctl=0.0)
        status = {"policy_loss": 0.1, "actor_grad_norm": 0.5, "actor_lr": 1e-6, "rollout/reward_mean": 0.25}
        return status | {"vllm_kl": 0.01, "generated_samples": ["text", 1.0]}, global_step + 1

    def evaluate(self, global_step: int, **generate_kwargs: Any) -> dict[str, float]:
        return {"eval_math_pass1": 0.5, "eval_math_pass4": 0.9, "eval_num_samples": 8.0}

    def save_logs_and_checkpoints(self, global_step: int, logs_dict: Any = None, client_states: Any = None) -> None:
        if global_step % self.args.ckpt.save_steps == 0:
            self.actor_model_group.async_run_method(method_name="save_checkpoint", tag=f"global_step{global_step}")
