"""ROLL's metrics and settings, read: its own names stay untouched in its own log."""

from __future__ import annotations

import os
from typing import Any, Final

from foreshock import Semantics

_NAMES: Final = {"grad_norm": "grad.norm", "actor/lr": "lr", "actor/total_loss": "loss"}


class Sums:
    """Of one step, on the device; read with the frame, without waiting."""

    def __init__(self) -> None:
        self._log_probs: list[Any] = []
        self._sampled: list[Any] = []
        self._kept: list[Any] = []

    def add(self, current_BT: Any, mask_BT: Any, final_BT: Any) -> None:
        """Adds a micro-batch: sampled tokens, their log-prob, and those that the trainer's filters keep."""
        keep = mask_BT > 0
        self._log_probs.append((current_BT * keep).sum())
        self._sampled.append(keep.sum())
        if final_BT is not None:
            self._kept.append(((final_BT > 0) & keep).sum())

    def values(self) -> dict[str, Any]:
        if not self._sampled:
            return {}
        tokens = sum(self._sampled).clamp(min=1)
        found = {"entropy.mean": -sum(self._log_probs) / tokens}
        if self._kept:
            found["filter.share"] = 1 - sum(self._kept) / tokens
        return found


def from_metrics(metrics: Any, lr_factor: float) -> dict[str, float]:
    """What `train_step` returned, under our names."""
    found: dict[str, float] = {}
    for key, value in dict(metrics or {}).items():
        plain = str(key).split("@")[0]
        name = _NAMES.get(plain) or ("grad.norm" if plain.endswith("/grad_norm") else None)
        numbers = _numbers(value)
        if name is None or not numbers:
            continue
        # Whole-batch losses ("@sum") are parts that add up; a list of norms is one a mini-batch.
        joined = sum(numbers) if "@sum" in str(key) else sum(numbers) / len(numbers)
        found[name] = max(numbers) if name == "grad.norm" else joined
    if "lr" in found:
        found["lr"] *= lr_factor
    return found


def _numbers(value: Any) -> list[float]:
    if isinstance(value, list | tuple):
        return [n for item in value for n in _numbers(item)]
    try:
        return [float(value)]
    except (TypeError, ValueError):
        return []


def configuration(worker: Any) -> dict[str, Any]:
    """What our figures rest on; the pipeline's own settings where it can tell them."""
    config = worker.pipeline_config
    said = config.to_dict() if callable(getattr(config, "to_dict", None)) else {}
    return dict(said) | {"host": "roll", "entropy_estimator": "sampled", "worker": type(worker).__mro__[1].__name__}


def semantics(worker: Any) -> dict[str, Semantics]:
    """Both trainer passes score the full vocabulary at temperature 1; the engine as it is configured."""
    infer = worker.pipeline_config.actor_infer
    arguments = infer.generating_args
    engine = str(getattr(getattr(infer, "strategy_args", None), "strategy_name", "") or "unknown")
    dtype = str(getattr(getattr(infer, "model_args", None), "dtype", "") or "")
    temperature = getattr(arguments, "temperature", None)
    # vLLM's default log-probs are of the raw logits; sglang's come after temperature, before top-k and top-p.
    applied = 1.0 if engine == "vllm" else (None if temperature is None else float(temperature))
    return {
        "a": Semantics(
            engine="megatron", temperature=1.0, truncation="none", normaliser="full_vocabulary", source="rescore"
        ),
        "b": Semantics(
            engine=engine, temperature=applied, truncation="none", normaliser="full_vocabulary", source="decode",
            dtype=dtype,
        ),
    }  # fmt: skip


def checkpoint_path(worker: Any, global_step: int) -> str:
    """Where ROLL's checkpoint of a step can be loaded from: uploaded, all roles' files are in one folder."""
    said = getattr(worker.worker_config, "checkpoint_config", None) or getattr(
        worker.pipeline_config, "checkpoint_config", None
    )
    name = f"checkpoint-{global_step}"
    if said and said.get("type") == "file_system" and said.get("output_dir"):
        return os.path.abspath(os.path.join(said["output_dir"], name))
    return os.path.abspath(os.path.join(worker.pipeline_config.output_dir, str(worker.worker_name), name))
