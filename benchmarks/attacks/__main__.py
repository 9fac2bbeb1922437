"""`python -m benchmarks.attacks [--area NAME …] [--list] [--json FILE]`

Attacks a real `foreshock serve`, the SDK and the CLI; prints input × expected × got, last; exits 1 where one is not as
expected. `docs/threat-model.md` says what each is about.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from benchmarks.attacks import bodies, doors, files, words
from benchmarks.attacks.target import ATTACKS, Attack, Target

ROOMS = (doors, bodies, words, files)
HEADER = "| area | input | expected | got | |\n|---|---|---|---|---|"


def carry_out(target: Target, attacks: Iterable[Attack]) -> tuple[list[str], list[Attack]]:
    """(the table's rows, those that were not as expected)."""
    rows, wrong = [], []
    for tried in attacks:
        try:
            got = tried.run(target)
        except Exception as error:
            got = f"{type(error).__name__}: {error}"[:300]
        if got != tried.expected:
            wrong.append(tried)
        cells = (tried.area, tried.tried, tried.expected, got, "as expected" if got == tried.expected else "**WRONG**")
        rows.append(f"| {' | '.join(cell.replace('|', '¦') for cell in cells)} |")
        print(rows[-1], file=sys.stderr, flush=True)
    return rows, wrong


def main() -> None:
    """The command line."""
    areas = sorted({tried.area for tried in ATTACKS})
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attacks", description=__doc__)
    parser.add_argument("--area", action="append", choices=areas)
    parser.add_argument("--list", action="store_true", help="only name them")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    attacks = [tried for tried in ATTACKS if tried.area in (chosen.area or areas)]
    if chosen.list:
        print("\n".join(f"{tried.area}: {tried.tried}" for tried in attacks))
        return
    with tempfile.TemporaryDirectory(prefix="foreshock-attacks-") as folder:
        target = Target(Path(folder))
        try:
            rows, wrong = carry_out(target.start(), attacks)
        finally:
            target.stop()
    if chosen.json:
        chosen.json.write_text(json.dumps({"rows": rows, "wrong": [tried.tried for tried in wrong]}, indent=1) + "\n")
    print("\n".join([HEADER, *rows, f"\n{len(rows)} attacks, {len(wrong)} not as expected"]))
    sys.exit(1 if wrong or not rows else 0)


if __name__ == "__main__":
    main()
