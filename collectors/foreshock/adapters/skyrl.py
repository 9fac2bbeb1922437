"""SkyRL's RayPPOTrainer: `attach(trainer, run="project/name")` in your `get_trainer`, nothing else.

A documented `TrainingCallback`: on_step_end has the whole batch with old, rollout and mask, on_log the step's own
figures. The current log-probs never leave SkyRL's workers: `policy` is not reported. Callbacks run inline and unguarded
in SkyRL, so whatever of ours fails is caught here. A Foreshock step is SkyRL's global step.

Legend: B trajectories, T response positions.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any, Final

import foreshock
from foreshock import Command, Monitor, Semantics
from foreshock.frames import names
from foreshock.guard import guarded

CAPABILITIES: Final[dict[str, str]] = {
    "checkpoint_now": "`control.should_save`: SkyRL writes it at the end of the step that follows",
    "pause": "always",
    "resume": "always",
    "stop": "always: `max_training_steps` becomes the step just done, SkyRL saves and leaves its loop",
}
IMPOSSIBLE: Final[dict[str, str]] = {
    "enable_is_correction": "`off_policy_correction` is read from the workers' own copies of the configuration",
    "disable_is_correction": "as above",
    "rollback": "SkyRL loads a checkpoint at its start only: stop, and `trainer.resume_mode`",
    "resync_trainer": "no seam of SkyRL's for it",
    "resync_engine": "SkyRL pushes its weights after every step by itself",
    "scale_lr": "optimizers are in the workers; not tried",
    "skip_update": "callbacks cannot skip",
    "probe": "no second scoring pass",
}
EVENTS: Final = (
    "on_train_start", "on_train_end", "on_epoch_start", "on_epoch_end", "on_step_start", "on_step_end", "on_eval_start",
    "on_eval_end", "on_save", "on_log",
)  # fmt: skip
_SECRET: Final = ("key", "token", "secret", "password")


def attach(trainer: Any, run: str | None = None, *, monitor: Monitor | None = None, **arguments: Any) -> SkyRLCallback:
    """Watches a trainer from now on; call it once, before `train()`. `arguments` go to `foreshock.init`.

    Without a url (or FORESHOCK_URL) the trainer is left untouched. Raises TypeError for another kind of trainer.
    """
    for name in ("add_callback", "cfg", "global_step"):
        if not hasattr(trainer, name):
            raise TypeError(f"not a RayPPOTrainer as this adapter knows it: {type(trainer).__name__} has no {name}")
    if monitor is None:
        defaults: dict[str, Any] = {"mode": os.environ.get("FORESHOCK_MODE", "observe"), "world": 1}
        monitor = foreshock.init(run, configuration(trainer.cfg), role="trainer", rank=0, **(defaults | arguments))
    callback = SkyRLCallback(trainer, monitor)
    if monitor.enabled:
        trainer.add_callback(callback)
    return callback


class SkyRLCallback:
    """SkyRL's TrainingCallback by shape: every event takes (trainer, callback_input, control)."""

    def __init__(self, trainer: Any, monitor: Monitor) -> None:
        self.trainer, self.monitor, self.guard = trainer, monitor, monitor.guard
        self.stopped = False
        self._open = self._save = False
        handlers = {
            "checkpoint_now": self._checkpoint_now, "stop": self._stop,
            "pause": lambda command: None, "resume": lambda command: None,
        }  # fmt: skip
        for kind, handler in handlers.items():
            monitor.on(kind, handler)

    def __getattr__(self, name: str) -> Any:
        if name in EVENTS:  # those that tell nothing that is needed
            return lambda trainer, callback_input, control: None
        raise AttributeError(name)

    def on_step_end(self, trainer: Any, callback_input: Any, control: Any) -> None:
        self._open = True
        if self._save:
            self._save, control.should_save = False, True
        self._look(callback_input.batch)

    def on_save(self, trainer: Any, callback_input: Any, control: Any) -> None:
        self._saved(callback_input)

    def on_log(self, trainer: Any, callback_input: Any, control: Any) -> None:
        self._scalars(callback_input.logs or {})
        if self._open:  # else SkyRL logs an evaluation ahead of its first step
            self._open = False
            self.monitor.end_step(int(callback_input.global_step))

    def on_train_end(self, trainer: Any, callback_input: Any, control: Any) -> None:
        self.monitor.finish("stopped" if self.stopped else "completed")

    @guarded()
    def _look(self, batch: Any) -> None:
        """The step's whole batch; losses that optimize against rollout log-probs have no old ones."""
        old_BT, rollout_BT = _field(batch, "action_log_probs"), _field(batch, "rollout_logprobs")
        mask_BT, advantages_BT = batch["loss_mask"], _field(batch, "advantages")
        if old_BT is None:
            return
        self.monitor.observe(
            "mismatch", old_BT, rollout_BT, mask_BT, semantics=semantics(self.trainer.cfg), advantages=advantages_BT,
            token_ids=batch["sequences"][:, -old_BT.shape[1] :],
        )  # fmt: skip

    @guarded()
    def _scalars(self, logs: Mapping[str, Any]) -> None:
        """SkyRL's own figures, under our names."""
        self.monitor.log(names.scalars("skyrl", logs))

    @guarded()
    def _saved(self, callback_input: Any) -> None:
        step = int(callback_input.global_step)
        scope = ("weights", "optimizer", "scheduler", "rng", "data")
        self.monitor.checkpoint(os.path.abspath(callback_input.ckpt_path), step, scope)

    def _checkpoint_now(self, command: Command) -> dict[str, Any]:
        self._save = True
        return {"step": int(self.trainer.global_step) + 1}

    def _stop(self, command: Command) -> dict[str, Any]:
        self.stopped = True
        step = self.trainer.cfg.trainer.max_training_steps = int(self.trainer.global_step)
        return {"step": step}


def _field(batch: Any, name: str) -> Any:
    """A tensor of the batch; None where it holds none."""
    return batch.get(name, None)


def configuration(cfg: Any) -> dict[str, Any]:
    """The settings as nested dicts, without what is named as a secret."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(k): plain(v) for k, v in value.items() if not any(word in str(k).lower() for word in _SECRET)}
        return value

    said = asdict(cfg) if is_dataclass(cfg) and not isinstance(cfg, type) else {}
    return dict(plain(said)) | {"host": "skyrl", "entropy_estimator": "full_vocab"}


def semantics(cfg: Any) -> dict[str, Semantics]:
    """The trainer scores the full vocabulary at the sampling temperature. vLLM's log-probs are before temperature and
    truncation unless `engine_init_kwargs` says `logprobs_mode: processed_logprobs`."""
    sampling, engine = cfg.generator.sampling_params, cfg.generator.inference_engine
    processed = "processed" in str(dict(engine.engine_init_kwargs or {}).get("logprobs_mode", "raw_logprobs"))
    kept = f"top_k={sampling.top_k},top_p={sampling.top_p},min_p={sampling.min_p}" if processed else "none"
    trainer = Semantics(
        engine="skyrl", temperature=float(sampling.temperature), truncation="none", normaliser="full_vocabulary",
        penalties="none", source="rescore",
    )  # fmt: skip
    rollout = Semantics(
        engine=str(engine.backend), temperature=float(sampling.temperature) if processed else 1.0, truncation=kept,
        normaliser="kept_set" if processed else "full_vocabulary", penalties="none", source="decode",
    )  # fmt: skip
    return {"a": trainer, "b": rollout}
