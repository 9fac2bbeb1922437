"""Dumps as the SDK writes them: of the lab's illnesses, and of made-up observations with a known fault."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

import foreshock
from foreshock.monitor import Monitor
from lab.train import Job, RunConfig
from tests.fake_service import FakeService

ONSET, STEPS = 8, 17


def dumped(folder: Path, play: Callable[[Monitor], None], **arguments: Any) -> FakeService:
    """Plays with a monitor that dumps every step; the service that took its frames, stopped."""
    service = FakeService()
    settings: dict[str, Any] = {"run": "lab/x", "world": 1, "spool_dir": str(folder / "spool"), "finish_s": 30.0}
    monitor = foreshock.init(
        url=service.url, dump_dir=str(folder), dump_share=1.0, dump_ring=0, **(settings | arguments)
    )
    play(monitor)
    monitor.finish("completed")
    service.stop()
    return service


@cache
def lab_dump(illness: str, seed: int = 0) -> tuple[Path, FakeService]:
    """A dump of a lab run that falls ill before step ONSET (or stays healthy), and the frames it sent."""
    folder = Path(tempfile.mkdtemp(prefix="foreshock-dump-"))
    torch.set_num_threads(1)
    config = RunConfig(seed=seed, illness=illness, onset=ONSET, steps=STEPS)

    def play(monitor: Monitor) -> None:
        monitor.commands()
        Job(config, monitor).run()

    return folder, dumped(folder, play)


class Rows:
    """Made-up log-probs: `steps` of `rows` × `width` tokens, b within rounding of a, by a seeded generator."""

    def __init__(self, rows: int = 32, width: int = 40, seed: int = 0) -> None:
        self.rows, self.width = rows, width
        self._generator = torch.Generator().manual_seed(seed)

    def observed(self) -> dict[str, torch.Tensor]:
        """One healthy observation with token ids."""
        b = -2.0 * torch.rand(self.rows, self.width, generator=self._generator)
        a = b + 1e-3 * torch.randn(self.rows, self.width, generator=self._generator)
        tokens = torch.randint(0, 1000, (self.rows, self.width), generator=self._generator)
        return {"a": a, "b": b, "mask": torch.ones(self.rows, self.width), "token_ids": tokens}
