"""A ROLL actor worker that is watched: the base class's own methods, with ours around them.

By signature, not by version: what is overridden is `initialize`, `train_step`, `loss_func` and `do_checkpoint`, which
ROLL has had from 2025-10-29 to today, and what ROLL's `register` noted on them is kept on ours.
"""

from __future__ import annotations

import functools
from typing import Any

from foreshock.adapters.roll.watch import Watch, attach

WATCHED = ("initialize", "train_step", "loss_func", "do_checkpoint")


class StopAskedError(RuntimeError):
    """A `stop` command: leaves `train_step` on every rank, and so ends the driver's loop."""


def monitored(base: type, name: str | None = None) -> type:
    """A subclass of a ROLL actor worker. Raises TypeError where `base` lacks what it stands on.

    Without FORESHOCK_URL it is the base class and one attribute look-up.
    """
    for method in WATCHED:
        if not callable(getattr(base, method, None)):
            raise TypeError(f"not a ROLL actor worker as this adapter knows it: {base.__name__} has no {method}")

    def initialize(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = base.initialize(self, *args, **kwargs)  # type: ignore[attr-defined]
        self._foreshock = attach(self)
        return result

    def train_step(self: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        watch: Watch | None = self.__dict__.get("_foreshock")
        if watch is None:
            return base.train_step(self, data, *args, **kwargs)  # type: ignore[attr-defined]
        watch.begin(data)
        with watch.around_updates():
            output = base.train_step(self, data, *args, **kwargs)  # type: ignore[attr-defined]
        watch.end(output)
        if watch.stop_reason is not None:
            raise StopAskedError(f"foreshock: stop was asked for: {watch.stop_reason}")
        return output

    def loss_func(self: Any, data: Any, output_tensor: Any) -> Any:
        watch: Watch | None = self.__dict__.get("_foreshock")
        if watch is None:
            return base.loss_func(self, data, output_tensor)  # type: ignore[attr-defined]
        restore = watch.before_loss(data)
        try:
            result = base.loss_func(self, data, output_tensor)  # type: ignore[attr-defined]
        finally:
            if restore is not None:
                restore()
        watch.after_loss(data)
        return result

    def do_checkpoint(self: Any, global_step: int, *args: Any, **kwargs: Any) -> Any:
        result = base.do_checkpoint(self, global_step, *args, **kwargs)  # type: ignore[attr-defined]
        watch: Watch | None = self.__dict__.get("_foreshock")
        if watch is not None:
            watch.checkpoint(global_step)
        return result

    def foreshock_apply(self: Any, kind: str, arguments: dict[str, Any]) -> Any:
        """What the driver's half asks of every rank: one action, answered as (state, detail)."""
        watch: Watch | None = self.__dict__.get("_foreshock")
        return ("refused", {"reason": "not watched"}) if watch is None else watch.actions.apply(kind, arguments)

    made: dict[str, Any] = {}
    for function in (initialize, train_step, loss_func, do_checkpoint):
        made[function.__name__] = functools.wraps(getattr(base, function.__name__))(function)
    # As do_checkpoint, it is called on all ranks at once: ROLL's note on the one serves the other.
    foreshock_apply.__dict__.update({k: v for k, v in base.do_checkpoint.__dict__.items() if k != "__wrapped__"})  # type: ignore[attr-defined]
    made["foreshock_apply"] = foreshock_apply
    chosen = name or f"Monitored{base.__name__}"
    made |= {"__module__": "foreshock.adapters.roll", "__qualname__": chosen, "__doc__": monitored.__doc__}
    return type(chosen, (base,), made)
