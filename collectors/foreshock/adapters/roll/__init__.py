"""alibaba/ROLL, from its YAML alone: `worker_cls: foreshock.adapters.roll.MonitoredActorPGWorker`.

    actor_train:
      worker_cls: foreshock.adapters.roll.MonitoredActorPGWorker
      system_envs: {FORESHOCK_URL: "http://host:8720", FORESHOCK_RUN: "rlvr/qwen-7b"}

ROLL drops YAML keys that it does not know, so every setting is an environment variable (`roll.options`). What the
worker does: `watch` (observation), `exact` (re-scoring, refusal), `commands`. `driver` holds what a worker cannot do.
Nothing of ROLL is imported before a class is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

__all__ = ["MonitoredActorPGWorker", "MonitoredActorWorker", "monitored"]

_BASES: Final[dict[str, tuple[str, str]]] = {
    "MonitoredActorPGWorker": ("roll.pipeline.rlvr.actor_pg_worker", "ActorPGWorker"),
    "MonitoredActorWorker": ("roll.pipeline.rlvr.actor_worker", "ActorWorker"),
}

CAPABILITIES: Final[dict[str, str]] = {
    "enable_is_correction": "once engine log-probs have been seen in a batch; ROLL's own setting where it has one "
    "(≥ v0.2.0), else the advantages are weighted, which is the same",
    "disable_is_correction": "as above",
    "scale_lr": "with an optimizer whose step is the strategy's own (Megatron, FSDP2; not DeepSpeed)",
    "skip_update": "as scale_lr: parameters, moments and schedule stay as they are",
    "rollback": "weights, optimizer, schedule and RNG, where the strategy loads checkpoints; the loop is rewound by "
    "`roll.driver` only, else it goes on with the next batch",
    "probe": "one micro-batch scored again, with FORESHOCK_ROLL_PROBE=1",
    "pause": "always",
    "resume": "always",
    "stop": "always: train_step raises at the boundary, which ends the driver's loop",
}
IMPOSSIBLE: Final[dict[str, str]] = {
    "resync_engine": "ROLL pushes its weights before every rollout by itself; digests are not read back",
    "resync_trainer": "no seam that is the same over versions; ROLL ≥ v0.2.0 clears its cached shards by itself",
    "checkpoint_now": "the driver decides when every cluster saves",
}


def __getattr__(name: str) -> Any:
    if name == "monitored":
        return import_module("foreshock.adapters.roll.worker").monitored
    if name not in _BASES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, base = _BASES[name]
    built = import_module("foreshock.adapters.roll.worker").monitored(getattr(import_module(module), base), name)
    globals()[name] = built  # one class: Ray ships it by this name
    return built
