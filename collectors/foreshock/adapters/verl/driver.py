"""The driver's part, on a built trainer's instance: step boundaries, verl's own scalars, checkpoints and commands.

A boundary is verl's call of `Tracking.log` with a step's metrics: the one point that both of its trainers pass when a
step is over, weights are pushed and every figure is known. All wrappers go away with `fit`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from logging import getLogger
from types import ModuleType
from typing import Any, Final

import foreshock
from foreshock import Monitor
from foreshock.adapters.optimizer import on_instance
from foreshock.adapters.verl import groups, settings, worker
from foreshock.adapters.verl.actions import Actions, StopAskedError
from foreshock.adapters.verl.workers import Workers
from foreshock.frames import names
from foreshock.guard import guarded

_log = getLogger("foreshock")
STANDS_ON: Final = ("fit", "_update_actor", "_save_checkpoint", "actor_rollout_wg", "checkpoint_manager", "config")


def attach(trainer: Any, run: str | None = None, *, monitor: Monitor | None = None, **arguments: Any) -> Driver:
    """See `foreshock.adapters.verl.attach`. A second call on the same trainer gives the first one's answer."""
    for name in STANDS_ON:
        if not hasattr(trainer, name):
            raise TypeError(f"not a verl trainer as this adapter knows it: {type(trainer).__name__} has no {name}")
    if isinstance(trainer.__dict__.get("_foreshock"), Driver):
        found: Driver = trainer._foreshock
        return found
    workers = Workers(trainer.actor_rollout_wg)
    if monitor is None:
        run = run or os.environ.get("FORESHOCK_RUN") or settings.run_name(trainer.config)
        expected = {"driver": 1} | ({"trainer": workers.reporting()} if workers.reporting() else {})
        defaults: dict[str, Any] = {"mode": os.environ.get("FORESHOCK_MODE", "observe")}
        monitor = foreshock.init(
            run, settings.configuration(trainer.config), role="driver", rank=0, world=1, expected_ranks=expected,
            **(defaults | arguments),
        )  # fmt: skip
    driver = Driver(trainer, monitor, workers)
    if monitor.enabled:
        trainer._foreshock = driver
        driver.install()
    return driver


