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
from collections.abc import Callable, Mapping
from importlib import metadata
from logging import getLogger
from typing import Any, Final

from transformers import TrainerCallback

import foreshock
from foreshock import Command, Monitor, Semantics
from foreshock.adapters.optimizer import asked_skips, scale_lr
from foreshock.guard import guarded

_log = getLogger("foreshock")

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
        "host_version": _version("trl"),
        "entropy_estimator": "full_vocab",
    }


class TRLAdapter(TrainerCallback):
    """One trainer's callback and wrappers. Whatever of ours fails is caught by the monitor's guard."""

    def __init__(self, trainer: Any, monitor: Monitor) -> None:
        self.trainer = trainer
        self.monitor = monitor
        self.guard = monitor.guard
        self.updates = 0
        """Optimizer steps since the generation whose completions are being trained on."""
        self.lr_factor = 1.0
        self.skips = 0
        """Updates still to be left out."""
        self.stopped = False
        self._logps_BT: Any = None
        self._loss: Any = None
        self._cycle = 0
        self._open_step: int | None = None
        self._sealed_step = -1
        self._reward: float | None = None
        self._correction: tuple[bool, float | None] | None = None
        self._read: dict[str, tuple[list[float], int]] = {}
        self._lrs: list[Any] = []
        self._skipped: Any = None

    def install(self) -> None:
        """Puts the wrappers on the trainer's instance, adds the callback and registers the handlers."""
        trainer = self.trainer
        self._wrap(trainer, "_generate_and_score_completions", self._around_generation)
        self._wrap(trainer, "_compute_loss", self._around_loss)
        self._wrap(trainer, "_get_per_token_logps_and_entropies", self._around_scoring)
        self._wrap(trainer.accelerator, "clip_grad_norm_", self._around_clipping)
        trainer.add_callback(self)
        handlers: dict[str, Callable[[Command], Any]] = {
            "enable_is_correction": lambda command: self._set_correction(True, command),
            "disable_is_correction": lambda command: self._set_correction(False, command),
            "scale_lr": functools.partial(scale_lr, self),
            "skip_update": self._skip_update,
            "checkpoint_now": self._checkpoint_now,
            "stop": self._stop,
        }
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
            self._apply_correction()
        batch = original(*args, **kwargs)
        if training:
            self._generated(batch)
        return batch

    def _around_loss(self, original: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self._logps_BT = None
        loss = original(model, inputs, *args, **kwargs)
        if self.trainer.model.training:
            self._trained(inputs, loss)
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

    # --- measuring -----------------------------------------------------------------------------------------------

    @guarded()
    def _generated(self, batch: Mapping[str, Any]) -> None:
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
    def _trained(self, inputs: Mapping[str, Any], loss: Any) -> None:
        """A micro-batch went through the training forward."""
        loss = loss.detach()
        self._loss = loss if self._loss is None else self._loss + loss
        logps_BT = self._logps_BT
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
            engine="transformers", version=_version("transformers"), temperature=temperature, truncation="none",
            normaliser="full_vocabulary", penalties="none", source="rescore", dtype=str(self.trainer.model.dtype),
        )  # fmt: skip
        if getattr(self.trainer, "rollout_func", None) is not None:
            return {"a": trainer, "b": Semantics(engine="rollout_func", source="decode")}
        kept = ",".join(f"{name}={getattr(args, name, None)}" for name in ("top_k", "top_p", "min_p"))
        engine = Semantics(
            engine="vllm", version=_version("vllm"), temperature=temperature, truncation=kept, normaliser="kept_set",
            penalties=f"repetition={getattr(args, 'repetition_penalty', 1.0)}", source="decode",
        )  # fmt: skip
        return {"a": trainer, "b": engine}

    def _filtered_share(self, batch: Mapping[str, Any]) -> Any:
        """Share of sampled tokens in rows that `mask_truncated_completions` blanked; pad tokens are not sampled."""
        sampled_BT = batch["completion_ids"] != self.trainer._tokenizer.pad_token_id
        blanked_B = batch["completion_mask"].sum(1) == 0
        return (sampled_BT & blanked_B[:, None]).sum() / sampled_BT.sum().clamp(min=1)

    @guarded()
    def _add_metrics(self) -> None:
        """What the trainer noted since the last look, under our names; the lists begin anew when it logs."""
        for name, values in self.trainer._metrics["train"].items():
            known, seen = self._read.get(name, (None, 0))
            seen = seen if known is values else 0
            self._read[name] = (values, len(values))
            ours = _SCALARS.get(name, "")
            if ours:
                for value in values[seen:]:
                    self.monitor.log({ours: value})

    # --- the callback --------------------------------------------------------------------------------------------

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._before_update(kwargs["optimizer"])

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.updates += self._skipped is None
        # Schedulers must find the rates that they wrote, since some of them multiply. Not guarded: it must be undone.
        for group, lr in zip(kwargs["optimizer"].param_groups, self._lrs, strict=False):
            group["lr"] = lr
        self._lrs = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._skipped is not None:
            self._skipped._is_overflow = False
            self._skipped = None
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
        self._validated(logs or {})  # before 1.16 the metrics of `on_evaluate` lack the reward

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
        self.monitor.finish("stopped" if self.stopped else "completed")

    def _end_step(self) -> None:
        """Seals the open step. Not guarded: `end_step` guards itself, and all processes must come to its broadcast."""
        if self._open_step is None:
            return
        step, self._open_step = self._open_step, None
        self._sealed_step = step
        self._add_metrics()
        self.monitor.end_step(step)

    @guarded()
    def _validated(self, logs: Mapping[str, Any]) -> None:
        reward = logs.get("eval_reward")
        if reward is not None:
            self._reward = float(reward)
            self.monitor.log({"reward.validation": self._reward})

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
        self.monitor.checkpoint(path, step, scope, self._reward)

    # --- around one update ---------------------------------------------------------------------------------------

    @guarded()
    def _before_update(self, optimizer: Any) -> None:
        groups = optimizer.param_groups
        self.monitor.log({"lr": float(groups[0]["lr"]) * self.lr_factor, "update.skipped": float(self.skips > 0)})
        if self._loss is not None:
            self.monitor.log({"loss": self._loss})
            self._loss = None
        if self.skips > 0:
            self.skips -= 1
            # Through the host's own word for a skipped step, so that it leaves the schedule alone as well.
            self._skipped = optimizer
            optimizer.step = functools.partial(_leave_out, optimizer)
        elif self.lr_factor != 1.0:
            self._lrs = [group["lr"] for group in groups]
            for group in groups:
                group["lr"] = group["lr"] * self.lr_factor

    # --- commands ------------------------------------------------------------------------------------------------

    def _set_correction(self, on: bool, command: Command) -> Any:
        """Samples that are already buffered carry the old choice: it changes with the next generation."""
        cap = command.arguments.get("cap") if on else None
        self._correction = (on, None if cap is None else float(cap))
        return {"vllm_importance_sampling_correction": on, "from": "the next generation"}

    @guarded()
    def _apply_correction(self) -> None:
        if self._correction is None:
            return
        (on, cap), self._correction = self._correction, None
        self.trainer.vllm_importance_sampling_correction = on
        if cap is not None:
            self.trainer.vllm_importance_sampling_clip_max = cap
        self.monitor.notice("settings", vllm_importance_sampling_correction=on, cap=cap)

    def _skip_update(self, command: Command) -> Any:
        from accelerate.optimizer import AcceleratedOptimizer

        optimizer = self.trainer.optimizer
        if not isinstance(optimizer, AcceleratedOptimizer) or not hasattr(optimizer, "_is_overflow"):
            command.refused(f"{type(optimizer).__name__} cannot be made to skip")
            return None
        self.skips += asked_skips(command.arguments)
        return {"updates": self.skips}

    def _checkpoint_now(self, command: Command) -> Any:
        trainer = self.trainer
        trainer._save_checkpoint(trainer.model, trial=None)
        trainer.control = trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
        return {"step": int(trainer.state.global_step)}

    def _stop(self, command: Command) -> Any:
        self.stopped = True
        self.trainer.control.should_training_stop = True
        return {"step": int(self.trainer.state.global_step)}


def _leave_out(optimizer: Any, *_: Any, **__: Any) -> None:
    """Stands in for one `optimizer.step`, once."""
    del optimizer.step
    optimizer._is_overflow = True


def _mask(batch: Mapping[str, Any]) -> Any:
    """1 on sampled tokens [B, T]: no padding, no tool's or environment's tokens."""
    mask_BT = batch["completion_mask"]
    return mask_BT * batch["tool_mask"] if "tool_mask" in batch else mask_BT


def _broadcast(value: Any) -> Any:
    from accelerate.utils import broadcast_object_list

    return broadcast_object_list([value], from_process=0)[0]


@functools.cache
def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
