"""OpenRLHF: start `python -m foreshock.adapters.openrlhf` with train_ppo_ray's own options in place of the script.

OpenRLHF has no hooks. Ahead of its own script this puts subclasses in place of its two Ray actors: the policy worker
(`PolicyModelActor`, whose loss sees current, old and rollout log-probs of a micro-batch at once) and the driver
(`PPOTrainer`: scalars, checkpoints, boundaries, commands). A Foreshock step is one rollout with its updates, under
OpenRLHF's global step. Without FORESHOCK_URL nothing is put in place.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping
from importlib import import_module
from logging import getLogger
from types import SimpleNamespace
from typing import Any, Final

import foreshock
from foreshock import Command, Monitor
from foreshock.adapters.openrlhf_worker import WorkerWatch
from foreshock.frames import names
from foreshock.guard import guarded

_log = getLogger("foreshock")
SCRIPT: Final = "openrlhf.cli.train_ppo_ray"
CAPABILITIES: Final[dict[str, str]] = {
    "enable_is_correction": "with `--algo.advantage.is_correction_enable` (else vLLM is not asked for log-probs): the "
    "loss of every worker, from the next rollout on",
    "disable_is_correction": "as above",
    "checkpoint_now": "DeepSpeed's checkpoint of the policy (and critic) at the boundary, not with `--ckpt.disable_ds`",
    "pause": "always",
    "resume": "always",
    "stop": "always: the driver's `fit` returns after the step",
}
IMPOSSIBLE: Final[dict[str, str]] = {
    "rollback": "OpenRLHF loads a checkpoint at its start only: stop, and `--ckpt.load_enable`",
    "resync_trainer": "no seam of OpenRLHF's for it",
    "resync_engine": "OpenRLHF pushes its weights after every step by itself",
    "scale_lr": "DeepSpeed's engine owns optimizer and schedule; not tried",
    "skip_update": "as above",
    "probe": "no second scoring pass",
}


class StopAskedError(RuntimeError):
    """A `stop` command, on its way out of the driver's loop."""


def main() -> None:
    """Runs OpenRLHF's script, watched where FORESHOCK_URL is set."""
    if os.environ.get("FORESHOCK_URL"):
        install()
    sys.argv[0] = SCRIPT
    runpy.run_module(SCRIPT, run_name="__main__", alter_sys=True)


def install() -> None:
    """Puts the watched actors in the modules from which the script imports them."""
    workers: Any = import_module("openrlhf.trainer.ray.ppo_actor")
    driver: Any = import_module("openrlhf.trainer.ppo_trainer")
    workers.PolicyModelActor = watched(workers.PolicyModelActor, WorkerWatch, num_gpus=1)
    driver.PPOTrainer = watched(driver.PPOTrainer, DriverWatch)


def watched(actor: Any, ours: type, **options: Any) -> Any:
    """A Ray actor class that is `actor` with `ours` before it."""
    import ray

    host = actor.__ray_metadata__.modified_class.__ray_actor_class__
    made = type(host.__name__, (ours, host), {})
    return ray.remote(**options)(made) if options else ray.remote(made)


class DriverWatch:
    """Before PPOTrainer."""

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        part = DriverPart(self)
        self._foreshock, status = part, "failed"
        try:
            result = super().fit(*args, **kwargs)  # type: ignore[misc]
            status = "completed"
            return result
        except StopAskedError:
            status = "stopped"
            return None
        finally:
            part.finish(status)

    def train_step(self, rollout_samples: Any, global_step: int) -> Any:
        status, step = super().train_step(rollout_samples, global_step)  # type: ignore[misc]
        self._foreshock.scalars(status)
        return status, step

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        logs = super().evaluate(*args, **kwargs)  # type: ignore[misc]
        self._foreshock.validated(logs)
        return logs

    def save_logs_and_checkpoints(self, global_step: int, logs_dict: Any = None, client_states: Any = None) -> None:
        super().save_logs_and_checkpoints(global_step, logs_dict, client_states)  # type: ignore[misc]
        self._foreshock.boundary(int(global_step), client_states)


