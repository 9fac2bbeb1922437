"""SkyRL's `RayPPOTrainer.train` in miniature: the events in its order (a9564572), a batch with its fields.

`callbacks` is SkyRL's own module skyrl/train/utils/callbacks.py where its source is at hand, else the stand-in below.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

STANDIN = SimpleNamespace()


class CallbackHandler:
    """Fans out, as SkyRL's."""

    def __init__(self) -> None:
        self.callbacks: list[Any] = []

    def add(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def __getattr__(self, event: str) -> Any:
        return lambda *given: [getattr(callback, event)(*given) for callback in self.callbacks]


STANDIN.CallbackHandler = CallbackHandler
STANDIN.CallbackInput = lambda **fields: SimpleNamespace(
    **({"batch": None, "metrics": None, "logs": None, "ckpt_path": None} | fields)
)
STANDIN.TrainingControl = lambda: SimpleNamespace(should_save=False, should_evaluate=False)


@dataclass
class Sampling:
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass
class Engine:
    backend: str = "vllm"
    engine_init_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class Generator:
    sampling_params: Sampling = field(default_factory=Sampling)
    inference_engine: Engine = field(default_factory=Engine)


@dataclass
class Settings:
    max_training_steps: int | None = None
    ckpt_path: str = "ckpts"
    ckpt_interval: int = 2
    extra: dict[str, Any] = field(default_factory=lambda: {"api_key": "secret"})


@dataclass
class Config:
    trainer: Settings = field(default_factory=Settings)
    generator: Generator = field(default_factory=Generator)


def batch(step: int) -> dict[str, Any]:
    """Three trajectories of 2 prompt and 4 response positions; the last has one token of the environment."""
    draws = torch.Generator().manual_seed(step)
    mask_BT = torch.ones(3, 4)
    mask_BT[2, 1] = 0.0
    old_BT = -torch.rand(3, 4, generator=draws)
    return {
        "sequences": torch.arange(18).reshape(3, 6), "loss_mask": mask_BT, "action_log_probs": old_BT,
        "rollout_logprobs": old_BT + 0.02, "advantages": torch.ones(3, 4),
    }  # fmt: skip


class RayPPOTrainer:
    """`train` is synchronous here."""

    def __init__(self, callbacks: Any = STANDIN, steps: int = 4) -> None:
        self.cfg, self.steps, self.global_step = Config(), steps, 0
        self.made = callbacks
        self._callback_handler, self._training_control = callbacks.CallbackHandler(), callbacks.TrainingControl()
        self.batches: list[dict[str, Any]] = []
        self.saved: list[int] = []

    def add_callback(self, callback: Any) -> None:
        self._callback_handler.add(callback)

    def _fire(self, event: str, **fields: Any) -> None:
        told = self.made.CallbackInput(
            global_step=self.global_step, epoch=0, total_steps=self.steps, steps_per_epoch=self.steps, **fields
        )
        getattr(self._callback_handler, event)(self, told, self._training_control)

    def train(self) -> None:
        self._fire("on_train_start")
        for event in ("on_eval_start", "on_eval_end"):
            self._fire(event)
        self._fire("on_log", logs={"eval/all/avg_score": 0.1})
        self.global_step += 1
        self._fire("on_epoch_start")
        for _ in range(self.steps):
            self._fire("on_step_start")
            self.batches.append(batch(self.global_step))
            self._fire("on_step_end", batch=self.batches[-1], metrics={"policy_loss": 0.1})
            save, self._training_control.should_save = self._training_control.should_save, False
            if save or self.global_step % self.cfg.trainer.ckpt_interval == 0:
                self.saved.append(self.global_step)
                self._fire("on_save", ckpt_path=f"{self.cfg.trainer.ckpt_path}/global_step_{self.global_step}")
            logs = {"reward/avg_raw_reward": 0.5, "policy/raw_grad_norm": 1.5, "generate/avg_num_tokens": 4.0}
            self._fire("on_log", logs=logs | {"policy/rollout_train_logprobs_abs_diff_mean": 0.02})
            self.global_step += 1
            last = self.cfg.trainer.max_training_steps
            if last is not None and self.global_step > last:
                break
        self._fire("on_epoch_end")
        self._fire("on_train_end")
