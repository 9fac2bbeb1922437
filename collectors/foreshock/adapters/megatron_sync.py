"""The copies of Megatron's parameters: stale shards, bits over data-parallel ranks, and a gather that trusts neither.

With the distributed optimizer each rank updates its own shard; `overlap_param_gather` leaves the all-gather to hooks of
the next forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foreshock.adapters import megatron_parallel as parallel


def stale_share(chunk: Any) -> float | None:
    """Share of a DDP chunk's buckets whose all-gather was never dispatched; None where there is none to wait for."""
    config = getattr(chunk, "ddp_config", None)
    if config is None or not (config.use_distributed_optimizer and config.overlap_param_gather):
        return None
    stale = sum(not group.param_gather_dispatched for group in chunk.bucket_groups)
    return stale / max(1, len(chunk.bucket_groups))


def parameters_equal(chunk: Any) -> bool:
    """Whether all data-parallel ranks hold the same bits of a DDP chunk (experts aside). A collective."""
    from megatron.core import parallel_state

    shared = [p for p in chunk.parameters() if getattr(p, "allreduce", True)]
    group = getattr(chunk, "dp_cp_group", None)  # 0.12's DDP does not keep it
    return parallel.equal_over(shared, group or parallel_state.get_data_parallel_group(with_context_parallel=True))


def resync(optimizer: Any, chunks: Sequence[Any]) -> bool:
    """Master weights to the model, a gather that trusts no cached view; whether the bits are equal. A collective."""
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        if hasattr(each, "_copy_main_params_to_model_params"):
            each._copy_main_params_to_model_params()
    equal = True
    for chunk in chunks:
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            if group.param_gather_handle is not None:
                group.param_gather_handle.wait()
                group.param_gather_handle = None
            group.cached_param_buffer_shard_list = [None] * len(group.buckets)
        chunk.start_param_sync(force_sync=True)
        equal &= parameters_equal(chunk)
    return equal
