"""The plugin inside sglang (entry point `sglang.srt.plugins`, sglang 0.5.11 or newer): pushes, flushes, labels, pauses.

Hooks of sglang's own registry in the scheduler's process, one per rank. They see what no client sees: pushes of others,
the flush that really came, the weights that are served.
"""

from __future__ import annotations

from typing import Any, Final

from foreshock.adapters.engine_digests import digests
from foreshock.adapters.engine_probe import Probe, wanted

_SCHEDULER: Final = "sglang.srt.managers.scheduler.Scheduler"
_UPDATER: Final = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
UPDATES: Final = tuple(f"update_weights_from_{way}" for way in ("disk", "distributed", "tensor", "ipc"))

probe = Probe("sglang")


def register() -> None:
    """Registers the hooks, if the engine is to be watched. Called by sglang in each of its processes."""
    if not wanted():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name in UPDATES:
        HookRegistry.register(f"{_UPDATER}.{name}", _updated, HookType.AFTER)
    HookRegistry.register(f"{_UPDATER}.end_weight_update", _session_ended, HookType.AFTER)
    HookRegistry.register(f"{_UPDATER}.release_memory_occupation", _event("sleep"), HookType.AFTER)
    HookRegistry.register(f"{_UPDATER}.resume_memory_occupation", _event("wake"), HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.flush_cache", _flushed, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.record_weight_version_change", _labelled, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.pause_generation", _event("pause"), HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.continue_generation", _event("resume"), HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.handle_generate_request", _generating, HookType.BEFORE)


# Hooks: AFTER takes (result, self, …), BEFORE (self, …); returning None leaves the call as it is.


def _generating(scheduler: Any, *_: Any, **__: Any) -> None:
    probe.call(_begin, scheduler)
    if probe.weights is not None:
        probe.call(probe.weights.generating)


def _updated(result: Any, updater: Any, request: Any, *_: Any, **__: Any) -> None:
    probe.call(_note_update, result, updater, request)


def _session_ended(result: Any, updater: Any, *_: Any, **__: Any) -> None:
    if not getattr(result, "success", True) and probe.weights is not None:
        probe.call(probe.weights.updated, False, message=f"end_weight_update: {getattr(result, 'message', '')}")


def _flushed(result: Any, scheduler: Any, *_: Any, **__: Any) -> None:
    if result and probe.weights is not None:
        probe.call(probe.weights.flushed)


def _labelled(result: Any, scheduler: Any, new_version: Any = None, *_: Any, **__: Any) -> None:
    if new_version is not None and probe.weights is not None:
        probe.call(probe.weights.labelled, str(new_version))


def _event(kind: str) -> Any:
    def hook(result: Any, owner: Any, request: Any = None, *_: Any, **__: Any) -> None:
        if probe.weights is not None:
            told = {"mode": getattr(request, "mode", None), "tags": getattr(request, "tags", None)}
            probe.call(probe.weights.event, kind, **{name: value for name, value in told.items() if value})

    return hook


def _note_update(result: Any, updater: Any, request: Any) -> None:
    _begin(updater.scheduler)
    if probe.weights is None:
        return
    label = getattr(request, "weight_version", None)
    ok = bool(getattr(result, "success", False))
    label = str(label) if ok and label is not None else None
    flushed = bool(getattr(request, "flush_cache", False))
    probe.weights.updated(ok, label=label, flushed=flushed, message=str(getattr(result, "message", "")))


def _begin(scheduler: Any) -> None:
    if probe.weights is not None:
        return
    model = scheduler.tp_worker.model_runner.model
    rank, world = _place(scheduler)

    def ask(with_digests: bool) -> tuple[dict[str, str] | None, str | None]:
        return digests(model.named_parameters()) if with_digests else None, _label()

    probe.start(rank, world, ask)


def _place(scheduler: Any) -> tuple[int, int]:
    """Rank and size of the tensor-parallel group."""
    try:
        from sglang.srt.runtime_context import get_parallel

        return int(get_parallel().tp_rank), int(get_parallel().tp_size)
    except Exception:
        return int(getattr(scheduler, "tp_rank", 0)), int(getattr(scheduler, "tp_size", 1))


def _label() -> str | None:
    """The version label that responses carry."""
    try:
        from sglang.srt.runtime_context import get_serving

        return str(get_serving().weight_version)
    except Exception:
        return None
