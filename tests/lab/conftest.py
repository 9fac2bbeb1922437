"""A recording fake of the monitor, and short runs of the lab (real warm-up weights, a few steps)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.train import Job, RunConfig

ONSET = 7


@dataclass(frozen=True)
class OrderFake:
    """What the SDK hands to a handler."""

    kind: str
    arguments: dict[str, Any] = field(default_factory=dict)
    id: str = "order"


class RecordingMonitorFake:
    """Stands in for `foreshock.init`'s monitor: keeps what it is told, and hands out `orders` at the end of a step."""

    def __init__(self, orders: dict[int, list[OrderFake]] | None = None) -> None:
        self.orders = orders or {}
        self.handlers: dict[str, Callable[[Any], Any]] = {}
        self.observed: list[tuple[str, dict[str, Any]]] = []
        self.scalars: defaultdict[str, list[float]] = defaultdict(list)
        self.checkpoints: list[tuple[str, int]] = []
        self.steps: list[int] = []
        self.attempts: list[str] = []
        self.acknowledged: list[tuple[str, str]] = []
        self.notices: list[tuple[str, dict[str, Any]]] = []
        self.status = ""

    def observe(self, pair: str, a: torch.Tensor, b: torch.Tensor, mask: torch.Tensor, **where: Any) -> None:
        self.observed.append((pair, {"a": a.clone(), "b": b.clone(), "mask": mask.clone(), **where}))

    def log(self, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self.scalars[name].append(value)

    def checkpoint(self, path: str, step: int, scope: Collection[str]) -> None:
        assert set(scope) == {"weights", "optimizer", "scheduler", "rng", "data"}
        self.checkpoints.append((path, step))

    def on(self, kind: str, handler: Callable[[Any], Any]) -> None:
        self.handlers[kind] = handler

    def notice(self, kind: str, step: int | None = None, **data: Any) -> None:
        self.notices.append((kind, data))

    def end_step(self, step: int) -> None:
        self.steps.append(step)
        for order in self.orders.pop(step, []):
            try:
                self.handlers[order.kind](order)
                self.acknowledged.append((order.kind, "done"))
            except Exception:
                self.acknowledged.append((order.kind, "failed"))

    def new_attempt(self, reason: str) -> None:
        self.attempts.append(reason)

    def finish(self, status: str) -> None:
        self.status = status


JobMaker = Callable[..., tuple[Job, RecordingMonitorFake]]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def make_job(tmp_path: Path) -> JobMaker:
    """`make_job(illness="none", steps=14, orders={…})`: a job of seed 0 with a recording fake for its monitor."""
    made = 0

    def make(
        illness: str = "none",
        steps: int = 14,
        orders: dict[int, list[OrderFake]] | None = None,
    ) -> tuple[Job, RecordingMonitorFake]:
        nonlocal made
        made += 1
        monitor = RecordingMonitorFake(orders)
        config = RunConfig(illness=illness, onset=ONSET, steps=steps, checkpoints=str(tmp_path / str(made)))
        return Job(config, monitor), monitor

    return make
