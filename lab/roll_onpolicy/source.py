"""ROLL's own functions, imported from a checkout at ``ROLL_HOME``; nothing of it is kept in this repository.

Third-party modules that ROLL imports and the driven functions never call may be absent; each is replaced by a
placeholder that raises the moment it is used, and ``Source.placeholders`` lists them. What is real:
``dynamic_batching_shard`` and the micro-batch iterators, ``DataProto``, the reward and advantage functions,
``ActorPGWorker.loss_func``,
``vocab_parallel_logprobs``.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import tempfile
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

#: imported by ROLL at module level, never called by what is driven here
OPTIONAL = (
    "more_itertools", "trl", "transfer_queue", "zmq", "opentelemetry", "pybase64", "imageio", "dacite", "modelscope",
    "roll.models.model_providers", "roll.distributed.strategy.factory", "deepspeed", "megatron", "codetiming", "peft",
    "datasets", "hydra", "omegaconf",
)  # fmt: skip


class PlaceholderUsedError(RuntimeError):
    """A part of a module that is not installed was called after all."""


class _Placeholder(types.ModuleType):
    """An absent module: any name can be imported from it, none can be used."""

    __path__: list[str] = []  # noqa: RUF012 - a package, so that submodules resolve here too

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _unusable(f"{self.__name__}.{name}")


def _unusable(name: str) -> type:
    def refuse(*args: object, **kwargs: object) -> Any:
        raise PlaceholderUsedError(f"{name} is not installed; it was expected never to be used here")

    return type(name.rsplit(".", 1)[-1], (), {"__init__": refuse})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Last on ``sys.meta_path``: answers for OPTIONAL names that nothing else could find."""

    def __init__(self) -> None:
        self.used: set[str] = set()

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        if any(name == top or name.startswith(top + ".") for top in OPTIONAL):
            self.used.add(name)
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Placeholder(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        return None


@dataclass(frozen=True)
class Source:
    """ROLL at one commit. ``normalisation`` and ``groups`` say which behaviour its code has."""

    home: str
    batching: Any
    functionals: Any
    proto: Any
    worker: type
    log_probs: Any
    normalisation: str
    groups: str
    placeholders: tuple[str, ...] = field(default=())


def load(home: str) -> Source:
    """Import ROLL from ``home``. One source a process: its modules keep their global names.

    Raises ``FileNotFoundError`` when ``home`` is no ROLL checkout, and whatever ROLL's own import raises.
    """
    pipeline = Path(home) / "roll" / "pipeline" / "rlvr" / "rlvr_pipeline.py"
    if not pipeline.exists():
        raise FileNotFoundError(f"{home} is no ROLL checkout: {pipeline} is missing")
    os.environ.setdefault("ROLL_LOG_DIR", str(Path(tempfile.gettempdir()) / "roll-logs"))
    finder = _Finder()
    sys.path.insert(0, home)
    sys.meta_path.append(finder)
    for name in ("roll.models.model_providers", "roll.distributed.strategy.factory"):
        finder.used.add(name)  # these exist but import trainers; the loss needs none of them
        sys.modules.setdefault(name, _Placeholder(name))
    batching = importlib.import_module("roll.utils.dynamic_batching")
    functionals = importlib.import_module("roll.utils.functionals")
    protocol = importlib.import_module("roll.distributed.scheduler.protocol")
    worker = importlib.import_module("roll.pipeline.rlvr.actor_pg_worker").ActorPGWorker
    text = pipeline.read_text()
    ordered = text.find('"prompt_id"] = torch.arange') < text.find('name="cal_ref_log_probs"')
    global_mean = "global_valid_samples" in functionals.agg_loss.__code__.co_varnames
    return Source(
        home, batching, functionals, protocol.DataProto, worker, _log_probs(home),
        "global" if global_mean else "micro_batch", "ordered" if ordered else "mixed", tuple(sorted(finder.used)),
    )  # fmt: skip


def _log_probs(home: str) -> Any:
    """mcore_adapter's ``vocab_parallel_logprobs`` from its file alone: the package imports all of Megatron."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    single = SimpleNamespace(
        get_tensor_model_parallel_group=lambda: None, get_tensor_model_parallel_rank=lambda: 0,
        get_tensor_model_parallel_world_size=lambda: 1,
    )  # fmt: skip
    core = sys.modules.setdefault("megatron.core", _Placeholder("megatron.core"))
    kept = core.__dict__.get("mpu")
    core.__dict__["mpu"] = single
    path = Path(home) / "mcore_adapter" / "src" / "mcore_adapter" / "parallel_functions" / "vocab_parallel.py"
    package = types.ModuleType("roll_parallel")
    package.__path__ = []
    inner = types.ModuleType("roll_parallel.functions")
    inner.__path__ = []
    utils = types.ModuleType("roll_parallel.utils")
    utils.__dict__.update(divide=lambda a, b: a // b, get_logger=lambda name: SimpleNamespace(warning=lambda *a: None))
    sys.modules.update({"roll_parallel": package, "roll_parallel.functions": inner, "roll_parallel.utils": utils})
    spec = importlib.util.spec_from_file_location("roll_parallel.functions.vocab_parallel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if kept is not None:
        core.__dict__["mpu"] = kept
    return module.vocab_parallel_logprobs
