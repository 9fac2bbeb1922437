"""Scalars of one step on one rank: checked, folded by the catalogue's merge rule, device values deferred.

Costs about 0.1 µs a float on the host. A value that lives on a device is kept there: the step's are stacked, copied
once into pinned memory, and read by the sender when the copy's event has fired.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from numbers import Real
from typing import Any

from foreshock.frames.catalogue import Merge, merge_rule, valid_name

MAX_NAMES = 4096
"""Different names that one process may use; a name that holds a step number would otherwise grow without bound."""


class Folded:
    """A step's scalars, sealed. `ready()` and `values()` are for the sender's thread."""

    __slots__ = ("_copies", "_host")

    def __init__(self, host: dict[str, float], copies: list[DeviceCopy]) -> None:
        self._host = host
        self._copies = copies

    def ready(self) -> bool:
        """True when every device value has arrived."""
        return all(copy.ready() for copy in self._copies)

    def values(self, waited: bool = True) -> dict[str, float]:
        """Name → folded value. With `waited` False, device values that have not arrived are left out."""
        if not self._copies:
            return self._host
        folded = dict(self._host)
        counts = dict.fromkeys(folded, 1)
        for copy in self._copies:
            if waited or copy.ready():
                for name, value in copy.read():
                    _fold(folded, counts, name, value)
        return folded


class DeviceCopy:
    """One small copy of a device's scalars on its way to the host."""

    __slots__ = ("_event", "_host", "_names")

    def __init__(self, names: list[str], tensors: list[Any]) -> None:
        import torch

        wide = torch.float32 if tensors[0].device.type == "mps" else torch.float64
        stacked = torch.stack([tensor.reshape(()).to(wide) for tensor in tensors])
        self._names = names
        self._host = stacked.to("cpu", non_blocking=True)
        self._event: Any = None
        if stacked.device.type != "cpu":
            module = getattr(torch, stacked.device.type)
            self._event = module.Event()
            if hasattr(module, "current_stream"):
                self._event.record(module.current_stream(stacked.device))
            else:
                self._event.record()

    def ready(self) -> bool:
        return self._event is None or bool(self._event.query())

    def read(self) -> list[tuple[str, float]]:
        return list(zip(self._names, self._host.tolist(), strict=True))


class Scalars:
    """Accumulates one step. `rejections` counts what could not be taken over the life of the process."""

    def __init__(self, max_signals: int) -> None:
        self._max = max_signals
        self._rules: dict[str, Merge] = {}
        self._rejected: dict[str, str] = {}
        self._told: set[str] = set()
        self.rejections = 0
        self.last_validation: float | None = None
        self.reset()

    def reset(self) -> None:
        """Forgets the step."""
        self._values: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._deferred: list[tuple[str, Any]] = []

    def add(self, scalars: Mapping[str, Any]) -> None:
        """Folds a mapping of name → number. Never raises for a bad name or value: it is counted and left out."""
        values, rules = self._values, self._rules
        for name, value in scalars.items():
            if type(value) is float and name in rules and name not in values:
                values[name] = value
            else:
                self._add_slowly(name, value)
        while len(values) > self._max:
            self._reject(values.popitem()[0], f"more than {self._max} signals in a step")

    def newly_rejected(self) -> list[tuple[str, str]]:
        """(name, why) of rejected scalars that were not returned before; at most ten in the life of the process."""
        fresh = [(name, why) for name, why in self._rejected.items() if name not in self._told]
        self._told.update(name for name, _ in fresh)
        return fresh

    def seal(self, with_devices: bool = True) -> Folded:
        """Hands the step over and begins the next; without devices what lives on one is left out."""
        self.last_validation = self._values.get("reward.validation", self.last_validation)
        copies = []
        if with_devices and self._deferred:
            by_device: dict[Any, list[tuple[str, Any]]] = {}
            for name, tensor in self._deferred:
                by_device.setdefault(tensor.device, []).append((name, tensor))
            copies = [DeviceCopy([n for n, _ in group], [t for _, t in group]) for group in by_device.values()]
        folded = Folded(self._values, copies)
        self.reset()
        return folded

    def _add_slowly(self, name: Any, value: Any) -> None:
        if not isinstance(name, str) or not self._known(name):
            self._reject(str(name)[:128], "not a signal name")
            return
        if isinstance(value, Real):
            _fold(self._values, self._counts, name, float(value))
            return
        if "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor):
            self._add_tensor(name, value)
            return
        item = getattr(value, "item", None)
        if getattr(value, "shape", None) == () and callable(item):
            number = item()
            if isinstance(number, Real):
                _fold(self._values, self._counts, name, float(number))
                return
        self._reject(name, f"not a number but {type(value).__name__}")

    def _add_tensor(self, name: str, value: Any) -> None:
        if value.numel() != 1 or value.is_complex() or hasattr(value, "full_tensor"):
            self._reject(name, f"a tensor of shape {tuple(value.shape)}, not one number")
        elif value.device.type == "cpu":
            _fold(self._values, self._counts, name, float(value.detach()))
        elif len(self._deferred) >= self._max:
            self._reject(name, f"more than {self._max} signals in a step")
        else:
            # A copy, because hosts reuse their buffers before the step ends.
            self._deferred.append((name, value.detach().clone()))

    def _known(self, name: str) -> bool:
        if name in self._rules:
            return True
        if not valid_name(name) or len(self._rules) >= MAX_NAMES:
            return False
        self._rules[name] = merge_rule(name)
        return True

    def _reject(self, name: str, why: str) -> None:
        self.rejections += 1
        if len(self._rejected) < 10:
            self._rejected.setdefault(name, why)


def _fold(values: dict[str, float], counts: dict[str, int], name: str, value: float) -> None:
    """Folds a further value into the step's, in place. NaN stays NaN under every rule but `last`."""
    if name not in values:
        values[name] = value
        return
    old, rule = values[name], merge_rule(name)
    if rule == "mean":
        count = counts.get(name, 1)
        counts[name] = count + 1
        # Not the running form old + (new − old) / n: infinities of one sign must stay infinite, not turn into NaN.
        values[name] = old * (count / (count + 1)) + value / (count + 1)
    elif rule == "sum":
        values[name] = old + value
    elif rule == "last" or math.isnan(value) or (value > old if rule == "max" else value < old):
        values[name] = value
