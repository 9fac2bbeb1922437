"""verl's configuration, read: what the log-probs mean, and what a command can change."""

from __future__ import annotations

import re
from typing import Any

from foreshock import Semantics
from foreshock.adapters.installed import version_of

_UNFIT = re.compile(r"[^A-Za-z0-9._-]+")


def at(config: Any, path: str, default: Any = None) -> Any:
    """The value at a dotted path of a DictConfig; the default where any part is missing or null."""
    from omegaconf import OmegaConf

    found = OmegaConf.select(config, path, default=None)
    return default if found is None else found


def run_name(config: Any) -> str:
    """`trainer.project_name/experiment_name`, fit to name a run."""
    parts = (at(config, "trainer.project_name", "verl"), at(config, "trainer.experiment_name", "run"))
    return "/".join(_UNFIT.sub("-", str(part))[:128] or "verl" for part in parts)


def bypass(config: Any) -> bool:
    """Whether old log-probs are the engine's own."""
    return bool(at(config, "algorithm.rollout_correction.bypass_mode", False))


def can_correct(config: Any) -> bool:
    """Whether importance weights can be switched on and off while the job runs."""
    return bool(at(config, "actor_rollout_ref.rollout.calculate_log_probs", False)) and not bypass(config)


def synchronous(trainer: Any) -> bool:
    """Whether no rollout is in flight at a boundary (v0's trainer has no mode: it always waits)."""
    return getattr(trainer, "trainer_mode", "sync") == "sync"


def clip_range(config: Any) -> tuple[float, float] | None:
    """The ratio's bounds, of a worker's configuration; None for losses that clip nothing or something else."""
    if at(config, "actor.policy_loss.loss_mode", "vanilla") not in ("vanilla", "bypass_mode"):
        return None
    both = at(config, "actor.clip_ratio", 0.2)
    low, high = at(config, "actor.clip_ratio_low", both), at(config, "actor.clip_ratio_high", both)
    return 1.0 - float(low), 1.0 + float(high)


def semantics(config: Any) -> dict[str, Semantics]:
    """The trainer scores the full vocabulary at the rollout's temperature; the engine as a worker is configured."""
    engine = str(at(config, "rollout.name", "unknown"))
    temperature = float(at(config, "rollout.temperature", 1.0))
    raw = engine == "vllm" and "raw" in str(at(config, "rollout.logprobs_mode", "processed_logprobs"))
    top_k, top_p = int(at(config, "rollout.top_k", -1)), float(at(config, "rollout.top_p", 1.0))
    cut = (top_k > 0 or top_p < 1.0) and engine == "vllm" and not raw  # sglang tells log-probs before it cuts
    return {
        "a": Semantics(
            engine=str(at(config, "actor.strategy", "fsdp")), temperature=temperature, truncation="none",
            normaliser="full_vocabulary", source="rescore", dtype=str(at(config, "actor.fsdp_config.dtype", "")),
        ),
        "b": Semantics(
            engine=engine, version=version_of(engine), temperature=1.0 if raw else temperature,
            truncation=f"top_k={top_k},top_p={top_p}" if cut else "none",
            normaliser="kept_set" if cut else "full_vocabulary", source="decode",
            dtype=str(at(config, "rollout.dtype", "")),
        ),
    }  # fmt: skip


def configuration(config: Any) -> dict[str, Any]:
    """The trainer's configuration, and what our figures rest on."""
    from omegaconf import OmegaConf

    said = OmegaConf.to_container(config, resolve=True)
    known = {str(key): value for key, value in said.items()} if isinstance(said, dict) else {}
    return known | {"host": "verl", "host_version": version_of("verl"), "entropy_estimator": "full_vocab"}
