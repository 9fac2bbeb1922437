"""NeMo-RL's GRPO driver: `attach(policy, logger, checkpointer, config, run="project/name")` between setup and training.

NeMo-RL has no hooks; its driver is a script of the user's own. Stood on are `policy.train(data, loss_fn)`, whose data
holds recomputed and engine's log-probs of the whole batch, the list `logger.loggers`, whose last call of a step says
`step_finished=True`, and the checkpointer's rename of a finished checkpoint. Current log-probs stay in the workers:
`policy` is not reported. A Foreshock step is NeMo-RL's logged step.

Legend: B sequences, S positions of whole sequences.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import foreshock
from foreshock import Command, Monitor, Semantics
from foreshock.frames import names
from foreshock.guard import guarded

CAPABILITIES: Final[dict[str, str]] = {
    "enable_is_correction": "`use_importance_sampling_correction` of the loss, which the driver sends with every "
    "batch: from the next step on; not with `force_on_policy_ratio`",
    "disable_is_correction": "as above",
    "pause": "always",
    "resume": "always",
    "stop": "always: raises behind the step's last log, which ends the script",
}
IMPOSSIBLE: Final[dict[str, str]] = {
    "checkpoint_now": "the loop decides when to save",
    "rollback": "NeMo-RL loads a checkpoint at its start only: stop, and start again in the same checkpoint_dir",
    "resync_trainer": "no seam of NeMo-RL's for it",
    "resync_engine": "NeMo-RL refits its engine by itself",
    "scale_lr": "optimizers are in the workers",
    "skip_update": "not tried",
    "probe": "no second scoring pass",
}


class StopAskedError(RuntimeError):
    """A `stop` command, on its way out of the user's script."""


def attach(
    policy: Any, logger: Any, checkpointer: Any, config: Any, run: str | None = None, *, monitor: Monitor | None = None,
    **arguments: Any,
) -> NeMoRLAdapter:  # fmt: skip
    """Watches the driver from now on. `arguments` go to `foreshock.init`; `config` is the MasterConfig.

    Without a url (or FORESHOCK_URL) nothing is touched. Raises TypeError for objects of another kind.
    """
    for owner, name in ((policy, "train"), (logger, "loggers"), (checkpointer, "_rename_checkpoint")):
        if not hasattr(owner, name):
            raise TypeError(f"not NeMo-RL as this adapter knows it: {type(owner).__name__} has no {name}")
    if monitor is None:
        defaults: dict[str, Any] = {"mode": os.environ.get("FORESHOCK_MODE", "observe"), "world": 1}
        monitor = foreshock.init(run, configuration(config), role="trainer", rank=0, **(defaults | arguments))
    adapter = NeMoRLAdapter(policy, checkpointer, config, monitor)
    if monitor.enabled:
        adapter.install(logger)
    return adapter


