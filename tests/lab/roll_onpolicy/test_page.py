"""The page shows what was recorded, in both languages, and names what exists."""

from __future__ import annotations

import json
import re

import pytest

from lab.roll_onpolicy import page
from lab.roll_onpolicy.megatron_rungs import CONDITIONS
from lab.roll_onpolicy.rescue import CRASHING, HEALTHY
from lab.roll_onpolicy.rungs import LADDER

ENGLISH, CHINESE = page.pages()
PAGE = ENGLISH.read_text()
RECORD = json.loads((page.PAGES / f"{page.NAME}.json").read_text())


def test_the_tables_and_figures_of_both_pages_are_the_recorded_ones() -> None:
    assert page.main(["--check"]) == 0


@pytest.mark.parametrize(
    "kind", ["ladder", "megatron", "rescue", "runs", "outcome: mixed groups", "outcome: identical"]
)
def test_the_page_has_a_block_of_every_kind_and_it_is_not_empty(kind: str) -> None:
    found = re.search(rf"<!-- {re.escape(kind)} -->(.*?)<!-- end -->", PAGE, re.S)
    assert found is not None
    assert found[1].strip()


def test_a_figure_written_by_hand_is_noticed() -> None:
    made = page.filled("<!-- outcome: identical -->learns 99 of 99<!-- end -->", RECORD)
    assert "99 of 99" not in made
    assert "learns" in made


def test_a_rung_or_a_kind_that_does_not_exist_is_named() -> None:
    with pytest.raises(KeyError, match="no rung 'nothing'"):
        page.filled("<!-- end: nothing --><!-- end -->", RECORD)
    with pytest.raises(KeyError, match="colour"):
        page.filled("<!-- colour: identical --><!-- end -->", RECORD)


def test_every_recorded_rung_exists_and_every_rung_is_recorded() -> None:
    assert {row["rung"] for row in RECORD["rungs"]} == {rung.name for rung in LADDER}
    assert set(RECORD["megatron"]) == {condition.name for condition in CONDITIONS}
    known = {rung.name for rung in LADDER}
    assert HEALTHY in {row["rung"] for row in RECORD["rescue"]} <= known


def test_what_the_rescue_runs_are_the_rungs_that_crash_in_four_of_five_seeds() -> None:
    crashing = {row["rung"] for row in RECORD["rungs"] if row["dtype"] == "fp32" and row["seeds"] == 5
                and row["outcome"].count("crashes") >= 4}  # fmt: skip
    assert crashing == set(CRASHING)


def test_every_recorded_rung_that_crashes_the_stock_worker_ends_healthy_or_refused_when_watched() -> None:
    crashing = [row for row in RECORD["rescue"] if row.get("stock", {}).get("verdict", []).count("crashes") >= 4]
    assert crashing
    for row in crashing:
        watched = [row[setting]["verdict"] for setting in ("exact", "refuse") if setting in row]
        shares = [sum(word in ("healthy", "refused") for word in verdicts) / len(verdicts) for verdicts in watched]
        assert max(shares) >= 0.8, row["rung"]


def test_exact_is_exactly_zero_on_the_healthy_run() -> None:
    healthy = [row["exact"] for row in RECORD["rescue"] if row["rung"] == HEALTHY]
    assert healthy
    assert {row["policy.kl_k2 max"] for row in healthy} == {0.0}


def test_every_picture_of_the_page_is_there_and_no_blank_is_left() -> None:
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", PAGE)
    assert len(pictures) == 3
    assert all((page.PAGES / picture).stat().st_size > 10_000 for picture in pictures)
    assert not re.findall(r"\{[A-Z0-9]+\}|@@", PAGE)


@pytest.mark.parametrize("path", [ENGLISH, CHINESE], ids=["english", "chinese"])
def test_every_module_and_page_that_is_named_exists(path: object) -> None:
    text = (page.PAGES / str(path)).read_text()
    root = page.PAGES.parents[1]
    modules = set(re.findall(r"python -m (lab\.[\w.]+)", text))
    assert all((root / (module.replace(".", "/") + ".py")).exists() for module in modules)
    links = [link for link in re.findall(r"\]\(([^)#]+\.md)", text) if "://" not in link]
    assert links
    assert all((page.PAGES / link).exists() for link in links)
