"""A ROLL configuration and version, and what several findings need of them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from foreshock_service.doctor.document import Document, Value
from foreshock_service.doctor.roll_version import RollVersion


@dataclass(frozen=True)
class Case:
    """The file, the version, and what several findings need."""

    document: Document
    version: RollVersion

    def get(self, path: str, default: object = None) -> Value:
        return self.document.get(path, default)

    def number(self, path: str, default: float | None = None) -> Value:
        return self.document.number(path, default)

    @property
    def engine(self) -> str:
        """`sglang`, `vllm` or what generates; empty where not told."""
        return str(self.get("actor_infer.strategy_args.strategy_name", "").value or "")

    @property
    def group(self) -> Value:
        return self.number("num_return_sequences_in_group", 1)

    @property
    def optimizer_steps(self) -> float | None:
        """Updates per rollout; None where the file does not tell. With dynamic batching at most this many."""
        sizes = [self.number("rollout_batch_size").value, self.group.value, self.number("ppo_epochs", 1).value]
        sizes += [self.ranks, self.per_update]
        if any(not isinstance(s, int | float) or s <= 0 for s in sizes):
            return None
        prompts, group, epochs, ranks, per_update = (float(s) for s in sizes if isinstance(s, int | float))
        return prompts * group * epochs / (ranks * per_update)

    @property
    def per_update(self) -> float | None:
        """Sequences of one rank's update."""
        batch = self.number("actor_train.training_args.per_device_train_batch_size", 8).value
        accumulation = self.number("actor_train.training_args.gradient_accumulation_steps", 1).value
        if not isinstance(batch, int | float) or not isinstance(accumulation, int | float):
            return None
        return batch * accumulation

    @property
    def ranks(self) -> float | None:
        """Data-parallel ranks of the trainer."""
        devices = _devices(self.get("actor_train.device_mapping").value)
        if devices is None:
            return None
        split = 1.0
        for kind in ("tensor", "pipeline", "context"):
            key = "context_parallel_size" if kind == "context" else f"{kind}_model_parallel_size"
            size = self.number(f"actor_train.strategy_args.strategy_config.{key}", 1).value
            if not isinstance(size, int | float) or size < 1:
                return None
            split *= size
        return devices / split

    @property
    def recomputes_old(self) -> bool | None:
        """Whether a scoring pass gives the old log-prob; None where version or file do not tell."""
        if self.version.reuses_old is False:
            return True
        if self.get("force_disable_old_logprobs_recompute", False).value is True:
            return None if self.version.reuses_old is None else False
        for forced in (
            self.get("enable_old_logprobs_recompute", False).value is True,
            self.get("adv_estimator", "gae").value in ("step_reinforce", "gigpo"),
            (self.number("init_kl_coef", 0.2).value or 0) > 0 if self.number("init_kl_coef", 0.2).known else False,
            (self.optimizer_steps or 0) / max(1.0, float(self.number("ppo_epochs", 1).value or 1)) >= 2,
        ):
            if forced:
                return True
        if self.optimizer_steps is None or not self.number("init_kl_coef", 0.2).known:
            return None
        return None if self.version.reuses_old is None else False


def _devices(mapping: object) -> int | None:
    """How many devices `list(range(0,8))` or `[0, 1]` names."""
    if isinstance(mapping, list):
        return len(mapping)
    if not isinstance(mapping, str):
        return None
    total = 0
    pieces = re.findall(r"range\(([^()]*)\)", mapping)
    for piece in pieces:
        try:
            total += len(range(*(int(n) for n in piece.split(","))))
        except (TypeError, ValueError):
            return None
    if pieces:
        return total
    listed = re.fullmatch(r"\s*\[([\d,\s]*)\]\s*", mapping)
    return len([n for n in listed.group(1).split(",") if n.strip()]) if listed else None