class NeMoRLAdapter:
    """One driver's, and one of its loggers. What fails of ours is caught by the monitor's guard."""

    def __init__(self, policy: Any, checkpointer: Any, config: Any, monitor: Monitor) -> None:
        self.policy, self.checkpointer, self.config = policy, checkpointer, config
        self.monitor, self.guard = monitor, monitor.guard
        self.stopped = False
        self._correct: bool | None = None
        self._announced = False

    def install(self, logger: Any) -> None:
        """Wraps two methods on their instances and joins the loggers."""
        for owner, name, ours in (
            (self.policy, "train", self._train), (self.checkpointer, "_rename_checkpoint", self._renamed),
        ):  # fmt: skip
            original = getattr(owner, name)
            setattr(owner, name, functools.wraps(original)(functools.partial(ours, original)))
        logger.loggers.append(self)
        self.monitor.on("stop", self._stop)
        for kind in ("pause", "resume"):
            self.monitor.on(kind, lambda command: None)

    # --- around NeMo-RL's own: whatever they return or raise is passed on as it is -----------------------------------

    def _train(self, original: Any, data: Any, loss_fn: Any, *args: Any, **kwargs: Any) -> Any:
        self._look(data, loss_fn)
        self._prepare(loss_fn)  # ahead of the call: the loss is sent to the workers with it
        return original(data, loss_fn, *args, **kwargs)

    def _renamed(self, original: Any, checkpoint_path: Any) -> Any:
        result = original(checkpoint_path)
        self._saved(Path(checkpoint_path))
        return result

    # --- LoggerInterface ------------------------------------------------------------------------------------------

    def log_metrics(
        self, metrics: Mapping[str, Any], step: int, prefix: str | None = "", step_metric: str | None = None,
        step_finished: bool = False,
    ) -> None:  # fmt: skip
        """The last call of a step seals it. Raises StopAskedError where that was asked."""
        self._scalars(metrics, prefix or "")
        if step_finished:
            self.monitor.end_step(int(step))
            if self.stopped:
                self.monitor.finish("stopped")
                raise StopAskedError

    def log_hyperparams(self, params: Mapping[str, Any]) -> None: ...

    def log_histogram(self, histogram: Any, step: int, name: str) -> None: ...

    def log_plot(self, figure: Any, step: int, name: str) -> None: ...

    def finish(self) -> None:
        """NeMo-RL closes its loggers when training is over."""
        self.monitor.finish("completed")

    # --- measuring ---------------------------------------------------------------------------------------------------

    @guarded()
    def _look(self, data: Any, loss_fn: Any) -> None:
        """The step's whole batch, on the driver. Position t of a field speaks of token t; the first is no sample."""
        mask_BS, sample_B = data["token_mask"][:, 1:], data["sample_mask"]
        old_BS, engine_BS = data["prev_logprobs"][:, 1:], data["generation_logprobs"][:, 1:]
        share = (mask_BS.sum(1) * (sample_B == 0)).sum() / mask_BS.sum().clamp(min=1)
        self.monitor.log({"filter.share": float(share)})
        if getattr(loss_fn, "force_on_policy_ratio", False) or not bool(old_BS.any()):
            return  # zeros stand in for what was not computed
        self.monitor.observe(
            "mismatch", old_BS, engine_BS, mask_BS, semantics=semantics(self.config),
            token_ids=data["input_ids"][:, 1:], advantages=data["advantages"][:, 1:],
        )  # fmt: skip

    @guarded()
    def _scalars(self, metrics: Mapping[str, Any], prefix: str) -> None:
        """NeMo-RL's own figures, under our names."""
        named = {f"{prefix}/{name}" if prefix else name: value for name, value in metrics.items()}
        self.monitor.log(names.scalars("nemo-rl", named))

    @guarded()
    def _saved(self, path: Path) -> None:
        """`tmp_step_N` has become `step_N`; in NeMo-RL's finalizing thread."""
        step = int(path.name.split("_")[2])
        scope = ["weights", "data"]
        if getattr(self.checkpointer, "save_optimizer", False):
            scope += ["optimizer", "scheduler"]
        self.monitor.checkpoint(path.parent / f"step_{step}", step, scope)

    # --- commands ----------------------------------------------------------------------------------------------------

    @guarded()
    def _prepare(self, loss_fn: Any) -> None:
        """Offers the correction once a loss was seen that has it, and sets what was asked."""
        able = hasattr(loss_fn, "use_importance_sampling_correction")
        if able and not getattr(loss_fn, "force_on_policy_ratio", False) and not self._announced:
            self._announced = True
            self.monitor.on("enable_is_correction", lambda command: self._set(True))
            self.monitor.on("disable_is_correction", lambda command: self._set(False))
        if self._correct is not None:
            on, self._correct = self._correct, None
            loss_fn.use_importance_sampling_correction = on
            self.monitor.notice("settings", use_importance_sampling_correction=on)

    def _set(self, on: bool) -> dict[str, Any]:
        self._correct = on
        return {"use_importance_sampling_correction": on, "from": "the next step"}

    def _stop(self, command: Command) -> dict[str, Any]:
        self.stopped = True
        return {}


def configuration(config: Any) -> dict[str, Any]:
    """The MasterConfig's sections, without the loggers', where secrets may be."""
    said = {name: value for name, value in vars(config).items() if name != "logger" and not name.startswith("_")}
    return {"nemo_rl": repr(said)[:4000], "host": "nemo_rl", "entropy_estimator": "sampled"}


def semantics(config: Any) -> dict[str, Semantics]:
    """The trainer scores at the sampling temperature, over what top-k and top-p keep; vLLM as `logprobs_mode` says."""
    generation = config.policy["generation"]
    temperature = float(generation["temperature"])
    mode = str((generation.get("vllm_cfg") or {}).get("logprobs_mode") or "raw_logprobs")
    processed = "processed" in mode
    top_k = -1 if generation["top_k"] is None else generation["top_k"]
    kept = f"top_k={top_k},top_p={generation['top_p']}"
    trainer = Semantics(
        engine="nemo_rl", temperature=temperature, truncation=kept, normaliser="kept_set", penalties="none",
        source="rescore",
    )  # fmt: skip
    engine = Semantics(
        engine=str(generation.get("backend", "vllm")), temperature=temperature if processed else 1.0,
        truncation=kept if processed else "none", normaliser="kept_set" if processed else "full_vocabulary",
        penalties="none", source="decode",
    )  # fmt: skip
    return {"a": trainer, "b": engine}
