"""NeMo-RL's GRPO driver in miniature: objects, fields and order of calls as in nemo_rl/algorithms/grpo.py (7ea279a)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


class Loss:
    """ClippedPGLossFn's switches."""

    def __init__(self, force_on_policy_ratio: bool = False) -> None:
        self.use_importance_sampling_correction = False
        self.force_on_policy_ratio = force_on_policy_ratio


class Policy:
    def __init__(self) -> None:
        self.corrected: list[bool] = []

    def train(self, data: Any, loss_fn: Any, eval_mode: bool = False, timer: Any = None) -> dict[str, Any]:
        self.corrected.append(loss_fn.use_importance_sampling_correction)
        return {"loss": float(data["advantages"].sum())}


class Logger:
    def __init__(self) -> None:
        self.loggers: list[Any] = []

    def log_metrics(
        self, metrics: Any, step: int, prefix: str = "", step_metric: Any = None, step_finished: bool = False
    ) -> None:
        for logger in self.loggers:
            logger.log_metrics(metrics, step, prefix, step_metric, step_finished)

    def finish(self) -> None:
        for logger in self.loggers:
            logger.finish()


class Checkpointer:
    save_optimizer = True

    def _rename_checkpoint(self, checkpoint_path: Any) -> None:
        path = Path(checkpoint_path)
        path.rename(path.parent / f"step_{path.name.split('_')[2]}")


def make_config(**generation: Any) -> SimpleNamespace:
    """The part of MasterConfig that is read."""
    said = {"temperature": 1.0, "top_p": 1.0, "top_k": None, "backend": "vllm", "vllm_cfg": {}} | generation
    return SimpleNamespace(policy={"generation": said}, logger={"wandb": {"key": "secret"}}, grpo={"max_num_steps": 3})


def batch(step: int) -> dict[str, Any]:
    """Two sequences of 2 prompt and 4 sampled positions; the second is left out of the loss."""
    draws = torch.Generator().manual_seed(step)
    token_mask_BS = torch.zeros(2, 6)
    token_mask_BS[:, 2:] = 1
    old_BS = -torch.rand(2, 6, generator=draws) * token_mask_BS
    return {
        "input_ids": torch.arange(12).reshape(2, 6), "token_mask": token_mask_BS,
        "sample_mask": torch.tensor([1.0, 0.0]),
        "prev_logprobs": old_BS, "generation_logprobs": old_BS + 0.03 * token_mask_BS,
        "advantages": torch.ones(2, 6),
    }  # fmt: skip


def grpo_train(policy: Policy, logger: Logger, checkpointer: Checkpointer, loss_fn: Loss, folder: Path) -> None:
    """Three steps; the second is validated and saved."""
    for step in range(1, 4):
        results = policy.train(batch(step), loss_fn, timer=None)
        if step == 2:
            logger.log_metrics({"accuracy": 0.75}, step, prefix="validation")
            (folder / f"tmp_step_{step}").mkdir()
            checkpointer._rename_checkpoint(folder / f"tmp_step_{step}")
        metrics = {"reward": 0.5, "grad_norm": 1.5, "lr": 1e-6, "gen_kl_error": 0.001, "approx_entropy": 0.4}
        logger.log_metrics(metrics | results, step, prefix="train")
        logger.log_metrics({"total_step_time": 1.0}, step, prefix="timing/train", step_finished=True)
    logger.finish()
