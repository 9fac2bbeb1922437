"""Console logs: verl, Hugging Face and TRL, slime, OpenRLHF, NeMo-RL, prime-rl, between tqdm bars and other noise.

The head of the log decides which way of writing steps it uses (`console_lines`), and the rest is read that way alone,
so that a configuration dump or a chatty library is never taken for a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import BinaryIO, Final

from foreshock_service.check.aliases import is_training
from foreshock_service.check.readers import console_lines
from foreshock_service.check.readers.base import Notes, Row
from foreshock_service.check.readers.source import lines

Parse = Callable[[str], Row | None]
WAYS: Final[dict[str, Callable[[], Parse]]] = {
    "verl_console": lambda: console_lines.pairs,
    "dict_console": lambda: console_lines.mapping,
    "nemo_rl_console": console_lines.Blocks,
    "progress_bar_console": lambda: console_lines.bar,
    "console": lambda: console_lines.labelled,
}
"""Ways of writing a step, the most certain first."""


def way_of(head: str) -> str | None:
    """The way in which most steps of `head` are written; None where no line of it holds one."""
    counts: Counter[str] = Counter()
    for name, make in WAYS.items():
        parse = make()
        for line in head.splitlines():
            row = parse(line)
            if row is not None and is_training(row.values):
                counts[name] += 1
        if counts[name] and name != "progress_bar_console":
            # A more certain way that found steps is not outvoted by looser ones that also match its lines.
            return name
    return counts.most_common(1)[0][0] if counts else None


def reader(way: str | None) -> Callable[[BinaryIO, Notes], Iterator[Row]]:
    """A reader for that way; None: the first way that finds a step is kept."""

    def rows(stream: BinaryIO, notes: Notes) -> Iterator[Row]:
        candidates = [make() for name, make in WAYS.items() if way in (None, name)]
        for line in lines(stream, notes):
            if len(line) < 4:
                continue
            for parse in candidates:
                row = parse(line)
                if row is None or not row.values:
                    continue
                if len(candidates) > 1:
                    if not is_training(row.values):
                        continue
                    candidates = [parse]
                yield row
                break

    return rows
