"""Foreshock's collector: `init` once, then `observe`, `log`, `checkpoint`, `end_step`, `on`, `finish` (see Monitor).

Importing this costs nothing and imports no torch; names are resolved at first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foreshock.collector import init
    from foreshock.control.command import Command
    from foreshock.control.supervised import resumed
    from foreshock.monitor import Monitor
    from foreshock.wire.envelope import Semantics

__version__ = "0.1.0"
__all__ = ["Command", "Monitor", "Semantics", "__version__", "init", "resumed"]

_HOMES = {
    "Command": "foreshock.control.command",
    "Monitor": "foreshock.monitor",
    "Semantics": "foreshock.wire.envelope",
    "init": "foreshock.collector",
    "resumed": "foreshock.control.supervised",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'foreshock' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
