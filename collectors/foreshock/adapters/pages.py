"""The table of commands on each host's page, from the adapter itself.

`python -m foreshock.adapters.pages docs/hosts` rewrites what lies between the markers.
"""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path

from foreshock.adapters.registry import HOSTS, find
from foreshock.wire.commands import COMMAND_KINDS


def capabilities_table(name: str) -> str:
    """Markdown: every command kind, and when the adapter carries it out or why it does not. Imports the adapter."""
    adapter = import_module(find(name).module)
    lines = ["| command | |", "|---|---|"]
    for kind in COMMAND_KINDS:
        if kind in adapter.CAPABILITIES:
            lines.append(f"| `{kind}` | {adapter.CAPABILITIES[kind]} |")
        else:
            lines.append(f"| `{kind}` | **no**: {adapter.IMPOSSIBLE.get(kind, 'not implemented')} |")
    return "\n".join(lines)


def rewritten(page: str, name: str) -> str:
    """The page with its table, and the tried versions, as the adapter and the registry say. Raises ValueError without
    the markers `<!-- capabilities -->` and `<!-- end -->`."""
    tried = find(name).tried
    page = re.sub(r"(<!-- tried -->).*?(<!-- end -->)", lambda m: f"{m[1]}{tried}{m[2]}", page, flags=re.DOTALL)
    found = re.subn(
        r"(<!-- capabilities -->\n).*?(<!-- end -->)",
        lambda m: f"{m[1]}{capabilities_table(name)}\n{m[2]}",
        page,
        flags=re.DOTALL,
    )
    if found[1] != 1:
        raise ValueError(f"the page of {name} has {found[1]} tables of capabilities, not one")
    return found[0]


def main(folder: Path) -> None:
    """Rewrites the tables of all pages in `folder`."""
    for host in HOSTS:
        path = folder / f"{host.name}.md"
        path.write_text(rewritten(path.read_text(encoding="utf-8"), host.name), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/hosts"))
