"""Tables of docs/dumps.md and docs/launch.md that are made from the code: `python -m tests.docs.test_tables` renews."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from foreshock.dumps.schema import COLUMNS
from foreshock_service.launch.resume import HOSTS

DOCS = Path(__file__).parents[2] / "docs"


def columns() -> str:
    lines = [f"| `{c.name}`{'*' if c.required else ''} | {c.type} | {c.sentence} |" for c in COLUMNS]
    return "\n".join(["| column | type | |", "|---|---|---|", *lines])


def option(template: tuple[str, ...]) -> str:
    return f"`{' '.join(template)}`" if template else ""


def hosts() -> str:
    lines = [f"| `{h.name}` | {option(h.template)} | {h.sentence} |" for h in HOSTS.values()]
    return "\n".join(["| host | option | for |", "|---|---|---|", *lines])


TABLES = {("dumps.md", "columns"): columns, ("launch.md", "hosts"): hosts}


def renewed(page: str, mark: str) -> str:
    """The page with its table as the code has it."""
    block = re.compile(rf"(<!-- {mark} -->\n).*?(<!-- end -->)", re.DOTALL)
    text = (DOCS / page).read_text()
    assert block.search(text), f"{page} has no {mark}"
    return block.sub(lambda found: found[1] + TABLES[page, mark]() + "\n" + found[2], text)


@pytest.mark.parametrize(("page", "mark"), TABLES)
def test_a_table_made_from_the_code_is_current(page: str, mark: str) -> None:
    assert (DOCS / page).read_text() == renewed(page, mark), "python -m tests.docs.test_tables"


if __name__ == "__main__":
    for name, which in TABLES:
        (DOCS / name).write_text(renewed(name, which))
