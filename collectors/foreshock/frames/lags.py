"""Tokens by version lag: how many versions behind the trainer the engine was that sampled them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def by_lag(versions: Any, mask: Any, like: Any, max_lag: int) -> Iterator[tuple[int, Any]]:
    """(lag, mask of its tokens), lags above `max_lag` together in the last one.

    `versions` is an int (one lag for all), a sequence of one per row, or a tensor of `mask`'s shape or of one per row.
    Lags that occur are known only on the host: for a tensor on a device every lag from 0 to `max_lag` is yielded,
    because looking would wait for the device, and a lag without tokens is dropped when its record is read.
    """
    import torch

    if isinstance(versions, int):
        yield _clamped(versions, max_lag), mask
        return
    lags = versions if isinstance(versions, torch.Tensor) else torch.as_tensor(list(versions), dtype=torch.int64)
    lags = lags.detach().to(torch.int64).clamp(0, max_lag)
    if lags.dim() == like.dim() - 1 and lags.shape == like.shape[: lags.dim()]:
        lags = lags.unsqueeze(-1)
    elif lags.shape != like.shape:
        raise ValueError(f"versions of shape {tuple(lags.shape)} fit neither tokens {tuple(like.shape)} nor its rows")
    on_host = lags.device.type == "cpu"
    present = torch.unique(lags).tolist() if on_host else range(max_lag + 1)
    for lag in present:
        chosen = (lags == lag).to(like.device, non_blocking=True).expand(like.shape)
        yield int(lag), chosen if mask is None else (mask.bool() & chosen)


def _clamped(lag: int, max_lag: int) -> int:
    if lag < 0:
        raise ValueError(f"a version lag cannot be negative: {lag}")
    return min(lag, max_lag)
