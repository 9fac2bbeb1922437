"""Illnesses, one small class each. A fault breaks a mechanism of the trainer once, at its onset.

It is an event of the process, not a setting of the loop: it does not end, a rollback does not undo it, and no command
reaches it. A cure works on the mechanism, by the methods that the healthy code has.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from .engine import Sampling
from .model import Weights, rounded
from .trainer import Trainer


class Fault(Protocol):
    """`strike` runs once before the first ill step, `progress` before each later one with the steps since."""

    name: ClassVar[str]

    def strike(self, trainer: Trainer) -> None: ...

    def progress(self, trainer: Trainer, steps: int) -> None: ...


class _Sudden:
    """Full strength at once."""

    def progress(self, trainer: Trainer, steps: int) -> None:
        """Nothing more happens."""


def every_second_tensor(weights: Weights) -> frozenset[str]:
    """Half of the tensors, spread over all layers."""
    return frozenset(list(weights)[::2])


@dataclass
class StaleParameters(_Sudden):
    """The training pass reads half of its views some generations (two a step) behind; gradients go to the master."""

    name: ClassVar[str] = "stale_parameters"
    lag: int = 12

    def strike(self, trainer: Trainer) -> None:
        """Training views only."""
        trainer.parameters.training_views.lagging = every_second_tensor(trainer.parameters.master)
        trainer.parameters.training_views.lag = self.lag


@dataclass
class StaleScoring(_Sudden):
    """The same in the scoring pass, so that only the old log-probs are stale."""

    name: ClassVar[str] = "stale_scoring"
    lag: int = 12

    def strike(self, trainer: Trainer) -> None:
        """Scoring views only."""
        trainer.parameters.scoring_views.lagging = every_second_tensor(trainer.parameters.master)
        trainer.parameters.scoring_views.lag = self.lag


class FrozenUpdate(_Sudden):
    """The optimizer moves detached copies: it reports its steps, and the parameters stay."""

    name: ClassVar[str] = "frozen_update"

    def strike(self, trainer: Trainer) -> None:
        """As when buffers are re-allocated after the optimizer was built."""
        trainer.parameters.rebuild_references([w.clone() for w in trainer.parameters.master.values()])


@dataclass
class StaleEngine(_Sudden):
    """The channel delivers the buffer of some pushes (one a step) ago."""

    name: ClassVar[str] = "stale_engine"
    delay: int = 10

    def strike(self, trainer: Trainer) -> None:
        """From the next push."""
        trainer.channel.delay = self.delay


class FrozenEngine(_Sudden):
    """The channel takes pushes and delivers none."""

    name: ClassVar[str] = "frozen_engine"

    def strike(self, trainer: Trainer) -> None:
        """The engine stays at the weights of the step before."""
        trainer.channel.delivering = False


def quantised(weight: Tensor, bits: int) -> Tensor:
    """Symmetric integers with one scale per tensor; norms and other vectors stay bfloat16."""
    if weight.dim() < 2:
        return rounded(weight.detach())
    top = 2 ** (bits - 1) - 1
    scale: Tensor = (weight.detach().abs().max() / top).clamp_min(1e-12)
    stored: Tensor = torch.round(weight.detach() / scale).clamp(-top - 1, top) * scale
    return stored


UNQUANTISED = frozenset({"token", "position", "head"})


@dataclass
class QuantisedEngine(_Sudden):
    """The engine stores the matrices of its layers in a few bits."""

    name: ClassVar[str] = "quantised_engine"
    bits: int = 3

    def strike(self, trainer: Trainer) -> None:
        """At every load from now on, whoever pushes."""

        def loader(name: str, weight: Tensor) -> Tensor:
            return rounded(weight.detach()) if name in UNQUANTISED else quantised(weight, self.bits)

        trainer.engine.loader = loader


class ShiftedLabels(_Sudden):
    """Both trainer passes take the log-prob of the token after the one they scored."""

    name: ClassVar[str] = "shifted_labels"

    def strike(self, trainer: Trainer) -> None:
        """By one position."""
        trainer.label_shift = 1


@dataclass
class Temperature(_Sudden):
    """The engine samples hotter than the trainer scores."""

    name: ClassVar[str] = "temperature"
    temperature: float = 1.3

    def strike(self, trainer: Trainer) -> None:
        """In the sampler only."""
        trainer.sampling = _sampling(trainer, temperature=self.temperature)


@dataclass
class TopK(_Sudden):
    """The engine samples from the k likeliest tokens, renormalised; the trainer scores all."""

    name: ClassVar[str] = "top_k"
    k: int = 2

    def strike(self, trainer: Trainer) -> None:
        """In the sampler only."""
        trainer.sampling = _sampling(trainer, top_k=self.k)


@dataclass
class ForcedEos(_Sudden):
    """The engine ends every answer at a length at which most tasks cannot be solved."""

    name: ClassVar[str] = "forced_eos"
    longest: int = 4

    def strike(self, trainer: Trainer) -> None:
        """In the sampler only."""
        trainer.sampling = _sampling(trainer, longest=self.longest, force_end=True)


@dataclass
class Dropout(_Sudden):
    """The training pass runs in training mode with dropout, the scoring pass without."""

    name: ClassVar[str] = "dropout"
    share: float = 0.5

    def strike(self, trainer: Trainer) -> None:
        """In the training pass only."""
        trainer.training_dropout = self.share


class OldBatch(_Sudden):
    """The old log-probs are those of the batch before."""

    name: ClassVar[str] = "old_batch"

    def strike(self, trainer: Trainer) -> None:
        """One batch behind."""
        trainer.old_lag = 1


@dataclass
class RampedStaleParameters(StaleParameters):
    """`stale_parameters`, one generation further behind each fourth step."""

    name: ClassVar[str] = "ramped_stale_parameters"
    lag: int = 0
    most: int = 16

    def progress(self, trainer: Trainer, steps: int) -> None:
        """Two steps of lag for sixteen steps of training."""
        trainer.parameters.training_views.lag = min(self.most, steps // 4)


@dataclass
class RampedStaleEngine(StaleEngine):
    """`stale_engine`, one push further behind each fourth step."""

    name: ClassVar[str] = "ramped_stale_engine"
    delay: int = 1
    most: int = 13

    def progress(self, trainer: Trainer, steps: int) -> None:
        """From one push behind."""
        trainer.channel.delay = min(self.most, 1 + steps // 4)


@dataclass
class RampedQuantisedEngine:
    """The engine's matrices drift from exact to two bits over 80 steps."""

    name: ClassVar[str] = "ramped_quantised_engine"
    bits: int = 2
    over: int = 80
    _share: list[float] = field(default_factory=lambda: [0.0])

    def strike(self, trainer: Trainer) -> None:
        """Nothing to see yet."""

        def loader(name: str, weight: Tensor) -> Tensor:
            if name in UNQUANTISED:
                return rounded(weight.detach())
            share = self._share[0]
            return rounded((1 - share) * weight.detach() + share * quantised(weight, self.bits))

        trainer.engine.loader = loader

    def progress(self, trainer: Trainer, steps: int) -> None:
        """Linear in the steps."""
        self._share[0] = min(1.0, steps / self.over)


def _sampling(trainer: Trainer, **changes: float | bool) -> Sampling:
    return replace(trainer.sampling, **changes)  # type: ignore[arg-type]


ILLNESSES: dict[str, type[Fault]] = {
    fault.name: fault
    for fault in (
        StaleParameters, StaleScoring, FrozenUpdate, StaleEngine, FrozenEngine, QuantisedEngine, ShiftedLabels,
        Temperature, TopK, ForcedEos, Dropout, OldBatch,
        RampedStaleParameters, RampedStaleEngine, RampedQuantisedEngine,
    )
}  # fmt: skip


def fault_named(name: str) -> Fault | None:
    """A fresh fault, None for `none`. Raises ValueError with the names there are."""
    if name == "none":
        return None
    if name not in ILLNESSES:
        raise ValueError(f"no illness named {name!r}; there are: none, {', '.join(sorted(ILLNESSES))}")
    return ILLNESSES[name]()
