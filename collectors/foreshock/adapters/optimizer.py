"""What adapters do around an optimizer's step: rates scaled for one step, methods put on an instance and taken away."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from foreshock.control.command import Command
from foreshock.monitor import Monitor


class Scaled(Protocol):
    """An adapter whose later updates take the schedule's rate times `lr_factor`."""

    lr_factor: float
    monitor: Monitor


def scale_lr(adapter: Scaled, command: Command) -> dict[str, float] | None:
    """The handler of `scale_lr`: factors multiply. Refuses one outside (0, 1]."""
    try:
        adapter.lr_factor = scaled_factor(adapter.lr_factor, command.arguments)
    except ValueError as why:
        command.refused(str(why))
        return None
    adapter.monitor.notice("settings", lr_factor=adapter.lr_factor)
    return {"lr_factor": adapter.lr_factor}


def scaled_factor(present: float, arguments: Mapping[str, Any]) -> float:
    """`present` times the command's factor. Raises ValueError for one that is missing or outside (0, 1]."""
    try:
        factor = float(arguments.get("factor", math.nan))
    except (TypeError, ValueError):
        factor = math.nan
    if not 0.0 < factor <= 1.0:
        raise ValueError(f"factor must be in (0, 1], not {arguments.get('factor')}")
    return present * factor


def asked_skips(arguments: Mapping[str, Any]) -> int:
    """The updates that a `skip_update` leaves out: `steps`, else 1. Raises ValueError below 1."""
    steps = int(arguments.get("steps", 1))
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps}")
    return steps


@contextlib.contextmanager
def scaled(optimizer: Any, factor: float) -> Iterator[None]:
    """Learning rates times `factor` for one step; the schedule finds the rates that it wrote, whatever happens."""
    if factor == 1.0:
        yield
        return
    kept = [(group, group["lr"]) for group in optimizer.param_groups]
    for group, rate in kept:
        group["lr"] = rate * factor
    try:
        yield
    finally:
        for group, rate in kept:
            group["lr"] = rate


@contextlib.contextmanager
def on_instance(owner: Any, name: str, function: Any) -> Iterator[None]:
    """Puts `function` on an instance (or class), and what was there back."""
    if owner is None:
        yield
        return
    had = owner.__dict__.get(name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        if owner.__dict__.get(name) is function:
            if had is None:
                delattr(owner, name)
            else:
                setattr(owner, name, had)
