"""The plugin inside vLLM (entry point `vllm.general_plugins`): pushes, labels, cache resets, pauses, sleeps.

Wraps methods of `EngineCore`, where every path into the engine comes together. Names that a version of vLLM does not
have are left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

from foreshock.adapters.engine_digests import of_worker
from foreshock.adapters.engine_probe import Probe, wanted
from foreshock.adapters.vllm_requests import loads

probe = Probe("vllm")
_PUT: Final = "_foreshock_watched"


def register() -> None:
    """Wraps the engine core's methods. Called by vLLM in each of its processes, maybe several times; never raises."""
    if wanted():
        probe.call(_install)


def _install() -> None:
    from vllm.v1.engine import core

    before: dict[str, Callable[..., None]] = {"add_request": _generating}
    after: dict[str, Callable[..., None]] = {
        "reset_prefix_cache": _reset,
        "set_weight_version": _labelled,
        "sleep": lambda core, level=1, *_, **__: _event("sleep", level=level),
        "wake_up": lambda core, tags=None, *_, **__: _event("wake", tags=list(tags or ())),
        "pause_scheduler": lambda core, mode="abort", *_, **__: _event("pause", mode=mode),
        "resume_scheduler": lambda core, *_, **__: _event("resume"),
    }
    for owner in (core.EngineCore, core.EngineCoreProc):
        for name in (*before, *after, "collective_rpc"):
            original = owner.__dict__.get(name)
            if callable(original) and not hasattr(original, _PUT):
                act = _around_rpc if name == "collective_rpc" else functools.partial(_around, before, after, name)
                wrapped = functools.wraps(original)(_method(act, original))
                setattr(wrapped, _PUT, True)
                setattr(owner, name, wrapped)


def _method(act: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def method(core: Any, *args: Any, **kwargs: Any) -> Any:
        return act(original, core, *args, **kwargs)

    return method


def _around(before: Any, after: Any, name: str, original: Any, core: Any, *args: Any, **kwargs: Any) -> Any:
    if name in before:
        probe.call(before[name], core, *args, **kwargs)
        return original(core, *args, **kwargs)
    answer = original(core, *args, **kwargs)
    if not (name == "reset_prefix_cache" and answer is False):
        probe.call(after[name], core, *args, **kwargs)
    return answer


def _around_rpc(original: Any, core: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
    if not loads(method):
        return original(core, method, *args, **kwargs)
    probe.call(_begin, core)
    try:
        answer = original(core, method, *args, **kwargs)
    except Exception as error:
        probe.call(_updated, False, f"{method}: {error!r}")
        raise
    probe.call(_updated, True, "")
    return answer


def _generating(core: Any, *_: Any, **__: Any) -> None:
    _begin(core)
    if probe.weights is not None:
        probe.weights.generating()


def _updated(ok: bool, message: str) -> None:
    if probe.weights is not None:
        probe.weights.updated(ok, message=message)


def _labelled(core: Any, weight_version: Any, *_: Any, **__: Any) -> None:
    if probe.weights is not None:
        probe.weights.labelled(str(weight_version))


def _reset(core: Any, *_: Any, **__: Any) -> None:
    if probe.weights is not None:
        probe.weights.flushed()


def _event(kind: str, **data: Any) -> None:
    if probe.weights is not None:
        probe.weights.event(kind, **data)


def _begin(core: Any) -> None:
    if probe.weights is not None:
        return

    def ask(with_digests: bool) -> tuple[dict[str, str] | None, str | None]:
        label = core.get_weight_version() if hasattr(core, "get_weight_version") else None
        if not with_digests:
            return None, label
        found: dict[str, str] = {}
        for worker in core.model_executor.collective_rpc(of_worker):
            found |= worker
        return found, label

    parallel = core.vllm_config.parallel_config
    rank = int(getattr(parallel, "data_parallel_rank", 0) or 0)
    probe.start(rank, max(rank + 1, int(getattr(parallel, "data_parallel_size", 1) or 1)), ask)