class DriverPart:
    """What the driver keeps. Whatever of ours fails is caught by the monitor's guard."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.args = trainer, trainer.args
        self.stopped = False
        self._states: dict[str, Any] = {}
        self._step = 0
        copies = int(self.args.ds.ring_attn_size) * int(self.args.ds.tensor_parallel_size)
        ranks = len(trainer.actor_model_group._actor_handlers) // copies
        self.monitor: Monitor = foreshock.init(
            config=configuration(self.args), role="driver", rank=0, world=1,
            expected_ranks={"driver": 1, "trainer": ranks}, mode=os.environ.get("FORESHOCK_MODE", "observe"),
        )  # fmt: skip
        self.guard = self.monitor.guard
        self._begin()

    @guarded()
    def _begin(self) -> None:
        chosen = self.monitor.settings
        note = {
            "run": self.monitor.identity.run,
            "launch": self.monitor.identity.launch,
            "settings": {name: getattr(chosen, name) for name in ("url", "token", "ca_file", "verify_tls")},
        }
        silent = [answer for answer in self._ask("foreshock_watch", note=note) if "error" in answer]
        if silent:
            self.monitor.notice("note", text=f"{len(silent)} workers are not watched: {silent[0]['error']}"[:1000])
        handlers = {"stop": self._stop, "pause": lambda command: None, "resume": lambda command: None}
        if not self.args.ckpt.disable_ds:
            handlers["checkpoint_now"] = self._checkpoint_now
        if self.args.algo.advantage.is_correction_enable:
            handlers["enable_is_correction"] = lambda command: self._correct(True, command)
            handlers["disable_is_correction"] = lambda command: self._correct(False, command)
        for kind, handler in handlers.items():
            self.monitor.on(kind, handler)

    def _ask(self, method: str, **arguments: Any) -> list[Any]:
        """What a method of each worker answers."""
        import ray

        return list(ray.get(self.trainer.actor_model_group.async_run_method(method_name=method, **arguments)))

    @guarded()
    def scalars(self, status: Mapping[str, Any]) -> None:
        """OpenRLHF's own figures of a step, under our names."""
        self.monitor.log(names.scalars("openrlhf", status))

    @guarded()
    def validated(self, logs: Mapping[str, Any]) -> None:
        """Mean pass@1 over evaluation sets. OpenRLHF evaluates past the boundary: it lands in the step that follows."""
        passed = [float(value) for name, value in logs.items() if name.startswith("eval_") and name.endswith("_pass1")]
        if passed:
            self.monitor.log({"reward.validation": sum(passed) / len(passed)})

    def boundary(self, step: int, states: Any) -> None:
        """The step is over: weights are pushed, figures and checkpoint written. Raises StopAskedError where asked."""
        self._step, self._states = step, dict(states or {})
        if step % self.args.ckpt.save_steps == 0:
            self._saved(f"global_step{step}")
        self._seal_workers()
        self.monitor.end_step(step)
        if self.stopped:
            raise StopAskedError

    @guarded()
    def _seal_workers(self) -> None:
        self._ask("foreshock_seal", step=self._step)

    @guarded()
    def _saved(self, tag: str) -> None:
        if not self.args.ckpt.disable_ds:
            scope = ("weights", "optimizer", "scheduler", "data")
            self.monitor.checkpoint(os.path.join(self.args.ckpt.path, "_actor", tag), self._step, scope)

    def _checkpoint_now(self, command: Command) -> dict[str, Any]:
        import ray

        tag = f"global_step{self._step}"
        saved = self.trainer.actor_model_group.async_run_method(
            method_name="save_checkpoint", tag=tag, client_states=self._states
        )
        if self.trainer.critic_model_group is not None:
            saved += self.trainer.critic_model_group.async_run_method(method_name="save_checkpoint", tag=tag)
        ray.get(saved)
        self._saved(tag)
        return {"tag": tag}

    def _correct(self, on: bool, command: Command) -> dict[str, Any]:
        cap = command.arguments.get("cap") if on else None
        low = float(self.args.algo.advantage.is_correction_threshold[0])
        threshold = None if cap is None else [low, float(cap)]
        self._ask("foreshock_correction", on=on, threshold=threshold)
        self.monitor.notice("settings", enable_vllm_is_correction=on, threshold=threshold)
        return {"enable_vllm_is_correction": on}

    def _stop(self, command: Command) -> dict[str, Any]:
        self.stopped = True
        return {"step": self._step}

    def finish(self, status: str) -> None:
        """`fit` has ended."""
        self._finish_workers(status)
        self.monitor.finish(status)

    @guarded()
    def _finish_workers(self, status: str) -> None:
        self._ask("foreshock_finish", status=status)


def configuration(args: Any) -> dict[str, Any]:
    """The options as nested dicts, without secrets that OpenRLHF keeps there."""

    def plain(value: Any) -> Any:
        if isinstance(value, SimpleNamespace) or hasattr(value, "__dict__"):
            return {name: plain(inner) for name, inner in vars(value).items() if name != "key"}
        return value

    return dict(plain(args)) | {"host": "openrlhf", "entropy_estimator": "full_vocab"}


if __name__ == "__main__":
    from foreshock.adapters.openrlhf import main as importable  # so that Ray ships importable classes

    importable()
