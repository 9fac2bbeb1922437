"""The driver's half: what no worker can do. `python -m foreshock.adapters.roll.driver --config_path P --config_name N`.

Takes the place of `examples/start_rlvr_pipeline.py` (P is a folder) and runs ROLL's own pipeline under a subclass. The
driver is then the run's controller: it rewinds the loop to a checkpoint's step, sets the IS correction where ROLL
computes it (the driver, ≥ v0.2.0), tells `group.mixed` from the very groups that are normalised, and hands the rest to
every worker. With `FORESHOCK_ROLL_ON_POLICY` exact or detached it also puts the rows of a prompt back beside each other
before they are normalised, which ROLL from 2025-10-29 to 2026-02-04 does not.

ROLL's data schedulers cannot be set back (no version has a call for it): after a rollback the next prompts follow, so
the batches that preceded the collapse are not repeated. Asynchronous pipelines have rollouts in flight that cannot be
discarded here: for them no rollback is announced.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from importlib import import_module
from logging import getLogger
from typing import Any

import foreshock
from foreshock import Command
from foreshock.guard import guarded

_log = getLogger("foreshock")
WORKERS_DO = ("scale_lr", "skip_update", "probe")


class RewindError(Exception):
    """Leaves `run` at a boundary, to enter it again at another step. Caught by `watched_pipeline.run` alone."""


class StopAskedError(Exception):
    """A `stop` command: leaves `run` at a boundary, after ROLL's checkpoint of that step."""


