"""Step 0 made exact: the old log-prob scored on the training pass's own partition, and the floor of this run measured.

ROLL scores old log-probs on a partition of its own (other micro-batches, other padding), so that log-prob and old
log-prob differ by rounding although the weights are the same. Here the rank's rows are scored again by ROLL's own
`forward_step` on the very micro-batches that will be trained on: what is left is a fault.

Scored again in the training pass's own state, stale parameters of that pass would agree with themselves. So the
parameters are compared, bit by bit, between ROLL's scoring pass and the training pass.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from foreshock.adapters.roll.watch import Watch

MARGIN: Final = 10.0
"""The limit is this many times the floor that was measured on this run."""
LEAST: Final = 1e-12
ROUNDING: Final = 1e-4
"""kl_k2 that another partition may make in bf16 on a small model; a gap below it is never called a fault."""
MOST: Final = 1e-2
"""No calibration excuses more than this, in nats (kl_k2)."""


class Exact:
    """Holds what was scored again for the update at hand. Legend as in `watch`."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.available = can_score(watch.worker)
        self.floor: dict[str, float] = {}
        """`repeat` (same partition twice) and `partition` (ROLL's scoring against ours), kl_k2 in nats."""
        self._again: Any = None
        self._scored = 0
        self._place = -1
        self._own_old: Any = None
        self._starts: list[int] = []
        self._parameters: Any = None
        self.cause = ""
        """Why this update must not be made; the same on all ranks."""
        self.gap: float | None = None
        """kl_k2 between ROLL's scoring and ours, over all ranks, where both are at hand."""
        self._ours = False
        strategy = watch.worker.strategy
        if self.available and (watch.options.refuse or watch.options.on_policy == "exact"):
            self._original_forward = strategy.forward_step
            strategy.forward_step = self._after_scoring

    def _after_scoring(self, *args: Any, **kwargs: Any) -> Any:
        """ROLL's own scoring; then notes the parameters it was done with, while they are loaded."""
        result = self._original_forward(*args, **kwargs)
        if not self._ours:
            try:
                self._parameters = fingerprint(self.watch.worker.strategy)
            except Exception as error:
                self._parameters = None
                self.watch.guard.caught("fingerprint", error)
        return result

    @property
    def reuses(self) -> bool:
        """Whether ROLL takes the detached current log-prob as old (possible since 2025-12-08)."""
        worker = self.watch.worker
        return hasattr(worker, "get_old_log_probs_with_cache") and not getattr(
            worker.pipeline_config, "enable_old_logprobs_recompute", True
        )

    @property
    def limit(self) -> float:
        """policy.kl_k2 above which an update is refused."""
        if self.watch.options.limit is not None:
            return self.watch.options.limit
        exact = self.watch.options.on_policy == "exact"
        floors = [v for k, v in self.floor.items() if k == "repeat" or not exact]
        return min(MOST, max([LEAST, *(MARGIN * v for v in floors)])) if floors else MOST

    def before_update(self, batch: Any, index: int) -> None:
        """Scores again what is wanted. Collective: every rank decides alike, from its settings alone."""
        self._place, self._again, self._scored, self._own_old = -1, None, 0, None
        self.cause, self.gap = "", None
        chosen = self.watch.options
        if index or not self.available:
            return
        calibrate = chosen.refuse and chosen.limit is None and not self.floor
        whole = chosen.on_policy == "exact" or calibrate
        sampled = self.reuses and chosen.resample and self.watch.step % chosen.resample_every == 0
        if whole or sampled or chosen.refuse:
            self._compare_parameters()
        if not whole and not sampled:
            return
        scored, again, failed, self._ours = None, None, False, True
        try:
            part, count = (batch, -1) if whole else self._sample(batch, chosen.resample)
            scored = forward(self.watch.worker, part)
            again = forward(self.watch.worker, part) if calibrate else None
        except Exception as error:
            failed = True
            self.watch.guard.caught("scoring again", error)
        finally:
            self._ours = False
        if not self.watch.exchange.agreed(not failed):
            self.available = False
            return
        if whole and chosen.refuse:
            self._measure(batch, scored, again)
        if scored is None:
            return  # another pipeline stage
        if chosen.on_policy == "exact" and not self.reuses:
            if self.cause:
                return  # what ROLL scored stays, so that the disagreement is seen
            batch.batch["old_log_probs"] = scored.to(batch.batch["old_log_probs"])
        elif self.reuses:
            self._again, self._scored = scored, count if count >= 0 else 1 << 30
            dynamic = self.watch.worker.worker_config.use_dynamic_batching_in_train
            self._starts = [int(start) for start, _ in batch.meta_info["micro_batch_indices"]] if dynamic else []

    def _sample(self, batch: Any, count: int) -> tuple[Any, int]:
        """The rows of the first micro-batches, cut as the training pass cuts them."""
        meta = batch.meta_info
        if self.watch.worker.worker_config.use_dynamic_batching_in_train:
            indices = meta["micro_batch_indices"][:count]
            part = batch.slice(0, indices[-1][1])
            part.meta_info = dict(meta) | {
                "micro_batch_indices": indices, "micro_batch_lengths": meta["micro_batch_lengths"][:count],
                "num_micro_batchs": len(indices),
            }  # fmt: skip
            return part, len(indices)
        size = int(self.watch.worker.worker_config.training_args.per_device_train_batch_size)
        rows = int(batch.batch.batch_size[0])
        part = batch.slice(0, min(rows, size * count))
        part.meta_info = dict(meta)
        return part, count

    def _compare_parameters(self) -> None:
        """Bit by bit: this pass against ROLL's scoring pass, and data-parallel ranks with each other. Collective."""
        before, self._parameters = self._parameters, None
        same, digest = True, ""
        try:
            now = fingerprint(self.watch.worker.strategy)
            same = before is None or self.reuses or bool((before == now).all())
            digest = now.cpu().numpy().tobytes().hex() if replicated(self.watch.worker) else ""
        except Exception as error:
            self.watch.guard.caught("fingerprint", error)
        info = self.watch.worker.rank_info
        every = self.watch.exchange.gather((same, (info.tp_rank, getattr(info, "pp_rank", 0)), digest))
        odd = [rank for rank, (answer, _, _) in enumerate(every) if not answer]
        held: dict[Any, set[str]] = {}
        for _, place, said in every:
            held.setdefault(place, set()).add(said)
        if odd:
            self.cause = f"parameters are not those of the scoring pass (ranks {', '.join(map(str, odd[:8]))})"
        elif any(len(digests) > 1 for digests in held.values()):
            self.cause = "data-parallel ranks hold different parameters in the training pass"
        if self.cause and info.rank == 0:
            self.watch.monitor.notice("weights", self.watch.step, side="trainer", ok=False, reason=self.cause)

    def _measure(self, batch: Any, scored: Any, again: Any) -> None:
        """The gap to ROLL's own scoring; with `again`, the floors of this run, once. Collective."""
        parts = [0.0, 0.0, 0.0]
        if scored is not None:
            mask = batch.batch["response_mask"][:, 1:] > 0
            repeat = half_square(scored, again, mask) if again is not None else 0.0
            parts = [repeat, half_square(scored, batch.batch["old_log_probs"], mask), float(mask.sum())]
        repeat, gap, tokens = self.watch.exchange.total(*parts)
        if again is not None or not self.floor:
            self.floor = {"repeat": repeat / max(tokens, 1.0)}
            if not self.reuses and not self.cause:
                self.floor["partition"] = gap / max(tokens, 1.0)
            if self.watch.worker.rank_info.rank == 0:
                self.watch.monitor.notice("calibration", self.watch.step, floor=self.floor, limit=self.limit)
        if self.reuses:
            return
        self.gap = gap / max(tokens, 1.0)
        allowed = min(MOST, max(LEAST, MARGIN * self.floor.get("partition", MOST)))
        # Where both partitions round alike at first, their later difference is still only rounding.
        allowed = max(allowed, ROUNDING)
        if not self.cause and not self.gap <= allowed:
            self.cause = f"old log-probs are not those of these rows: kl_k2 {self.gap:.3g} above {allowed:.3g}"

    # --- in a micro-batch's loss --------------------------------------------------------------------------------------

    def before_loss(self, data: Any) -> None:
        self._place += 1
        self._own_old = None
        if self.watch.options.on_policy == "detached" and not self.reuses and self.watch.updates.index == 0:
            self._own_old = data.batch["old_log_probs"]

    def fill(self, current_BT: Any) -> None:
        """`detached`: ROLL's loss reads its old log-probs from the tensor that is overwritten here."""
        if self._own_old is not None:
            kept = self._own_old.clone()
            self._own_old.copy_(current_BT)
            self._own_old = kept

    def old(self, data: Any, current_BT: Any) -> tuple[Any, str]:
        """(old log-probs of a micro-batch, their source) as the loss has used them, or as they were scored again."""
        if self._own_old is not None:
            return self._own_old, "same_weights"
        cached = getattr(self.watch.worker, "_cached_metrics", None) or {}
        if not self.reuses or "sample_uuid" not in data.non_tensor_batch:
            return data.batch["old_log_probs"], "same_weights"
        if self.watch.updates.index:
            return cached.get("old_log_probs"), "same_weights"
        if self._again is None or self._place >= self._scored:
            return current_BT, "detached"
        rows, width = current_BT.shape
        start = self._start(rows)
        return self._again[start : start + rows, :width].to(current_BT), "same_weights"

    def _start(self, rows: int) -> int:
        """First row of the micro-batch at hand within the update."""
        return self._starts[self._place] if self._starts else self._place * rows


