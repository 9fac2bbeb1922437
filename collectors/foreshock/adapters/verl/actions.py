"""Commands on a live verl trainer, at the driver's boundary: weights are pushed, and the engines are awake."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreshock import Command
from foreshock.adapters.optimizer import asked_skips
from foreshock.adapters.verl import settings, worker

if TYPE_CHECKING:
    from foreshock.adapters.verl.driver import Driver

CORRECTION = "algorithm.rollout_correction"


class StopAskedError(Exception):
    """A `stop` command: leaves v0's `fit`. Caught by the driver alone."""


class Actions:
    """Registers, and so announces, what this trainer can really do."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.trainer = driver.trainer
        config = self.trainer.config
        self._level = settings.at(config, f"{CORRECTION}.rollout_is", "token")
        handlers: dict[str, Callable[[Command], Any]] = {
            "stop": self._stop,
            "skip_update": self._skip_update,
            "pause": lambda command: None,
            "resume": lambda command: None,
        }
        if settings.can_correct(config):
            handlers |= {"enable_is_correction": self._correct, "disable_is_correction": self._correct}
        if settings.synchronous(self.trainer):
            handlers |= {"rollback": self._rollback, "checkpoint_now": self._checkpoint_now}
        if driver.watched and all(answer["scale_lr"] for answer in driver.answers):
            handlers["scale_lr"] = self._scale_lr
        for kind, handler in handlers.items():
            driver.monitor.on(kind, handler)

    def _stop(self, command: Command) -> Any:
        self.driver.stopped = True
        if hasattr(self.trainer, "trainer_mode"):
            self.trainer.total_training_steps = self.trainer.global_steps
        return {"step": self.trainer.global_steps}

    def _skip_update(self, command: Command) -> Any:
        try:
            self.driver.skips += asked_skips(command.arguments)
        except ValueError as why:
            command.refused(str(why))
        return {"updates": self.driver.skips}

    def _scale_lr(self, command: Command) -> Any:
        answers = self.driver.workers.ask(worker.scale, dict(command.arguments))
        refused = [answer["refused"] for answer in answers if "refused" in answer]
        if refused:
            command.refused(refused[0])
            return None
        self.driver.monitor.notice("settings", **answers[0])
        return answers[0]

    def _correct(self, command: Command) -> Any:
        """verl reads these at every step, on the driver; rejection (`rollout_rs`) stays as it is."""
        from omegaconf import OmegaConf

        on = command.kind == "enable_is_correction"
        changed: dict[str, Any] = {"rollout_is": self._level if on else None}
        if on and command.arguments.get("cap") is not None:
            cap = float(command.arguments["cap"])
            if cap <= 0:
                command.refused(f"cap must be above 0, not {cap}")
                return None
            changed["rollout_is_threshold"] = cap
        for name, value in changed.items():
            OmegaConf.update(self.trainer.config, f"{CORRECTION}.{name}", value, force_add=True)
        self.driver.monitor.notice("settings", **changed)
        return changed | {"from": "the next step"}

    def _checkpoint_now(self, command: Command) -> Any:
        with self._engines_asleep():
            self.trainer._save_checkpoint()
        return {"step": self.trainer.global_steps}

    def _rollback(self, command: Command) -> Any:
        """As verl loads when it resumes; its own `_load_checkpoint` is not called, for it may delete what it loads."""
        trainer, path = self.trainer, str(command.arguments.get("checkpoint", "")).rstrip("/")
        step = _step_of(path)
        reason = self._hindrance(path, step)
        if reason or step is None:
            command.refused(reason)
            return None
        with self._engines_asleep():
            trainer.actor_rollout_wg.load_checkpoint(local_path=os.path.join(path, "actor"), del_local_after_load=False)
            if getattr(trainer, "use_critic", False):
                trainer.critic_wg.load_checkpoint(local_path=os.path.join(path, "critic"), del_local_after_load=False)
            data = self._restore_data(command, path)
            trainer.global_steps = step  # the loop adds one before the next step
        self.driver.skips = 0
        if self.driver.watched:
            self.driver.workers.tell(worker.new_attempt, "rollback")
        return {"checkpoint": path, "scope": ["weights", "optimizer", "scheduler", "rng"], "data": data}

    def _hindrance(self, path: str, step: int | None) -> str:
        trainer = self.trainer
        if step is None or step > trainer.global_steps:
            return f"no earlier step is known for {path!r}"
        if not within(path, trainer.config.trainer.default_local_dir):
            return f"{path!r} is not below this run's checkpoints"
        if not os.path.isdir(os.path.join(path, "actor")):
            return f"the driver finds no checkpoint at {path!r}"
        if trainer.global_steps >= trainer.total_training_steps:
            return "the loop ends with this step"
        return ""

    def _restore_data(self, command: Command, path: str) -> str:
        """The position in the data, where it is asked for: v1 asks its iterator anew for every batch, v0 does not."""
        import torch

        asked = "data" in (command.arguments.get("scope") or ()) and not command.arguments.get("skip_until_step")
        saved = os.path.join(path, "data.pt")
        if not asked or not hasattr(self.trainer, "train_dataloader_it") or not os.path.exists(saved):
            return "goes on: the batches since the checkpoint are not repeated"
        # verl saves objects here, and loads them so itself; `within` keeps the path below this job's own checkpoints.
        state = torch.load(saved, weights_only=False)  # nosec B614
        self.trainer.train_dataloader.load_state_dict(state)
        self.trainer.train_dataloader_it = None
        return "set back to the checkpoint's"

    @contextlib.contextmanager
    def _engines_asleep(self) -> Iterator[None]:
        """As around verl's own loading: memory free for the trainer, then its weights in the engines, caches empty."""
        manager = self.trainer.checkpoint_manager
        manager.sleep_replicas()
        try:
            yield
        finally:
            manager.update_weights(self.trainer.global_steps)


def within(path: str, root: str) -> bool:
    """Whether `path` lies below `root`, links followed: a checkpoint is unpickled, and its path came by the network."""
    return Path(root).resolve() in Path(path).resolve().parents


def _step_of(path: str) -> int | None:
    """The step in `…/global_step_40`."""
    found = re.search(r"global_step_(\d+)$", path)
    return int(found[1]) if found else None