class Driver:
    """One trainer's. What fails of ours is caught by the monitor's guard."""

    def __init__(self, trainer: Any, monitor: Monitor, workers: Workers) -> None:
        self.trainer = trainer
        self.monitor = monitor
        self.guard = monitor.guard
        self.workers = workers
        self.answers: list[dict[str, Any]] = []
        """What each worker said when it was asked to watch itself."""
        self.skips = 0
        """Updates still to be left out."""
        self.stopped = False
        self._unsettled: list[int] = []
        self._mask: Any = None
        self._skipped = 0.0

    @property
    def watched(self) -> bool:
        """Whether every worker is."""
        return bool(self.answers) and not any("error" in answer for answer in self.answers)

    def install(self) -> None:
        """Asks the workers to watch themselves, wraps `fit`, and announces what is possible."""
        self._watch_workers()
        self.trainer.fit = self._around(self.trainer.fit, self._fit)
        Actions(self)

    @guarded()
    def _watch_workers(self) -> None:
        chosen = self.monitor.settings
        note = {
            "run": self.monitor.identity.run,
            "launch": self.monitor.identity.launch,
            "bypass": settings.bypass(self.trainer.config),
            "settings": {name: getattr(chosen, name) for name in ("url", "token", "ca_file", "verify_tls")},
        }
        try:
            self.answers = self.workers.ask(worker.watch, note)
        except Exception as error:  # foreshock is not installed where the workers run, mostly
            self.answers = [{"error": repr(error)}]
        silent = [answer["error"] for answer in self.answers if "error" in answer]
        if silent:
            # The ranks stay expected, so the service says `missing_ranks` as well.
            text = f"{len(silent)} of {len(self.answers)} actor workers are not watched: {silent[0][:500]}"
            _log.error("foreshock: %s", text)
            self.monitor.notice("note", text=text)

    # --- around verl's own: whatever they return or raise is passed on as it is --------------------------------------

    @staticmethod
    def _around(original: Any, ours: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return ours(original, *args, **kwargs)

        return call

    def _fit(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        status = "failed"
        try:
            with self._wrapped():
                result = original(*args, **kwargs)
            status = "stopped" if self.stopped else "completed"
            return result
        except StopAskedError:
            status = "stopped"
            self.trainer._shutdown_dump_executor()
            return None
        finally:
            self._finish_workers(status)
            self.monitor.finish(status)

    @contextlib.contextmanager
    def _wrapped(self) -> Iterator[None]:
        """While `fit` runs."""
        from verl.utils.tracking import Tracking

        trainer, module = self.trainer, _module_of(self.trainer)
        with contextlib.ExitStack() as stack:
            for owner, name, ours in (
                (Tracking, "log", self._logged),
                (trainer, "_update_actor", self._updating),
                (trainer, "_save_checkpoint", self._saving),
                (trainer, "_compute_old_log_prob", self._scoring),
                (module, "compute_advantage", self._advantages),
                (module, "compute_advantage_for_multi_trajectories", self._advantages),
            ):
                original = getattr(owner, name, None)
                if original is not None:
                    stack.enter_context(on_instance(owner, name, self._around(original, ours)))
            yield

    def _updating(self, original: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if self.skips > 0:
            self.skips -= 1
            self._skipped = 1.0
            return _unchanged(batch)
        self._send_mask(batch)
        return original(batch, *args, **kwargs)

    def _saving(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self._saved()
        return result

    def _scoring(self, original: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(batch, *args, **kwargs)
        self._keep_mask(batch)
        return result

    def _advantages(self, original: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        self._grouped(data)
        return original(data, *args, **kwargs)

    def _logged(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        metrics = kwargs.get("data", args[1] if len(args) > 1 else {})
        self._scalars(metrics)
        if "training/global_step" in metrics:  # else verl logs a validation ahead of its first step
            self._boundary(int(self.trainer.global_steps))
        return result

    def _boundary(self, step: int) -> None:
        self._tell_workers(step)
        self.monitor.end_step(step)
        if self.stopped and not hasattr(self.trainer, "trainer_mode"):
            raise StopAskedError  # v0's loop looks at its last step only at the head of the next

    # --- measuring ---------------------------------------------------------------------------------------------------

    @guarded()
    def _scalars(self, metrics: Mapping[str, Any]) -> None:
        # The workers have the largest gradient norm and the rate as it was scaled.
        measured = {"grad.norm", "lr"} if self.watched and not self._skipped else set()
        said = names.scalars("verl", metrics, without=measured)
        if "training/global_step" in metrics:
            said |= {"update.skipped": self._skipped, "weights.version": float(self.trainer.global_steps)}
            self._skipped = 0.0
        self.monitor.log(said)

    @guarded()
    def _grouped(self, data: Any) -> None:
        self.monitor.log(groups.values(data))

    @guarded()
    def _tell_workers(self, step: int) -> None:
        for error in self.workers.failures():
            self.monitor.notice("note", text=f"an actor worker did not take a boundary: {error!r}"[:1000])
        if self.answers and "rank" in self.answers[0]:
            self.workers.tell(worker.seal, step)
        self._settle()

    @guarded()
    def _finish_workers(self, status: str) -> None:
        if self.answers and "rank" in self.answers[0]:
            self.workers.ask(worker.finish, status)

    @guarded()
    def _keep_mask(self, batch: Any) -> None:
        """v0 overwrites `response_mask` by what rejection left of it."""
        rows = getattr(batch, "batch", None)
        self._mask = rows["response_mask"] if rows is not None and "response_mask" in rows else None

    @guarded()
    def _send_mask(self, batch: Any) -> None:
        rows, mask, self._mask = getattr(batch, "batch", None), self._mask, None
        if rows is not None and mask is not None and mask.shape == rows["response_mask"].shape:
            rows["foreshock_mask"] = mask

    # --- checkpoints -------------------------------------------------------------------------------------------------

    @guarded()
    def _saved(self) -> None:
        """Announces a checkpoint once verl says that it can be resumed from: an asynchronous one, later."""
        self._unsettled.append(int(self.trainer.global_steps))
        self._settle()

    def _settle(self) -> None:
        if not self._unsettled:
            return
        root = os.path.abspath(self.trainer.config.trainer.default_local_dir)
        try:
            with open(os.path.join(root, "latest_checkpointed_iteration.txt"), encoding="utf-8") as file:
                latest = int(file.read())
        except (OSError, ValueError):
            return
        for step in [step for step in self._unsettled if step <= latest]:
            self._unsettled.remove(step)
            scope = ["weights", "optimizer", "scheduler", "rng", "data"]
            self.monitor.checkpoint(os.path.join(root, f"global_step_{step}"), step, scope)


def _module_of(trainer: Any) -> ModuleType | None:
    """The module whose globals the trainer's base class uses."""
    import sys

    known = ("verl.trainer.ppo.v1.trainer_base", "verl.trainer.ppo.ray_trainer")
    return next((sys.modules.get(base.__module__) for base in type(trainer).__mro__ if base.__module__ in known), None)


def _unchanged(batch: Any) -> Any:
    """What `_update_actor` gives: v1 its batch, v0 the metrics of the update."""
    if not hasattr(batch, "meta_info"):
        return batch
    from verl.protocol import DataProto

    return DataProto.from_single_dict(data={}, meta_info={"metrics": {}})
