"""docs/aliases.md, made of `frames.names`: `python -m foreshock_service.check.alias_page docs/aliases.md`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from foreshock.frames.names import FRAMEWORKS, GENERIC, PATTERNS
from foreshock.frames.names.base import Alias

INTRO: Final = """# Names

How `foreshock check` reads other people's logs: each framework's names, our signals, and where sign, unit or estimator
differ. The framework is guessed from all names of a log together, because some names are shared and mean different
things (`approx_kl` has three meanings and two signs). Where two names feed one signal the first in the table wins. What
cannot be translated is shown in the report and not read. Names of our own catalogue are themselves.

Clip fractions, differences of log-probs and entropies that are 0 from the first step on are taken as missing: hosts
write 0 for what they do not compute, and old log-probs that are the detached current ones differ by 0 whatever happens.

This page is generated from `collectors/foreshock/frames/names/`; a test keeps it current.
"""


def page() -> str:
    """The whole page."""
    parts = [INTRO]
    for framework, table in FRAMEWORKS.items():
        parts.append(f"## {framework}\n\n{_table(table)}\n")
    parts.append(
        f"## Any other trainer\n\nWithout a prefix, in any case, blanks as underscores.\n\n{_table(GENERIC)}\n"
    )
    parts.append(f"## Patterns\n\nAfter the tables; the whole name must match.\n\n{_table(dict(PATTERNS))}\n")
    return "\n".join(parts)


def _table(table: Mapping[str, Alias]) -> str:
    lines = ["| name | signal | note |", "|---|---|---|"]
    for name, alias in table.items():
        lines.append(
            f"| `{name.replace('|', chr(92) + '|')}` | {_signal(alias)} | {alias.note.replace('|', chr(92) + '|')} |"
        )
    return "\n".join(lines)


def _signal(alias: Alias) -> str:
    if alias.signal is None:
        return "not read"
    scaled = "" if alias.scale == 1 else "−" if alias.scale == -1 else f"{alias.scale:g} · "
    said = f"{scaled}x" if scaled or alias.offset else ""
    if alias.offset:
        said = (
            f"{alias.offset:g} − x"
            if alias.scale == -1
            else f"{said} {'+' if alias.offset > 0 else '−'} {abs(alias.offset):g}"
        )
    return f"`{alias.signal}`" + (f" = {said}" if said else "")


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else "docs/aliases.md").write_text(page(), encoding="utf-8")
