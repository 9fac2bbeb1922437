"""verl's entry point (group `verl.plugins`): importing this module waits for a trainer and attaches to it.

verl imports it in each of its processes, in the middle of its own import, and hides what fails here. So it does as
little as can be: nothing without FORESHOCK_URL; else one finder that wraps the method after which a trainer is
complete, when the trainer's module is imported. `python -m foreshock.adapters.verl.plugin` says whether verl finds it.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from logging import getLogger
from types import ModuleType
from typing import Any, Final

_log = getLogger("foreshock")
SEAMS: Final[dict[str, tuple[str, str]]] = {
    "verl.trainer.ppo.v1.trainer_base": ("PPOTrainer", "init"),
    "verl.trainer.ppo.ray_trainer": ("RayPPOTrainer", "init_workers"),
}
"""Module → class, and the method after which its worker groups exist."""


class Finder(MetaPathFinder):
    """Finds the trainers' modules where the others find them, and wraps them once they have been executed."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in SEAMS:
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next((found for finder in others if (found := finder.find_spec(name, path, target))), None)
        if spec is not None and spec.loader is not None:
            spec.loader = WrappingLoader(spec.loader)
        return spec


class WrappingLoader(Loader):
    """Another's loader, and the wrapping after it."""

    def __init__(self, original: Loader) -> None:
        self._original = original

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._original.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._original.exec_module(module)
        wrap(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def wrap(module: ModuleType) -> None:
    """The module's trainer attaches when it is complete. A failure is logged and the trainer stays as it is."""
    owner, method = SEAMS[module.__name__]
    kind = getattr(module, owner, None)
    original = getattr(kind, method, None)
    if original is None:
        _log.error("foreshock: this verl is not watched: %s has no %s.%s", module.__name__, owner, method)
        return
    if hasattr(original, "_foreshock"):
        return

    @functools.wraps(original)
    def watched(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(trainer, *args, **kwargs)
        _attach(trainer)
        return result

    watched._foreshock = True  # type: ignore[attr-defined]
    setattr(kind, method, watched)


def _attach(trainer: Any) -> None:
    from foreshock.adapters import verl

    try:
        verl.attach(trainer)
    except Exception as error:
        if os.environ.get("FORESHOCK_RAISE") == "1":
            raise
        _log.error("foreshock: this run is not watched: %r", error, exc_info=error)


def install() -> bool:
    """Called at import. False without FORESHOCK_URL."""
    if not os.environ.get("FORESHOCK_URL"):
        return False
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())
    for name in SEAMS:
        if name in sys.modules:
            wrap(sys.modules[name])
    return True


def main() -> int:
    """0 where importing verl here makes its trainers watched; 1 with the reason on stderr."""
    from importlib import import_module

    os.environ.setdefault("FORESHOCK_URL", "http://127.0.0.1:8720")
    import_module("verl")
    found = []
    for name, (owner, method) in SEAMS.items():
        try:
            found.append(hasattr(getattr(getattr(import_module(name), owner), method), "_foreshock"))
        except (ImportError, AttributeError) as error:
            sys.stderr.write(f"{name}: {error!r}\n")
    sys.stderr.write(f"{sum(found)} of {len(SEAMS)} verl trainers are watched when they are built\n")
    return 0 if any(found) and all(found) else 1


if __name__ == "__main__":
    sys.exit(main())  # verl is to import this module itself, under its own name
install()
