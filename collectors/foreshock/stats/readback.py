"""One small copy of a pair's results from its device to the host, started without waiting and read when it has
arrived."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from foreshock.stats.device import DeviceState
from foreshock.stats.layout import COLUMN, Array, Reduction
from foreshock.stats.record import DECILES
from foreshock.stats.sketch import DENSE_BUCKETS


@dataclass(slots=True)
class Tables:
    """Tables [S, K] of sums per sequence on the device, by what they are rows of."""

    tokens: list[torch.Tensor] = field(default_factory=list)
    """for the token statistics: every call's"""
    sequences: list[torch.Tensor] = field(default_factory=list)
    """for the sequence statistics: whole or completed ones"""
    split: list[torch.Tensor] = field(default_factory=list)
    unplaced: list[torch.Tensor] = field(default_factory=list)


def pieces(table_SK: Array) -> int:
    """Rows with a masked token."""
    return int(np.count_nonzero(table_SK[:, COLUMN["masked"]] > 0))


class Readback:
    """The copy under way: everything as one float64 vector (integers by their bits), one transfer, one event."""

    def __init__(self, state: DeviceState, tables: Tables) -> None:
        self._groups: list[list[torch.Tensor]] = [
            [state.totals, state.extremes, state.places, state.dense],
            tables.tokens,
            tables.sequences,
            tables.split,
            tables.unplaced,
            state.calls,
            state.worst_ids,
            state.worst_logps,
        ]
        self._event: Any = None
        with torch.inference_mode():
            everything = [tensor for group in self._groups for tensor in group]
            flat = torch.cat([tensor.contiguous().view(torch.float64).reshape(-1) for tensor in everything])
            self._host = _to_host(flat)
            if flat.device.type != "cpu":
                # On the stream that the copy was put on, which is the caller's.
                self._event = torch.get_device_module(flat.device).Event()
                self._event.record()
        self._shapes = [[(tuple(t.shape), t.dtype) for t in group] for group in self._groups]
        self._groups = [] if self._event is None else [[flat]]  # keeps the source alive until the copy is done

    def ready(self) -> bool:
        return self._event is None or bool(self._event.query())

    def read_into(self, reduction: Reduction) -> None:
        """Adds what was copied to `reduction`; waits for it if need be."""
        if self._event is not None:
            self._event.synchronize()
        totals, tokens, sequences, split, unplaced, calls, worst_ids, worst_logps = self._arrays()
        counts, extremes, places, dense = totals
        reduction.totals += counts
        low, high, e_max = reduction.extremes
        reduction.extremes = [min(low, extremes[0]), max(high, extremes[1]), max(e_max, extremes[2])]
        reduction.deciles += places[:, :DECILES]
        reduction.first += places[:, DECILES]
        dense = dense[:DENSE_BUCKETS]
        reduction.dense = dense if reduction.dense is None else reduction.dense + dense
        reduction.tables += tokens
        reduction.sequences += sequences
        reduction.split += sum(pieces(table) for table in split)
        reduction.unplaced += sum(pieces(table) for table in unplaced)
        reduction.calls += calls
        reduction.worst_ids += worst_ids
        reduction.worst_logps += worst_logps

    def _arrays(self) -> list[list[Any]]:
        flat = self._host.numpy()
        arrays: list[list[Any]] = []
        at = 0
        for group in self._shapes:
            arrays.append([])
            for shape, dtype in group:
                size = int(np.prod(shape))
                part = flat[at : at + size].reshape(shape)
                arrays[-1].append(part.view(np.int64) if dtype == torch.int64 else part)
                at += size
        return arrays


def _to_host(flat: torch.Tensor) -> torch.Tensor:
    if flat.device.type == "cpu":
        return flat
    host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
    return host.copy_(flat, non_blocking=True)
