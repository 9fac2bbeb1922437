"""The adapter's settings, from the environment of the worker (ROLL: `system_envs`), each declared once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from logging import getLogger
from typing import Final

_log = getLogger("foreshock")
_TRUE: Final = frozenset({"1", "true", "yes", "on"})


@dataclass(frozen=True)
class Options:
    """`on_policy` observe: measure only. `exact`: step 0's old log-prob is scored on the training pass's own partition,
    one forward pass more. `detached`: step 0 takes the current log-prob as old, at no cost; what ROLL scored is still
    measured against it.

    `refuse`: no update on a disagreement above `limit` (policy.kl_k2 in nats; None: from the floor measured on this
    run). `resample`: micro-batches scored again, every `resample_every` steps, where ROLL reuses the current log-prob
    and would have nothing to compare. `probe`: keep a
    micro-batch for the `probe` command. `mode`: the run's first mode.
    """

    on_policy: str = "observe"
    refuse: bool = False
    limit: float | None = None
    resample: int = 1
    resample_every: int = 8
    probe: bool = False
    mode: str = "observe"
    controller: bool | None = None


def load(environment: Mapping[str, str] | None = None) -> Options:
    """Reads FORESHOCK_ROLL_ON_POLICY, _REFUSE, _LIMIT, _RESAMPLE, _RESAMPLE_EVERY, _PROBE; FORESHOCK_MODE.

    A malformed one is logged and its default stays: a typo must not end a training run.
    """
    env = os.environ if environment is None else environment

    def number(name: str, default: float | None) -> float | None:
        text = env.get(name, "").strip()
        try:
            return float(text) if text else default
        except ValueError:
            _log.warning("foreshock: %s ignored: not a number: %r", name, text)
            return default

    on_policy = env.get("FORESHOCK_ROLL_ON_POLICY", "observe").strip().lower()
    if on_policy not in ("observe", "exact", "detached"):
        _log.warning("foreshock: FORESHOCK_ROLL_ON_POLICY must be observe, exact or detached, not %r", on_policy)
        on_policy = "observe"
    mode = env.get("FORESHOCK_MODE", "observe").strip().lower()
    if mode not in ("observe", "approve", "auto"):
        _log.warning("foreshock: FORESHOCK_MODE must be observe, approve or auto, not %r", mode)
        mode = "observe"
    driven = env.get("FORESHOCK_ROLL_DRIVER", "").strip().lower() in _TRUE
    return Options(
        on_policy=on_policy,
        refuse=env.get("FORESHOCK_ROLL_REFUSE", "").strip().lower() in _TRUE,
        limit=number("FORESHOCK_ROLL_LIMIT", None),
        resample=max(0, int(number("FORESHOCK_ROLL_RESAMPLE", 1) or 0)),
        resample_every=max(1, int(number("FORESHOCK_ROLL_RESAMPLE_EVERY", 8) or 8)),
        probe=env.get("FORESHOCK_ROLL_PROBE", "").strip().lower() in _TRUE,
        mode=mode,
        controller=False if driven else None,
    )
