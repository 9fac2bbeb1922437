"""Runs written straight into the store: long ones, and ones that nobody would believe."""

from __future__ import annotations

import math
import time
from typing import Any

from sqlalchemy import insert

from foreshock_service.store.engine import Store
from foreshock_service.store.models import Attempt, Point, Run, SignalName

LEADING = (
    "policy.kl_k2", "mismatch.kl_k3", "mismatch_current.kl_k3", "reward.mean", "reward.validation", "entropy.mean",
    "grad.norm", "length.mean", "length.max", "mismatch.ess_token", "mismatch.abs_q50", "mismatch.abs_q99",
    "update.clip_high", "time.step_s", "loss", "lr",
)  # fmt: skip
SPIKE_AT = 61_803
CHUNK = 5000


def add_run(store: Store, name: str = "math/long", steps: int = 0, *, extra: int = 40, **fields: Any) -> int:
    """A run of `steps` steps with the leading signals and `extra` others; `policy.kl_k2` is 1.0 at SPIKE_AT alone."""
    now = time.time()
    others = [f"host.scalar_{i}" for i in range(extra)]
    given = {"status": "running", "verdict": "healthy", "mode": "observe", "attempt": 1, "last_step": steps or None}
    with store.write() as session:
        run = Run(name=name, project=name.partition("/")[0], created_at=now, last_seen_at=now, **(given | fields))
        session.add(run)
        session.flush()
        session.add(Attempt(run_id=run.id, ordinal=1, launch="one", started_at=now, first_step=1))
        for position, signal in enumerate((*LEADING, *others), start=1):
            session.add(SignalName(run_id=run.id, position=position, name=signal))
        for first in range(1, steps + 1, CHUNK):
            rows = [
                _row(run.id, step, now - steps + step, extra) for step in range(first, min(first + CHUNK, steps + 1))
            ]
            session.execute(insert(Point), rows)
        return run.id


def _row(run_id: int, step: int, at: float, extra: int) -> dict[str, Any]:
    wave = 1 + 0.2 * math.sin(step / 7) + 0.1 * math.sin(step * 1.7)
    kl = 1.0 if step == SPIKE_AT else 1e-5 * wave
    values = [kl, 2e-4 * wave, 2e-4 * wave, 0.5 + 0.1 * wave, 0.5, 0.6 * wave, 0.4 * wave, 500 * wave, 900 * wave]
    values += [0.99, 0.004 * wave, 0.03 * wave, 0.01, 12.0 * wave, 0.01, 1e-6, *([wave] * extra)]
    bands = {"policy.kl_k2": [5e-6, 1e-5, 2e-5], "mismatch.kl_k3": [1e-4, 2e-4, 4e-4]}
    return {
        "run_id": run_id, "attempt": 1, "step": step, "at": at, "values": values, "missing": {}, "worst": {},
        "evidence": {}, "reported": 1, "expected": 1, "segment": 0, "bands": bands, "flag": False,
    }  # fmt: skip
