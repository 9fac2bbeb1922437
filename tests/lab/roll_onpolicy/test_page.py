"""The page shows what was recorded, and names what exists."""

from __future__ import annotations

import json
import re
from pathlib import Path

from lab.roll_onpolicy import summary
from lab.roll_onpolicy.megatron_rungs import CONDITIONS
from lab.roll_onpolicy.rungs import LADDER

PAGES = Path(__file__).resolve().parents[3] / "docs" / "collapses"
PAGE = (PAGES / "onpolicy-disagreement.md").read_text()
RECORD = json.loads((PAGES / "onpolicy-disagreement.json").read_text())


def test_the_tables_of_the_page_are_the_recorded_ones() -> None:
    assert summary.markdown(RECORD["rungs"], None).rstrip("\n") in PAGE
    assert "\n".join(summary.megatron_markdown(RECORD["megatron"])) in PAGE


def test_every_recorded_rung_exists_and_every_rung_is_recorded() -> None:
    assert {row["rung"] for row in RECORD["rungs"]} == {rung.name for rung in LADDER}
    assert set(RECORD["megatron"]) == {condition.name for condition in CONDITIONS}


def test_every_picture_of_the_page_is_there_and_no_blank_is_left() -> None:
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", PAGE)
    assert len(pictures) == 3
    assert all((PAGES / picture).stat().st_size > 10_000 for picture in pictures)
    assert not re.findall(r"\{[A-Z0-9]+\}", PAGE)


def test_every_module_that_the_page_runs_exists() -> None:
    root = PAGES.parents[1]
    modules = set(re.findall(r"python -m (lab\.[\w.]+)", PAGE))
    assert modules
    assert all((root / (module.replace(".", "/") + ".py")).exists() for module in modules)
