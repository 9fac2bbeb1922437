"""Which charts a run's page has: the three edges first, then what the open incidents point at, then the training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from markupsafe import Markup

from foreshock.frames.catalogue import find, valid_name
from foreshock_service.diagnosis.window import PastStep
from foreshock_service.web.figures import curve, number, told
from foreshock_service.web.recent import Recent

DRAWN_STEPS: Final = 240
NUMBER_STEPS: Final = 8
MAX_EXTRA: Final = 12


class Kind(NamedTuple):
    """A chart: signals of one unit, the first of which lends its baseline."""

    title: str
    signals: tuple[str, ...]
    log: bool = False


EDGES: Final = (
    Kind("Training pass against scoring pass", ("policy.kl_k2",), True),
    Kind("Scoring pass against engine", ("mismatch.kl_k3",), True),
    Kind("Training pass against engine", ("mismatch_current.kl_k3",), True),
)
TRAINING: Final = (
    Kind("Reward", ("reward.mean", "reward.validation")),
    Kind("Entropy", ("entropy.mean",)),
    Kind("Gradient norm", ("grad.norm",), True),
    Kind("Response length", ("length.mean", "length.max")),
    Kind("Effective sample share, engine", ("mismatch.ess_token",)),
    Kind("Size of δ, training pass", ("policy.abs_q50", "policy.abs_q99", "policy.abs_max"), True),
    Kind("Size of δ, engine", ("mismatch.abs_q50", "mismatch.abs_q99", "mismatch.abs_max"), True),
    Kind("Clipped tokens", ("update.clip_low", "update.clip_high")),
    Kind("Step time", ("time.step_s",)),
)
EVERYWHERE: Final = frozenset(name for kind in (*EDGES, *TRAINING) for name in kind.signals)


@dataclass(frozen=True, slots=True)
class Chart:
    """One figure, readable without a script: a drawing of the last steps, a sentence, a table of the last numbers."""

    id: str
    title: str
    signals: Sequence[str]
    log: bool
    unit: str
    sentence: str
    drawing: Markup
    words: str
    rows: Sequence[tuple[int, Sequence[float | None], Sequence[float] | None]]
    """(step, values, band of the first signal), the newest first."""


def kinds(known: Iterable[str], accused: Iterable[str], wished: Iterable[str]) -> list[Kind]:
    """The charts of a run that sends the signals `known`. What it never sent has no chart, unless it is wished for.

    `accused` are the signals in the evidence of open incidents, `wished` those that the address asks for.
    """
    there = {name for name in known if valid_name(name)}
    own = [name for name in dict.fromkeys(accused) if name in there and name not in EVERYWHERE][:MAX_EXTRA]
    extra = [name for name in dict.fromkeys(wished) if name in there and name not in (*own, *EVERYWHERE)][:MAX_EXTRA]
    singles = [Kind(name, (name,), _positive_by_nature(name)) for name in (*own, *extra)]
    found = [Kind(k.title, tuple(s for s in k.signals if s in there), k.log) for k in (*EDGES, *singles, *TRAINING)]
    return [kind for kind in found if kind.signals]


def _positive_by_nature(name: str) -> bool:
    return name.rpartition(".")[2].startswith(("kl_k2", "kl_k3", "abs_", "chi2", "norm"))


def build(wanted: Sequence[Kind], drawn: Recent, past: Sequence[PastStep]) -> list[Chart]:
    """The figures, from the last DRAWN_STEPS steps as columns and the last few in full."""
    return [_chart(kind, drawn.columns, past) for kind in wanted]


def _chart(kind: Kind, columns: Mapping[str, list[float | None]], past: Sequence[PastStep]) -> Chart:
    first = kind.signals[0]
    known = [s for s in (find(name) for name in kind.signals) if s is not None]
    values = columns.get(first, [])
    rows = [(p.step, [p.values.get(s) for s in kind.signals], p.bands.get(first)) for p in reversed(past)]
    words = told(first, values)
    band = past[-1].bands.get(first) if past else None
    if band:
        words += f", usual {number(band[0])} to {number(band[2])}"
    return Chart(
        id="chart-" + first.replace(".", "-").replace("@", "-").replace("/", "-"),
        title=kind.title,
        signals=kind.signals,
        log=kind.log,
        unit=known[0].unit if known and known[0].unit != "1" else "",
        sentence=" ".join(s.sentence for s in known[:1]),
        drawing=curve(values, words, log=kind.log, width=480, height=120),
        words=words,
        rows=rows,
    )
