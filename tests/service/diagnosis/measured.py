"""Short runs of the lab, measured by the SDK's own statistics: what a service would see of each illness."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

import torch

from foreshock.stats.merge import merge, statistics
from foreshock.stats.pair import PairAccumulator
from lab.train import Job, RunConfig

ONSET, STEPS = 8, 17


class MeasuringMonitor:
    """Stands in for `foreshock.init`'s monitor: reduces what it is shown, one mapping of values a step."""

    def __init__(self) -> None:
        self.values: list[dict[str, float]] = []
        self._pairs: dict[str, list[Any]] = {}
        self._scalars: dict[str, float] = {}

    def observe(self, pair: str, a: torch.Tensor, b: torch.Tensor, mask: torch.Tensor, **where: Any) -> None:
        if where.get("optimizer_step", 0) > 0:
            return
        accumulator = PairAccumulator()
        accumulator.observe(a, b, mask, token_ids=where.get("token_ids"), seq_ids=where.get("seq_ids"))
        accumulator.collect()
        self._pairs.setdefault(pair, []).append(accumulator.record())

    def log(self, scalars: Mapping[str, float]) -> None:
        self._scalars.update(scalars)

    def end_step(self, step: int) -> None:
        values = dict(self._scalars)
        for pair, records in self._pairs.items():
            values |= {f"{pair}.{name}": v for name, v in statistics(merge(records)).values.items()}
        self.values.append(values)
        self._pairs, self._scalars = {}, {}

    def checkpoint(self, path: str, step: int, scope: Collection[str] = ()) -> None: ...

    def on(self, kind: str, handler: Any) -> None: ...

    def notice(self, kind: str, step: int | None = None, **data: Any) -> None: ...

    def commands(self) -> tuple[()]:
        return ()

    def new_attempt(self, reason: str, **_: Any) -> None: ...

    def finish(self, status: str) -> None: ...


@cache
def steps_of(illness: str, seed: int = 0) -> tuple[dict[str, float], ...]:
    """Values of each step of a run that falls ill before step ONSET (or stays healthy)."""
    monitor = MeasuringMonitor()
    torch.set_num_threads(1)
    Job(RunConfig(seed=seed, illness=illness, onset=ONSET, steps=STEPS), monitor).run()  # type: ignore[arg-type]
    return tuple(monitor.values)


def bands_of(illness: str, seed: int = 0) -> dict[str, tuple[float, float, float]]:
    """Three-fold bands around the mean of the steps before the onset, of the two signals that rules learn."""
    healthy = steps_of(illness, seed)[: ONSET - 1]
    bands = {}
    for signal in ("policy.kl_k2", "mismatch.kl_k3"):
        centre = sum(v[signal] for v in healthy) / len(healthy)
        bands[signal] = (centre / 3, centre, 3 * centre + 1e-9)
    return bands
