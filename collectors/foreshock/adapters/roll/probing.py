"""The `probe` command on a ROLL worker: one micro-batch scored again by ROLL's own forward, one change at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foreshock.adapters.roll.exact import forward
from foreshock.probes import experiment

if TYPE_CHECKING:
    from foreshock.adapters.roll.watch import Watch

SUPPORTED = ("repeat", "other_partition", "no_padding", "other_mode")


class Probe:
    """Keeps the last step's first micro-batch (host memory), with what training and scoring said of it."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self._rows: Any = None
        self._length = 0

    def keep(self, batch: Any) -> None:
        """Copies the first micro-batch of a rollout's first update to the host."""
        if self.watch.updates.index:
            return
        part, _ = self.watch.exact._sample(batch, 1)
        lengths = batch.meta_info.get("micro_batch_lengths")
        self._length = int(lengths[0]) if lengths else int(part.batch["input_ids"].shape[-1])
        here = set(part.batch.keys()) & {"input_ids", "attention_mask", "response_mask", "position_ids"}
        held = {name: part.batch[name].detach().to("cpu", copy=True) for name in here}
        self._rows = type(batch).from_dict(tensors=held)
        self._rows.meta_info["loss_mask_keys"] = []  # asked for by ROLL ≥ v0.2.0 before any forward

    def run(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """All variants (`all`, `rescore`), or the one named; collective. One forward of a micro-batch a variant."""
        from foreshock.adapters.roll.actions import RefusedError

        if not self.watch.exchange.agreed(self._rows is not None):
            raise RefusedError("not every rank has trained on a batch yet")
        wanted = str(arguments.get("name", "all"))
        variants = SUPPORTED if wanted in ("all", "", "rescore") else (wanted,)
        if unknown := [v for v in variants if v not in SUPPORTED]:
            raise RefusedError(f"{unknown[0]} is not possible here; possible are {', '.join(SUPPORTED)}")
        worker = self.watch.worker
        worker.strategy.load_states()
        try:
            mask = self._rows.batch["response_mask"][:, 1:]
            found = experiment.run(self._score, mask, variants)
        finally:
            worker.strategy.offload_states()
        return experiment.merged(self.watch.exchange.gather(found))

    def _score(self, variant: str) -> Any:
        """Log-probs [rows, T] on the host, under one change; None off the last pipeline stage."""
        rows = self._rows.slice(0, len(self._rows))
        device = next(iter(self.watch.worker.strategy.model.parameters()), None)
        rows = rows.to(device.device) if device is not None else rows
        count = int(rows.batch.batch_size[0])
        alone = [[row, row + 1] for row in range(count)]
        cut, lengths = [[0, count]], [self._length]
        if variant == "other_partition":
            cut, lengths = alone, [self._length] * count
        elif variant == "no_padding":
            longest = rows.batch["attention_mask"].sum(-1).tolist()
            cut, lengths = alone, [int(n) for n in longest]
        model = self.watch.worker.strategy.model
        if variant == "other_mode":
            model.eval, evaluate = model.train, model.eval
        try:
            scored = forward(
                self.watch.worker, rows, micro_batch_indices=cut, micro_batch_lengths=lengths, num_micro_batchs=len(cut)
            )
        finally:
            if variant == "other_mode":
                model.eval = evaluate
        return None if scored is None else scored.cpu()
