"""TRL's GRPOTrainer: `attach(trainer, run="project/name")` before `trainer.train()`, nothing else.

What it stands on: a `TrainerCallback` for boundaries, checkpoints and the optimizer step (documented); instance
wrappers of `_generate_and_score_completions`, `_compute_loss` and `_get_per_token_logps_and_entropies`, the only
places where log-probs per token are (not documented); and the trainer's own metric lists, which hold every step
whatever `logging_steps` is. Nothing is computed again: the host's tensors are looked at before its backward pass.

A Foreshock step is one generation and all its updates; it bears the global step of its last update.

Legend: B rows of a micro-batch, T completion positions.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, Final

from transformers import TrainerCallback

import foreshock
from foreshock import Monitor
from foreshock.adapters.installed import version_of
from foreshock.adapters.trl_measures import Measures
from foreshock.adapters.trl_updates import Updates
from foreshock.guard import guarded

CAPABILITIES: Final[dict[str, str]] = {
    "enable_is_correction": "with `use_vllm`: sets `vllm_importance_sampling_correction` (and its cap) from the next "
    "generation on",
    "disable_is_correction": "with `use_vllm`, as above",
    "scale_lr": "multiplies every later update's learning rate; not under DeepSpeed or optimizers that update inside "
    "the backward pass",
    "skip_update": "the next updates leave parameters, moments and schedule as they are; as `scale_lr`, and not with "
    "a gradient scaler (`fp16`)",
    "checkpoint_now": "writes the trainer's own full checkpoint at the boundary",
    "pause": "always",
    "resume": "always",
    "stop": "always: `should_training_stop` at the boundary",
}
IMPOSSIBLE: Final[dict[str, str]] = {
    "rollback": "the trainer cannot load a full checkpoint while it trains: stop, and `resume_from_checkpoint`",
    "resync_trainer": "one copy of the weights: there is nothing to synchronise",
    "resync_engine": "TRL pushes its weights before every generation by itself",
    "probe": "no second scoring pass",
}


def attach(trainer: Any, run: str | None = None, *, monitor: Monitor | None = None, **arguments: Any) -> TRLAdapter:
    """Watches a GRPOTrainer from now on; call it on every process, after the trainer was made, before `train()`.

    `arguments` go to `foreshock.init` (mode, url, token …); or bring a `monitor`. The monitor ends with `train()`.
    Without a url (or FORESHOCK_URL) the trainer is left untouched. Raises TypeError for another kind of trainer.
    """
    for name in ("_compute_loss", "_generate_and_score_completions", "_get_per_token_logps_and_entropies"):
        if not callable(getattr(trainer, name, None)):
            raise TypeError(f"not a GRPOTrainer as this adapter knows it: {type(trainer).__name__} has no {name}")
    if monitor is None:
        processes = trainer.accelerator.num_processes
        arguments = {
            "config": configuration(trainer),
            "capabilities": capabilities(trainer),
            "broadcast": _broadcast if processes > 1 else None,
        } | arguments
        monitor = foreshock.init(run, **arguments)
    adapter = TRLAdapter(trainer, monitor)
    if monitor.enabled:
        adapter.install()
    return adapter


def capabilities(trainer: Any) -> set[str]:
    """The command kinds that this trainer, as it is configured, can really carry out."""
    kinds = {"checkpoint_now", "pause", "resume", "stop"}
    if getattr(trainer, "use_vllm", False) and hasattr(trainer, "vllm_importance_sampling_correction"):
        kinds |= {"enable_is_correction", "disable_is_correction"}
    accelerator, optim = trainer.accelerator, str(getattr(trainer.args, "optim", "")).lower()
    in_backward = "lomo" in optim or "layerwise" in optim
    place = str(accelerator.distributed_type).rpartition(".")[2]
    if place in ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP") and not in_backward:
        kinds.add("scale_lr")
        if accelerator.scaler is None:
            kinds.add("skip_update")
    return kinds


def configuration(trainer: Any) -> dict[str, Any]:
    """The trainer's arguments, and what our figures rest on. `to_dict` hides the host's own tokens."""
    return dict(trainer.args.to_dict()) | {
        "host": "trl",
        "host_version": version_of("trl"),
        "entropy_estimator": "full_vocab",
    }


class TRLAdapter(TrainerCallback):
    """One trainer's callback and wrappers. Whatever of ours fails is caught by the monitor's guard."""

    def __init__(self, trainer: Any, monitor: Monitor) -> None:
        self.trainer = trainer
        self.monitor = monitor
        self.guard = monitor.guard
        self.measures = Measures(trainer, monitor)
        self.updates = Updates(trainer, monitor)
        self._logps_BT: Any = None
        self._cycle = 0
        self._open_step: int | None = None
        self._sealed_step = -1

    def install(self) -> None:
        """Puts the wrappers on the trainer's instance, adds the callback and registers the handlers."""
        trainer = self.trainer
        self._wrap(trainer, "_generate_and_score_completions", self._around_generation)
        self._wrap(trainer, "_compute_loss", self._around_loss)
        self._wrap(trainer, "_get_per_token_logps_and_entropies", self._around_scoring)
        self._wrap(trainer.accelerator, "clip_grad_norm_", self._around_clipping)
        trainer.add_callback(self)
        handlers = self.updates.handlers()
        for kind in capabilities(trainer) & set(handlers):
            self.monitor.on(kind, handlers[kind])

    # --- around the trainer's own methods: whatever they return or raise is passed on as it is --------------------

    @staticmethod
    def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, functools.wraps(original)(functools.partial(around, original)))

    def _around_generation(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        training = self.trainer.model.training
        if training:
            self.updates.apply_correction()
        batch = original(*args, **kwargs)
        if training:
            self.measures.generated(batch)
        return batch

    def _around_loss(self, original: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self._logps_BT = None
        loss = original(model, inputs, *args, **kwargs)
        if self.trainer.model.training:
            self.measures.trained(inputs, loss, self._logps_BT)
        self._logps_BT = None
        return loss

    def _around_scoring(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        scored = original(*args, **kwargs)
        self._logps_BT = scored[0] if isinstance(scored, tuple) else None
        return scored

    def _around_clipping(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        norm = original(*args, **kwargs)
        if norm is not None:
            self.monitor.log({"grad.norm": norm})
        return norm

    # --- the callback --------------------------------------------------------------------------------------------

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.updates.before(kwargs["optimizer"])
        self.monitor.log(self.measures.loss())

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.measures.updates += self.updates.after(kwargs["optimizer"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.updates.forget_skipped()
        cycle = self._cycle_now()
        if cycle is None or cycle > self._cycle:
            self._cycle = cycle or 0
            self._open_step = int(state.global_step)
            if not control.should_evaluate:  # an evaluation that follows belongs to this step
                self._end_step()

    @guarded()
    def _cycle_now(self) -> int | None:
        """Generations whose updates are complete; None where the collector is off."""
        trainer = self.trainer
        return int(trainer._step) // max(1, int(trainer.args.steps_per_generation) * int(trainer.num_iterations))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.measures.validated(logs or {})  # before 1.16 the metrics of `on_evaluate` lack the reward

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end_step()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end_step()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._saved(int(state.global_step))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._cycle = self._cycle_now() or 0
        self._sealed_step = int(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if int(state.global_step) > self._sealed_step:
            self._open_step = int(state.global_step)
        self._end_step()
        self.monitor.finish("stopped" if self.updates.stopped else "completed")

    def _end_step(self) -> None:
        """Seals the open step. Not guarded: `end_step` guards itself, and all processes must come to its broadcast."""
        if self._open_step is None:
            return
        step, self._open_step = self._open_step, None
        self._sealed_step = step
        self.measures.add_metrics()
        self.monitor.end_step(step)

    @guarded()
    def _saved(self, step: int) -> None:
        trainer = self.trainer
        if not trainer.is_world_process_zero():
            return
        path = os.path.abspath(os.path.join(trainer.args.output_dir, f"checkpoint-{step}"))
        scope = ["weights"]
        if not trainer.args.save_only_model:
            scope += ["optimizer", "scheduler", "rng"]
            scope += [] if trainer.args.ignore_data_skip else ["data"]
        self.monitor.checkpoint(path, step, scope, self.measures.reward)


def _broadcast(value: Any) -> Any:
    from accelerate.utils import broadcast_object_list

    return broadcast_object_list([value], from_process=0)[0]