def watched_pipeline(base: type) -> type:
    """A subclass of ROLL's RLVRPipeline (or one of the same shape). Raises TypeError for another class."""
    for method in ("run", "do_checkpoint"):
        if not callable(getattr(base, method, None)):
            raise TypeError(f"not a ROLL pipeline as this adapter knows it: {base.__name__} has no {method}")

    class WatchedPipeline(base):  # type: ignore[misc]
        """ROLL's pipeline; see the module."""

        def __init__(self, pipeline_config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(pipeline_config, *args, **kwargs)
            self._foreshock = Driver(self)

        def run(self) -> Any:
            status = "failed"
            try:
                while True:
                    try:
                        result = super().run()
                    except RewindError:
                        continue
                    status = "completed"
                    return result
            except StopAskedError as why:
                status = "stopped"
                _log.warning("foreshock: %s", why)
                return None
            finally:
                self._foreshock.finish(status)

        def do_checkpoint(self, global_step: int, *args: Any, **kwargs: Any) -> Any:
            result = super().do_checkpoint(global_step, *args, **kwargs)
            self._foreshock.boundary(global_step)
            return result

    WatchedPipeline.__name__ = WatchedPipeline.__qualname__ = f"Watched{base.__name__}"
    return WatchedPipeline


class Driver:
    """The driver's monitor and handlers, on a pipeline that has been built."""

    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline
        config = pipeline.pipeline_config
        said = config.to_dict() if callable(getattr(config, "to_dict", None)) else {}
        self.monitor = foreshock.init(
            config=dict(said) | {"host": "roll"},
            role="driver",
            rank=0,
            mode=os.environ.get("FORESHOCK_MODE", "observe"),
        )
        self.guard = self.monitor.guard
        self.puts_back = os.environ.get("FORESHOCK_ROLL_ON_POLICY", "").strip().lower() in ("exact", "detached")
        self._told = False
        self._leave: Exception | None = None
        self._step = 0
        handlers: dict[str, Callable[[Command], Any]] = {"stop": self._stop, "pause": lambda command: None}
        handlers["resume"] = handlers["pause"]
        if hasattr(pipeline.actor_train, "foreshock_apply"):
            handlers |= dict.fromkeys(WORKERS_DO, self._on_workers)
            handlers |= dict.fromkeys(("enable_is_correction", "disable_is_correction"), self._correct)
            if not getattr(config, "async_pipeline", False):
                handlers["rollback"] = self._rollback
        for kind, handler in handlers.items():
            self.monitor.on(kind, handler)

    def finish(self, status: str) -> None:
        """Ends the run. Workers first, lest a late frame of theirs bring it back; not of a run that failed, whose
        workers may hang."""
        if status != "failed" and hasattr(self.pipeline.actor_train, "foreshock_apply"):
            try:
                self._ask("finish", {"status": status})
            except Exception as error:
                self.guard.caught("finish", error)
        self.monitor.finish(status)

    def boundary(self, global_step: int) -> None:
        """At the end of ROLL's step: its metrics, and the commands that are due. Leaves `run` if one asks for it."""
        self._step = global_step
        self._log(global_step)
        self.monitor.end_step(global_step)
        leave, self._leave = self._leave, None
        if leave is not None:
            self._keep_metrics(global_step)
            raise leave

    def put_back_said(self, share: float) -> None:
        """A line in the run's log, once."""
        if not self._told:
            self._told = True
            text = f"{share:.0%} of the advantage groups held other prompts; rows are put back before they are formed"
            _log.warning("foreshock: %s", text)
            self.monitor.notice("note", self._step, text=text)

    @guarded()
    def _log(self, global_step: int) -> None:
        history = self.pipeline.state.log_history
        metrics = history[-1] if history else {}
        correct = metrics.get("val_correct/all/mean")
        if correct is not None:
            self.monitor.log({"reward.validation": correct})
        self.monitor.log({"time.step_s": metrics["time/step_total"]} if metrics.get("time/step_total") else {})

    @guarded()
    def _keep_metrics(self, global_step: int) -> None:
        """ROLL writes a step's metrics after the boundary that is left here."""
        self.pipeline.tracker.log(values=self.pipeline.state.log_history[-1], step=global_step)

    def _ask(self, kind: str, arguments: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """One action on every worker; refused if any refuses."""
        answers = self.pipeline.actor_train.foreshock_apply(kind, arguments)
        refused = [detail for state, detail in answers if state != "done"]
        return ("refused", refused[0]) if refused else ("done", answers[0][1])

    def _on_workers(self, command: Command) -> Any:
        state, detail = self._ask(command.kind, command.arguments)
        if state == "refused":
            command.refused(detail)
        return detail

    def _correct(self, command: Command) -> Any:
        """Where ROLL corrects on the driver, its switch there turns too, or the workers' weights would be ones."""
        state, detail = self._ask(command.kind, command.arguments)
        if state == "refused":
            command.refused(detail)
            return None
        weight = getattr(getattr(self.pipeline.pipeline_config, "train_infer_correction", None), "is_weight", None)
        if weight is not None:
            weight.enabled = command.kind == "enable_is_correction"
            if weight.enabled:
                weight.upper_bound = float(command.arguments.get("cap", 2.0))
        return detail | {"driver": weight is not None}

    def _stop(self, command: Command) -> Any:
        self._leave = StopAskedError(f"stop was asked for: {command.command.reason or 'by command'}")
        return {"how": "the loop is left after this step"}

    def _rollback(self, command: Command) -> Any:
        """Workers load the checkpoint; the loop goes back to its step, with the pipeline's own record of it."""
        path = str(command.arguments.get("checkpoint", ""))
        target = command.arguments.get("step")
        step = int(target) if target is not None else _step_of(path)
        if step is None or step > self._step:
            command.refused({"reason": f"no earlier step is known for {path!r}"})
            return None
        state, detail = self._ask("rollback", command.arguments)
        if state == "refused":
            command.refused(detail)
            return None
        record = self.pipeline.state
        record.log_history = [m for m in record.log_history if m.get("system/step", 0) <= step]
        record.step = step
        self._leave = RewindError()
        return detail | {"loop": f"goes on after step {step}", "data": "the next prompts; none is repeated"}


def _step_of(path: str) -> int | None:
    """The step in `…/checkpoint-40`."""
    tail = path.rstrip("/").rpartition("checkpoint-")[2]
    return int(tail) if tail.isdigit() else None


def mixed_share(domain_batch: Any, group: int) -> float:
    """Share of groups of `group` rows, as they stand, that hold more than one prompt."""
    prompts_NP = domain_batch.batch["prompts"]
    blocks = prompts_NP.reshape(-1, group, prompts_NP.shape[-1])
    return float((blocks != blocks[:, :1]).any(-1).any(-1).float().mean())


def put_back(domain_batch: Any, group: int) -> bool:
    """Puts the rows of each prompt beside each other, in place; False where they are, or where a prompt lost rows.

    All of a row moves together, and ROLL puts rows in their final order by `prompt_id` after the advantages.
    """
    import torch

    prompts_NP = domain_batch.batch["prompts"]
    _, prompt_N = prompts_NP.unique(dim=0, return_inverse=True)
    if (torch.bincount(prompt_N) % group).any() or mixed_share(domain_batch, group) == 0:
        return False
    domain_batch.reorder(torch.argsort(prompt_N, stable=True))
    return True


def watch_groups(module: Any, driver: Callable[[], Driver | None]) -> None:
    """Wraps `get_sample_level_mask` and `reward_postprocess` in the pipeline's module.

    They are what reads rows by group; the second is given what will be normalised, in that order.
    """
    for name, tells in (("get_sample_level_mask", False), ("reward_postprocess", True)):
        original = getattr(module, name, None)
        if original is not None:
            setattr(module, name, _looked_at(original, driver, tells))


def _looked_at(original: Any, driver: Callable[[], Driver | None], tells: bool) -> Any:
    @functools.wraps(original)
    def looked_at(data: Any, pipeline_config: Any, *args: Any, **kwargs: Any) -> Any:
        owner = driver()
        if owner is not None:
            _look(owner, data, pipeline_config, tells)
        return original(data, pipeline_config, *args, **kwargs)

    return looked_at


def _look(owner: Driver, data: Any, config: Any, tells: bool) -> None:
    try:
        group = int(config.actor_infer.generating_args.num_return_sequences)
        by_group = config.adv_estimator == "grpo" or getattr(config, "norm_mean_type", None) == "group"
        if group <= 1 or not by_group or len(data.batch["prompts"]) % group:
            return
        found = mixed_share(data, group)
        if owner.puts_back and put_back(data, group):
            owner.put_back_said(found)
            found = mixed_share(data, group)
        if tells:
            owner.monitor.log({"group.mixed": found})
    except Exception as error:
        owner.guard.caught("group.mixed", error)


def main() -> None:  # pragma: no cover - needs a Ray cluster with accelerators
    """ROLL's own start script, under the watched pipeline."""
    import argparse

    os.environ["FORESHOCK_ROLL_DRIVER"] = "1"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config_path", default="config")
    parser.add_argument("--config_name", default="sppo_config")
    chosen = parser.parse_args()
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf
    from roll.distributed.scheduler.initialize import init
    from roll.pipeline.rlvr import rlvr_pipeline
    from roll.pipeline.rlvr.rlvr_config import RLVRConfig

    initialize_config_dir(config_dir=os.path.abspath(chosen.config_path), version_base=None)
    settings = OmegaConf.to_container(compose(config_name=chosen.config_name), resolve=True)
    config = import_module("dacite").from_dict(data_class=RLVRConfig, data=settings)
    config.actor_train.system_envs["FORESHOCK_ROLL_DRIVER"] = "1"
    init()
    pipeline = watched_pipeline(rlvr_pipeline.RLVRPipeline)(pipeline_config=config)
    watch_groups(rlvr_pipeline, lambda: getattr(pipeline, "_foreshock", None))
    pipeline.run()


if __name__ == "__main__":  # pragma: no cover
    main()
