"""Every rule has its page, and pages and rules stay in step."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from foreshock.frames.catalogue import find
from foreshock_service.rules.illnesses import NAMES, all_rules, rule_named
from foreshock_service.rules.reference import keys_table, rewritten, rules_table

PAGES = Path(__file__).parents[3] / "docs" / "rules"


def test_every_rule_has_a_page_and_every_page_a_rule() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} == {*NAMES, "README"}


@pytest.mark.parametrize("name", NAMES)
def test_a_page_names_every_key_with_its_default(name: str) -> None:
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    assert rewritten(page, "keys", keys_table(rule_named(name))) == page, (
        "run python -m foreshock_service.rules.reference"
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_page_says_what_it_is_its_causes_examples_computation_and_tuning(name: str) -> None:
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {name}\n\n**")
    headings = re.findall(r"^## (.+)$", page, flags=re.M)
    assert headings == ["What causes it", "Seen in public", "How it is computed", "Tune or silence"]


def test_the_table_of_rules_is_complete() -> None:
    page = (PAGES / "README.md").read_text(encoding="utf-8")
    assert rewritten(page, "rules", rules_table()) == page


def test_every_key_has_a_sentence() -> None:
    for rule in all_rules():
        for key, field in rule.config.model_fields.items():
            assert field.description, f"{rule.name}.{key}"
            assert field.description.endswith("."), f"{rule.name}.{key}"


def test_rules_read_catalogued_signals_only() -> None:
    for rule in all_rules():
        for signal in rule.reads:
            assert find(signal) is not None, f"{rule.name} reads {signal}"


def test_links_between_pages_lead_somewhere() -> None:
    for path in PAGES.glob("*.md"):
        for target in re.findall(r"\]\(([a-z_]+\.md)\)", path.read_text(encoding="utf-8")):
            assert (PAGES / target).exists(), f"{path.name} → {target}"
