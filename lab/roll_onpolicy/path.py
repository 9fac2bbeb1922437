"""The trainer path of ROLL's RLVR pipeline that the ladder drives: partition, advantages, loss.

Two implementations answer this interface: ``own_path`` (ours, always there) and ``real_path`` (ROLL's own functions at
``ROLL_HOME``). A contract test keeps them equal. Shapes: N rows, S positions, T = S − 1; B rows of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Settings:
    """The seed's settings, scaled: 43,008 and 30,732 tokens are 3.0 and 2.14 full sequences of 14,336."""

    ranks: int = 2
    group: int = 8
    round_to: int = 4
    budget_infer: int = 8 * 96
    budget_train: int = 8 * 68
    clip_low: float = 0.2
    clip_high: float = 0.28
    whiten: bool = True
    mask_truncated: bool = True
    normalisation: str = "global"  # or "micro_batch", ROLL until 2026-02-04
    groups: str = "ordered"  # or "mixed": ROLL 2025-10-29 to 2026-02-04, dynamic batching in a scoring pass


@dataclass(frozen=True)
class Rows:
    """A rollout batch, right-padded. ``scores_N`` rewards; ``response_length`` R, the length of a truncated one."""

    ids_NS: Tensor
    attention_NS: Tensor
    response_NS: Tensor
    scores_N: Tensor
    response_length: int


@dataclass(frozen=True)
class MicroBatch:
    """Row numbers, in the order of the batch, and the common padded length of their forward."""

    rows_B: Tensor
    length: int


Partition = list[list[MicroBatch]]  # by rank


@dataclass(frozen=True)
class Advantages:
    """``values_NT`` per token; ``final_NT`` the mask of tokens that the loss keeps; ``mixed`` share of mixed groups."""

    values_NT: Tensor
    final_NT: Tensor
    mixed: float


@dataclass(frozen=True)
class LossInput:
    """One micro-batch as the loss sees it: logits [B, L, V], the rest cut to L or L − 1."""

    logits: Tensor
    ids: Tensor
    response: Tensor
    old_logp: Tensor
    advantages: Tensor
    final: Tensor
    total_rows: int  # valid rows of the whole mini-batch, all ranks; global normalisation divides by it
    total_tokens: int
    valid_final: int
    micro_batches: int
    ranks: int


@dataclass(frozen=True)
class LossOutput:
    """``loss`` as the schedule divides it by micro-batches and ranks; ``logp`` [B, L − 1], masked, with its gradient.

    ``approxkl`` is the contribution to ROLL's own metric of that name: averaged (micro_batch) or summed (global).
    """

    loss: Tensor
    logp: Tensor
    approxkl: float


class Path(Protocol):
    """What the ladder asks of the path."""

    name: str

    def partition(self, rows: Rows, budget: int, settings: Settings) -> Partition: ...

    def log_probs(self, logits: Tensor, ids: Tensor, response: Tensor) -> Tensor: ...

    def advantages(self, rows: Rows, settings: Settings) -> Advantages: ...

    def loss(self, part: LossInput, settings: Settings) -> LossOutput: ...
