"""Accumulates one pair over the micro-batches of a step, and hands over its record without the host ever waiting.

    accumulator = PairAccumulator() accumulator.observe(log_probs, old_log_probs, mask)      # per micro-batch; never
    synchronises accumulator.collect()                                    # once per step: one small copy to pinned
    memory is started if accumulator.ready(): frame.add(accumulator.record())  # when its event has fired

Legend: S sequences, T positions, N packed tokens, K columns of the table.
"""

from __future__ import annotations

import numpy as np
import torch

from foreshock.stats import device as device_path
from foreshock.stats import host as host_path
from foreshock.stats.layout import Reduction, to_record, uncentred
from foreshock.stats.readback import Readback, Tables, pieces
from foreshock.stats.record import PairRecord
from foreshock.stats.shapes import Batch, Ids, SequenceSums, batch_of


class PairAccumulator:
    """Sums of one pair (one `observe` name, one version lag) on one rank and step; reduce, collect, read, discard.

    CPU tensors take the quick path in host memory; others are reduced where they are. `on_device=True` takes the
    device path for CPU tensors as well. Not thread-safe.
    """

    def __init__(self, *, on_device: bool | None = None) -> None:
        self._on_device = on_device
        self._reduction = Reduction()
        self._state: device_path.DeviceState | None = None
        self._tables: Tables | None = None
        self._next_sequence = 0
        self._readback: Readback | None = None
        self._record: PairRecord | None = None

    def observe(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        clip_range: tuple[float, float] | None = None,
        seq_ids: Ids | None = None,
        cu_seqlens: Ids | None = None,
        token_ids: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        lengths: Ids | None = None,
        split: bool = False,
        sequence_sums: SequenceSums | None = None,
        counts_sequences: bool = True,
    ) -> None:
        """Adds log-probs a and b of the sampled tokens, [S, T] or packed [N] / [1, N] with `cu_seqlens` [S + 1].

        `mask` (bool, int or float; same shape) is non-zero on tokens that count; None counts all. `clip_range`
        bounds the ratio e^δ, as (0.8, 1.2). `seq_ids` [S] name the sequences in the evidence (else they are numbered
        as they come), `token_ids` (same shape) the tokens.

        Where a row is only a piece of a sequence (context parallelism), `sequence_sums` completes the table of sums
        [S, K] over the group, as `lambda t: (all_reduce(t, group=cp), t)[1]`, and exactly one rank of the group
        passes `counts_sequences=True`; `split=True` says that they cannot be completed. `positions` (index of each
        token among its response's sampled tokens) and `lengths` [S] (sampled tokens of the whole response) then
        place the tokens.

        Raises ValueError for shapes and dtypes that do not fit, RuntimeError after `collect`. Never modifies its
        arguments.
        """
        if self._readback is not None or self._record is not None:
            raise RuntimeError("observe() after collect(): a step's accumulator is read once, take a new one")
        batch = batch_of(
            a,
            b,
            mask,
            clip_range=clip_range,
            seq_ids=seq_ids,
            cu_seqlens=cu_seqlens,
            token_ids=token_ids,
            positions=positions,
            lengths=lengths,
            pieces=split or sequence_sums is not None,
        )
        if batch.a.is_cpu and not self._on_device:
            self._observe_host(batch, split, sequence_sums, counts_sequences)
        else:
            # All state in inference mode: a tensor made inside a caller's inference mode could not be updated outside
            # it.
            with torch.inference_mode():
                self._observe_device(batch, split, sequence_sums, counts_sequences)
        self._next_sequence += batch.sequences

    def _observe_host(self, batch: Batch, split: bool, complete: SequenceSums | None, counts: bool) -> None:
        into = self._reduction
        with np.errstate(all="ignore"):
            table = host_path.reduce(batch, into, self._next_sequence)
        into.tables.append(table)
        if split:
            into.split += pieces(table)
        elif complete is None:
            into.sequences.append(table)
        else:
            with torch.inference_mode():
                completed = complete(torch.from_numpy(uncentred(table))).numpy()
            if counts:
                into.sequences.append(completed)
        if not batch.placed:
            into.unplaced += pieces(table)

    def _observe_device(self, batch: Batch, split: bool, complete: SequenceSums | None, counts: bool) -> None:
        device = batch.a.device
        if self._state is None:
            self._state, self._tables = device_path.DeviceState(device), Tables()
        elif self._state.device != device:
            raise ValueError(f"tensors on {device}, this accumulator holds sums on {self._state.device}")
        into = self._tables
        assert into is not None
        table = device_path.reduce(batch, self._state, self._next_sequence, centred=complete is None)
        into.tokens.append(table)
        if split:
            into.split.append(table)
        elif complete is None:
            into.sequences.append(table)
        else:
            completed = complete(table.clone())
            if counts:
                into.sequences.append(completed)
        if not batch.placed:
            into.unplaced.append(table)

    def collect(self) -> None:
        """Ends the step: starts one non-blocking copy of the small results to pinned host memory. Idempotent."""
        if self._state is not None and self._tables is not None:
            self._readback = Readback(self._state, self._tables)
            self._state = self._tables = None
        elif self._readback is None and self._record is None:
            self._record = to_record(self._reduction)

    def ready(self) -> bool:
        """Whether `record` would return at once; False before `collect`."""
        return self._record is not None or (self._readback is not None and self._readback.ready())

    def record(self) -> PairRecord:
        """The step's record. Collects if that has not been done, and waits for the copy if it is still under way."""
        self.collect()
        if self._record is None:
            assert self._readback is not None
            self._readback.read_into(self._reduction)
            self._readback = None
            self._record = to_record(self._reduction)
        return self._record
