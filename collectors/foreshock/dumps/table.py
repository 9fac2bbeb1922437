"""A captured observation → columns of the dump format. Runs on the dump's own thread; numpy only.

Legend: S sequences, T positions, N kept tokens. Of each sequence the tokens from its first to its last masked one are
kept, holes included (`mask` false): what lies beside them is padding or prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from foreshock.dumps.schema import PAIR_SIDES

if TYPE_CHECKING:
    from foreshock.dumps.capture import Observed

SENTINEL = -9999.0
"""An engine's mark for "no log-prob" (`foreshock.stats.layout`, which needs the host's torch)."""

Columns = dict[str, Any]
"""column → values [N], or one value for all; absent columns are null"""
Array = npt.NDArray[Any]


def columns(observed: Observed) -> Columns:
    """The columns of one observation; `row` numbers its sequences. Raises ValueError where shapes do not fit."""
    tensors = observed.tensors
    a = _floats(tensors["a"], observed.sentinels.get("a"))
    rows_N, column_N, index_N, count = _places(tensors, a.shape)
    out: Columns = {"optimizer_step": observed.optimizer_step, "row": rows_N, "column": column_N}
    left, right = PAIR_SIDES[observed.pair]
    out[left] = a.reshape(-1)[index_N]
    out[right] = _floats(tensors["b"], observed.sentinels.get("b")).reshape(-1)[index_N]
    mask_N = np.ones(index_N.size, dtype=bool) if "mask" not in tensors else _array(tensors["mask"]).reshape(-1) != 0
    if "mask" in tensors:
        mask_N = mask_N[index_N]
    out["mask"] = mask_N
    out["position"] = _positions(tensors, observed.piece, rows_N, index_N, mask_N, count)
    if "token_ids" in tensors:
        out["token"] = _array(tensors["token_ids"]).reshape(-1)[index_N]
    for name, column in (("seq_ids", "sample"), ("group_ids", "group"), ("prompt_ids", "prompt")):
        if name in tensors:
            out[column] = _per_row(name, tensors[name], count)[rows_N]
    for name, column in (("advantages", "advantage"), ("versions", "version_lag")):
        if name in tensors:
            out[column] = _per_token(name, tensors[name], a.shape, count, rows_N, index_N)
    if observed.clip_range is not None:
        out["clip_low"], out["clip_high"] = observed.clip_range
    if observed.pair in ("policy", "update", "mismatch"):
        out["old_source"] = observed.old_source
    out["piece"] = observed.piece
    return out


def _places(tensors: dict[str, Any], shape: tuple[int, ...]) -> tuple[Array, Array, Array, int]:
    """Of the kept tokens: row, column, index in the flat batch; and how many rows there are."""
    size = int(np.prod(shape))
    edges = tensors.get("cu_seqlens")
    if edges is None:
        if len(shape) != 2:
            raise ValueError(f"log-probs of shape {shape} without cu_seqlens")
        count, width = shape
        starts_S = np.arange(count) * width
        lengths_S = np.full(count, width)
    else:
        edge = _array(edges).astype(np.int64).reshape(-1)
        starts_S, lengths_S = edge[:-1], np.maximum(np.diff(edge), 0)
        count = starts_S.size
    rows_N = np.repeat(np.arange(count), lengths_S)
    column_N = np.arange(rows_N.size) - np.repeat(np.cumsum(lengths_S) - lengths_S, lengths_S)
    index_N = np.repeat(starts_S, lengths_S) + column_N
    inside = index_N < size
    rows_N, column_N, index_N = rows_N[inside], column_N[inside], index_N[inside]
    if "mask" in tensors:
        counted = _array(tensors["mask"]).reshape(-1)[index_N] != 0
        first_S, last_S = np.full(count, np.iinfo(np.int64).max), np.full(count, -1)
        np.minimum.at(first_S, rows_N[counted], column_N[counted])
        np.maximum.at(last_S, rows_N[counted], column_N[counted])
        kept = (column_N >= first_S[rows_N]) & (column_N <= last_S[rows_N])
        rows_N, column_N, index_N = rows_N[kept], column_N[kept], index_N[kept]
    return rows_N, column_N, index_N, int(count)


def _positions(
    tensors: dict[str, Any], piece: bool, rows_N: Array, index_N: Array, mask_N: Array, count: int
) -> Array | None:
    """Index among the sampled tokens of the response, −1 where masked out; None where a piece's place is unknown."""
    if "positions" in tensors:
        given: Array = np.where(mask_N, _array(tensors["positions"]).reshape(-1)[index_N], -1)
        return given
    if piece:
        return None
    running = np.cumsum(mask_N)
    before_S = np.zeros(count, dtype=np.int64)
    np.add.at(before_S, rows_N, mask_N)
    before_S = np.cumsum(before_S) - before_S
    return np.where(mask_N, running - 1 - before_S[rows_N], -1)


def _per_row(name: str, values: Any, count: int) -> Array:
    array = _array(values).reshape(-1)
    if array.size != count:
        raise ValueError(f"{array.size} {name} for {count} sequences")
    return array.astype(np.int64)


def _per_token(name: str, values: Any, shape: tuple[int, ...], count: int, rows_N: Array, index_N: Array) -> Array:
    array = _array(values)
    if array.ndim == 0:
        return np.full(index_N.size, array.item())
    if array.size == int(np.prod(shape)):
        return array.reshape(-1)[index_N]
    if array.size == count:
        return array.reshape(-1)[rows_N]
    raise ValueError(f"{name} has shape {array.shape}, the log-probs {shape}")


def _array(value: Any) -> Array:
    """As numpy; bfloat16, which numpy has not, by way of float32."""
    if hasattr(value, "numpy"):
        wide = value.float() if str(value.dtype) == "torch.bfloat16" else value
        array: Array = wide.numpy()
        return array
    return np.asarray(value)


def _floats(value: Any, sentinel: float | None) -> Array:
    """As float32; the sentinel −9999, which narrow dtypes round, is put back."""
    array = _array(value)
    with np.errstate(over="ignore"):
        single = array.astype(np.float32)
    if sentinel is not None and sentinel != SENTINEL:
        single[single == np.float32(sentinel)] = SENTINEL
    return single
