"""Lets Megatron-core and ROLL's Megatron strategy run on a CPU-only torch with gloo.

Every piece changes only calls that would raise without a GPU; none touches arithmetic. Process-global: import it in a
process of its own (``megatron_worker``), never inside a trainer.

One piece is the opposite of a convenience: a move between host and device is forced to be a *copy into new storage*, as
it is on a GPU. Without it every off-load on a CPU would alias the live tensor and no off-load fault could ever show.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from types import SimpleNamespace
from typing import Any

import torch


class _NoStream:
    """Stands where a CUDA stream or event would: every wait is already over."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *args: object) -> None:
        return None


def _install_devices() -> None:
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.current_stream = lambda *args, **kwargs: _NoStream()  # type: ignore[assignment]
    torch.cuda.default_stream = torch.cuda.current_stream

    def on_cpu(factory: Any) -> Any:
        @functools.wraps(factory)
        def made(*args: Any, **kwargs: Any) -> Any:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            kwargs.pop("pin_memory", None)
            return factory(*args, **kwargs)

        return made

    for name in ("zeros", "ones", "empty", "tensor", "full", "arange", "empty_like", "zeros_like"):
        setattr(torch, name, on_cpu(getattr(torch, name)))


def _install_rng() -> None:
    def state(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def restore(new: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(new)

    torch.cuda.get_rng_state = state
    torch.cuda.set_rng_state = restore  # type: ignore[assignment]
    torch.cuda.manual_seed = torch.default_generator.manual_seed  # type: ignore[assignment]
    import megatron.core.tensor_parallel.random as megatron_random

    megatron_random._get_cuda_rng_state = state
    megatron_random._set_cuda_rng_state = restore
    logging.getLogger(megatron_random.__name__).addFilter(lambda r: "CPU RNG state changed" not in r.getMessage())


def _install_type_names() -> None:
    """Megatron's optimizer compares ``param.type()`` with ``torch.cuda.FloatTensor``; answer so, to Megatron alone."""
    original = torch.Tensor.type

    def type_name(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None or args or kwargs:
            return original(self, dtype, *args, **kwargs)
        name = original(self)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith("megatron.core") and "cuda" not in name:
            return name.replace("torch.", "torch.cuda.", 1)
        return name

    torch.Tensor.type = type_name  # type: ignore[method-assign,assignment]


def _install_copies() -> None:
    """``.to(device)`` and ``.pin_memory()`` called by ROLL's off-load code become copies, as they are on a GPU."""
    original = torch.Tensor.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if args and isinstance(args[0], torch.device) and "offload_states" in caller:
            return self.detach().clone()
        return original(self, *args, **kwargs)

    torch.Tensor.to = to  # type: ignore[method-assign,assignment]
    torch.Tensor.pin_memory = lambda self, *args: self.detach().clone()  # type: ignore[method-assign]


def _install_checkpoints() -> None:
    """What saving and loading a checkpoint calls beyond training.

    Megatron-core 0.13 calls ``numpy.product``, a name that NumPy 2 has dropped; ROLL empties the pinned-memory cache,
    which a CPU build has not; and PyTorch's Adam, which stands where Apex or Transformer Engine would, keeps a ``step``
    a tensor: ``load_state_dict`` has set it by the time the shards are copied, which hold none.
    """
    import numpy
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if not hasattr(numpy, "product"):
        setattr(numpy, "product", numpy.prod)  # noqa: B010 - no such name for the type checker
    if not hasattr(torch._C, "_host_emptyCache"):
        torch._C._host_emptyCache = lambda: None
    original = DistributedOptimizer._set_main_param_and_optimizer_states

    def copied(self: Any, model_param: Any, tensors: dict[str, Any]) -> Any:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        return original(self, model_param, {"step": state["step"]} | tensors if "step" in state else tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = copied


class _Memory:
    """Reports no device memory: ROLL logs it around every phase."""

    def __call__(self, *args: Any, **kwargs: Any) -> int:
        return 0


def _install_platform(platform: Any, extra: dict[str, Any]) -> None:
    """Give ROLL's own ``CpuPlatform`` the calls that it forwards to a CUDA module which is not there."""
    answers: dict[str, Any] = {
        "memory_allocated": _Memory(),
        "memory_reserved": _Memory(),
        "max_memory_allocated": _Memory(),
        "max_memory_reserved": _Memory(),
        "device_count": lambda: 1,
        "device_memory_used": _Memory(),
        "clear_cublas_workspaces": lambda: None,
        "current_device": _Memory(),
        "set_device": lambda *args: None,
        "empty_cache": lambda: None,
        "synchronize": lambda: None,
        "reset_peak_memory_stats": lambda *args: None,
        "reset_max_memory_allocated": lambda *args: None,
        "reset_max_memory_cached": lambda *args: None,
        "get_rng_state": lambda *args: torch.get_rng_state(),
        "set_rng_state": lambda state, *args: torch.set_rng_state(state),
    }
    for name, answer in (answers | extra).items():
        setattr(type(platform), name, staticmethod(answer))


def install() -> None:
    """Install every piece. Call once, before Megatron builds a model."""
    _install_devices()
    _install_rng()
    _install_type_names()
    _install_copies()
    _install_checkpoints()


def install_platforms() -> None:
    """Complete ROLL's and mcore_adapter's CPU platform objects. Call once both are importable."""
    for name, device in (("roll.platforms", 0), ("mcore_adapter.platforms", torch.device("cpu"))):
        with contextlib.suppress(ImportError):
            module = __import__(name, fromlist=["current_platform"])
            _install_platform(module.current_platform, {"current_device": lambda device=device: device})


def install_no_ray() -> None:
    """ROLL marks its off-load phases on Ray's timeline and keeps where models lie in a Ray actor, which starts a whole
    Ray cluster, one a rank, when there is none."""
    import roll.utils.checkpoint_manager as checkpoints
    import roll.utils.context_managers as managers

    managers.profiling = SimpleNamespace(profile=lambda *args, **kwargs: contextlib.nullcontext())
    nothing = SimpleNamespace(remote=lambda **_: None)
    checkpoints.shared_storage = SimpleNamespace(get=nothing, put=nothing)
    checkpoints.ray = SimpleNamespace(get=lambda value: value)