def half_square(a: Any, b: Any, mask: Any) -> float:
    """Σ ½(a − b)² over masked tokens, float64. Waits for the device: for calibration only."""
    delta = (a.double() - b.to(a.device).double()).masked_fill(~mask, 0.0)
    return float(0.5 * (delta * delta).sum())


def fingerprint(strategy: Any) -> Any:
    """[tensors] int64: the sum of each parameter's bits, on the device. Reads every parameter once."""
    import torch

    chunks = getattr(strategy, "models_unwrapped", None) or [strategy.model]
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [
        p.detach().contiguous().view(-1).view(kinds[p.element_size()]).sum(dtype=torch.int64)
        for chunk in chunks for p in chunk.parameters() if p.numel()
    ]  # fmt: skip
    return torch.stack(sums)


def replicated(worker: Any) -> bool:
    """Whether data-parallel ranks hold the same parameters: Megatron without expert parallelism; not sharded ones."""
    said = getattr(getattr(worker.worker_config, "strategy_args", None), "strategy_config", None) or {}
    experts = int(said.get("expert_model_parallel_size", 1) or 1)
    return hasattr(worker.strategy, "models_unwrapped") and experts == 1


def can_score(worker: Any) -> bool:
    """Whether this strategy's `forward_step` gives every rank that computes a loss the log-probs of its rows."""
    strategy, info = worker.strategy, worker.rank_info
    if not callable(getattr(strategy, "forward_step", None)) or not hasattr(worker, "forward_func_log_probs"):
        return False
    if getattr(worker.worker_config, "use_sequence_packing", False):
        return False
    if int(getattr(info, "tp_size", 1)) * int(getattr(info, "cp_size", 1)) == 1:
        return True
    return "output_on_all_tp_cp_ranks" in inspect.getsource(type(strategy).forward_step)


def forward(worker: Any, batch: Any, **meta: Any) -> Any:
    """Log-probs [rows, T] of a mini-batch as the training pass cuts it, by ROLL's own scoring; None off the last stage.

    Leaves the batch's notes and the worker's settings as they were; the model is left in evaluation mode.
    """
    import torch

    config, kept = worker.worker_config, dict(batch.meta_info)
    dynamic = config.use_dynamic_batching_in_infer
    size = int(config.training_args.per_device_train_batch_size)
    batch.meta_info.update({"micro_batch_size": size, "output_on_all_tp_cp_ranks": True} | meta)
    config.use_dynamic_batching_in_infer = config.use_dynamic_batching_in_train
    try:
        with torch.no_grad():
            results = worker.strategy.forward_step(batch=batch, forward_func=worker.forward_func_log_probs)
    finally:
        config.use_dynamic_batching_in_infer = dynamic
        batch.meta_info.clear()
        batch.meta_info.update(kept)
    return None if results is None else results["log_probs"]
