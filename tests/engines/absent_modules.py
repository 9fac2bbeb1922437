"""Inert stand-ins for modules that sglang imports and this machine cannot have. Installed by install.sh as a .pth.

Whoever asks whether such a module is available still hears that it is not: only a plain import succeeds.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

ABSENT = ("sgl_kernel", "torchvision", "torchaudio", "decord")
ASKERS = ("_is_package_available", "is_flashinfer_available", "package_available")
"""Functions that probe; they look a few frames up from the import machinery."""


class _Kind(type):
    """The type of every name in a stand-in: callable, subclassable, and of endless depth."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _made(name)


def _made(name: str) -> type:
    return _Kind(name, (), {"__init__": lambda self, *_, **__: None, "__call__": lambda self, *_, **__: None})


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _made(name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        if name.partition(".")[0] not in ABSENT:
            return None
        frame: Any = sys._getframe(1)
        for _ in range(6):
            if frame is None:
                break
            if frame.f_code.co_name in ASKERS:
                return None
            frame = frame.f_back
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _Module(spec.name)
        module.__path__ = []
        module.__version__ = "0.0.0"  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


sys.meta_path.append(_Finder())
