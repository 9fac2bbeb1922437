"""Writes the page's tables, plots and figures from the records of runs.

    python -m lab.roll_onpolicy.page [--ladder FOLDER] [--rescue FOLDER] [--megatron FILE] [--check]

``--ladder`` and ``--rescue`` are what ``ladder`` and ``rescue`` wrote, ``--megatron`` the file of ``megatron_rungs``;
what is not given stays as ``onpolicy-disagreement.json`` beside the page has it. Between ``<!-- KIND: RUNG -->`` and
``<!-- end -->`` the page and its Chinese version hold what the record says, and nothing there is written by hand;
``--check`` writes nothing and exits 1 where a page says something else.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.roll_onpolicy import rescue, summary

PAGES = Path(__file__).resolve().parents[2] / "docs" / "collapses"
NAME = "onpolicy-disagreement"
BLOCK = re.compile(
    r"<!-- (?P<kind>[a-z_]+)(?:: (?P<rung>[^>(]+?)(?: \((?P<dtype>fp32|bf16)\))?)? -->.*?<!-- end -->", re.S
)
CHINESE = {
    "learns": "学会", "wobbles": "摇摆", "stands still": "停滞", "crashes": "崩溃", "not judged": "未判定",
}  # fmt: skip
Record = dict[str, Any]


def row(record: Record, rung: str, dtype: str | None) -> Record:
    """One line of the ladder's table. Raises KeyError with the rung's name."""
    for found in record["rungs"]:
        if found["rung"] == rung and found["dtype"] == (dtype or "fp32"):
            return dict(found)
    raise KeyError(f"the record has no rung {rung!r} in {dtype or 'fp32'}")


def outcome(found: Record, chinese: bool) -> str:
    """Of every seed: `learns 3 of 5, crashes 2 of 5`."""
    counts = [(word, found["outcome"].count(word)) for word in summary.OUTCOMES if word in found["outcome"]]
    if chinese:
        return "、".join(f"{found['seeds']} 个种子中 {count} 个{CHINESE[word]}" for word, count in counts)
    return ", ".join(f"{word} {count} of {found['seeds']}" for word, count in counts)


FIGURES: dict[str, Callable[[Record, bool], str]] = {
    "outcome": outcome,
    "end": lambda found, chinese: ", ".join(f"{value:.2f}" for value in found["reward at end"]),
    "kl": lambda found, chinese: summary._n(found["policy.kl_k2"]),
    "early_late": lambda found, chinese: " → ".join(summary._n(v) for v in found["kl_k2 early and late"]),
    "truncated": lambda found, chinese: f"{found['truncated at end']:.0%}",
}


def text_of(record: Record, kind: str, rung: str | None, dtype: str | None, chinese: bool) -> str:
    """What stands in one block. Raises KeyError for a kind or a rung that does not exist."""
    if kind == "ladder":
        return "\n" + summary.markdown(record["rungs"], None)
    if kind == "megatron":
        return "\n" + "\n".join(summary.megatron_markdown(record["megatron"])) + "\n"
    if kind == "rescue":
        return "\n" + rescue.markdown(record["rescue"])
    if kind == "runs":
        return str(sum(found.get("seeds", 0) for found in record["rungs"]))
    return FIGURES[kind](row(record, rung or "", dtype), chinese)


def filled(page: str, record: Record, chinese: bool = False) -> str:
    """The page with every block as the record has it."""

    def block(found: re.Match[str]) -> str:
        head = found[0][: found[0].index("-->") + 3]
        return head + text_of(record, found["kind"], found["rung"], found["dtype"], chinese) + "<!-- end -->"

    return BLOCK.sub(block, page)


def pages() -> dict[Path, bool]:
    """The page and its Chinese version, with whether it is the latter."""
    return {PAGES / f"{NAME}.md": False, PAGES / f"{NAME}.zh-CN.md": True}


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ladder", type=Path, help="folder of lab.roll_onpolicy.ladder")
    parser.add_argument("--rescue", type=Path, help="folder of lab.roll_onpolicy.rescue")
    parser.add_argument("--megatron", type=Path, help="file of lab.roll_onpolicy.megatron_rungs")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a page differs")
    options = parser.parse_args(given)
    store = PAGES / f"{NAME}.json"
    record: Record = json.loads(store.read_text())
    if options.ladder:
        results = [json.loads(path.read_text()) for path in sorted((options.ladder / "runs").glob("*.json"))]
        record["rungs"] = summary.table(results)
        from lab.roll_onpolicy import plots

        plots.draw(results, record["rungs"], PAGES)
    if options.rescue:
        record["rescue"] = json.loads((options.rescue / "rescue.json").read_text())
    if options.megatron:
        record["megatron"] = json.loads(options.megatron.read_text())
    differ = []
    for path, chinese in pages().items():
        page = path.read_text()
        made = filled(page, record, chinese)
        if made != page:
            differ.append(path.name)
            if not options.check:
                path.write_text(made)
    if options.check:
        print("\n".join(f"{name} differs from the record" for name in differ) or "the pages are what the record says")
        return 1 if differ else 0
    store.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
