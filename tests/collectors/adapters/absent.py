"""Packages that this machine lacks (GPU kernels, engines), as empty shells: just enough for a host's real modules to be
imported. Nothing of a shell does anything; what a test reaches through one is not tried.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Kind(type):
    """Any attribute is another empty class; subscripts and unions are itself."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _made(name, cls.__module__)
        setattr(cls, name, made)
        return made

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return other

    __ror__ = __or__


def _made(name: str, module: str) -> Any:
    def anything(cls: Any, *_: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()

    return _Kind(name, (), {
        "__init__": lambda self, *_, **__: None, "__module__": module,
        "__get_pydantic_core_schema__": classmethod(anything),
    })  # fmt: skip


class Shell(ModuleType):
    """A module that has whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _made(name, self.__name__)
        setattr(self, name, made)
        return made


class Absent(MetaPathFinder, Loader):
    """Finds shells for the packages of these names, where the real ones are not installed."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = {name for name in names if importlib.util.find_spec(name) is None}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self.names else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Shell(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


def pretend(*names: str) -> None:
    """From now on, in this process."""
    sys.meta_path.append(Absent(names))
