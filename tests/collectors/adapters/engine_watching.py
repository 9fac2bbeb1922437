"""What the tests of sglang's and vLLM's adapters share: a monitor that keeps what it is told, and torch rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import foreshock
from foreshock.adapters.engine_samples import Samples
from foreshock.monitor import Monitor


class Told:
    """A monitor whose notices, scalars and pairs are kept here instead of being sent."""

    def __init__(self, folder: Path, raise_errors: bool = True) -> None:
        self.monitor: Monitor = foreshock.init(
            "tests/engines", url="http://127.0.0.1:9", spool_dir=str(folder), finish_s=0.01, exit_flush_s=0.01,
            raise_errors=raise_errors,
        )  # fmt: skip
        self.notices: list[tuple[str, dict[str, Any]]] = []
        self.scalars: dict[str, float] = {}
        self.monitor.notice = lambda kind, step=None, **data: self.notices.append((kind, data))  # type: ignore[method-assign]
        self.monitor.log = self.scalars.update  # type: ignore[method-assign]

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.notices]

    def last(self, kind: str) -> dict[str, Any]:
        return next(data for told, data in reversed(self.notices) if told == kind)


def rows_of(samples: Samples, ids: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask [B, T] of what was kept, padded on the right."""
    found = [samples.get(one) for one in ids]
    rows = [one.token_ids.tolist() for one in found if one is not None]
    width = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return tokens, mask
