"""The tables in docs/rules: each rule's keys with their defaults, and the list of rules. One source, checked by a test.

`python -m foreshock_service.rules.reference docs/rules` rewrites the tables between their markers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from foreshock_service.rules.illnesses import all_rules
from foreshock_service.rules.interface import Rule

OPEN, CLOSE = "<!-- generated: {} -->", "<!-- /generated -->"


def keys_table(rule: Rule[Any, Any]) -> str:
    """Markdown: key, default, sentence. What the rule declares itself comes before what all rules have."""
    own = [name for name in rule.config.model_fields if name in rule.config.__annotations__]
    rest = [name for name in rule.config.model_fields if name not in own]
    lines = ["| key | default | what it does |", "|---|---|---|"]
    for name in own + rest:
        field = rule.config.model_fields[name]
        lines.append(f"| `{name}` | {_default(field)} | {field.description} |")
    return "\n".join(lines)


def rules_table() -> str:
    """Markdown: every rule with its title and what it reads."""
    lines = ["| rule | finds | reads |", "|---|---|---|"]
    for rule in all_rules():
        reads = ", ".join(f"`{signal}`" for signal in rule.reads[:4]) + (", …" if len(rule.reads) > 4 else "")
        lines.append(f"| [`{rule.name}`]({rule.name}.md) | {rule.title} | {reads or 'ranks and the clock'} |")
    return "\n".join(lines)


def rewritten(page: str, kind: str, table: str) -> str:
    """The page with the table of that kind replaced. Raises ValueError where the markers are missing."""
    start, end = page.find(OPEN.format(kind)), page.find(CLOSE)
    if start < 0 or end < start:
        raise ValueError(f"no `{OPEN.format(kind)}` … `{CLOSE}` in the page")
    return f"{page[:start]}{OPEN.format(kind)}\n{table}\n{page[end:]}"


def write(folder: Path) -> list[Path]:
    """Rewrites the tables of all pages; returns those that changed."""
    changed = []
    tables = [(folder / "README.md", "rules", rules_table())]
    tables += [(folder / f"{rule.name}.md", "keys", keys_table(rule)) for rule in all_rules()]
    for path, kind, table in tables:
        before = path.read_text(encoding="utf-8")
        after = rewritten(before, kind, table)
        if after != before:
            path.write_text(after, encoding="utf-8")
            changed.append(path)
    return changed


def _default(field: FieldInfo) -> str:
    value = field.default
    if isinstance(value, BaseModel):
        return ", ".join(f"`{key}: {inner:g}`" for key, inner in value.model_dump().items())
    if isinstance(value, float):
        return f"`{value:g}`"
    return f"`{json.dumps(value)}`"


if __name__ == "__main__":
    for path in write(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/rules")):
        sys.stdout.write(f"{path}\n")
