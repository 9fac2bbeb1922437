"""What `foreshock check` says of 155 real, labelled runs: false alarms on the healthy, catches and leads on the failed.

    python -m benchmarks.detection.cases [--json] [--markdown] [--signals] [--runs] [--rules PACK]

The runs are public logs without licence and no part of this repository; FORESHOCK_CASES names the folder with them
(default `../shared/cases`): `index.json` and one JSON-lines file a run. Labels are one reader's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foreshock_service.check.run import check
from foreshock_service.rules.pack import Pack, load_pack

QUIET_LABELS = ("healthy", "no-learning")
FAILED_LABELS = ("collapsed", "diverging-KL", "entropy-collapse", "length-runaway")
REWARD_RULES = frozenset({"reward_collapse"})


@dataclass(frozen=True)
class Case:
    """One run, its label, and what the rules found."""

    id: str
    repo: str
    label: str
    onset: int | None
    steps: int
    verdict: str
    incidents: list[dict[str, Any]]
    signals: list[str]
    evidence: str

    def found(self, severity: str = "warning", without: frozenset[str] = frozenset()) -> list[dict[str, Any]]:
        """Incidents of at least that severity, less those of some rules."""
        wanted = ("critical",) if severity == "critical" else ("warning", "critical")
        return [i for i in self.incidents if i["severity"] in wanted and i["rule"] not in without]

    def caught(self, without: frozenset[str] = frozenset()) -> bool:
        """Anything was found."""
        return bool(self.found(without=without))

    def early(self, without: frozenset[str] = frozenset(), lasting: bool = False) -> bool:
        """Found at or before the onset; `lasting`: by an incident that was still open at it."""
        if self.onset is None:
            return False
        early = [i for i in self.found(without=without) if i["opened_step"] <= self.onset]
        return any(i["resolved_step"] is None or i["resolved_step"] >= self.onset or not lasting for i in early)


def folder() -> Path:
    """Where the labelled runs are."""
    default = Path(__file__).resolve().parents[2].parent / "shared" / "cases"
    return Path(os.environ.get("FORESHOCK_CASES", default))


def measure(cases: Path, pack: Pack, labels: Collection[str] = (), hidden: frozenset[str] = frozenset()) -> list[Case]:
    """Every run of `index.json` (of these labels, if any are given) through the rules, as if `hidden` were not logged.

    Raises FileNotFoundError where the folder is absent.
    """
    index = json.loads((cases / "index.json").read_text(encoding="utf-8"))
    measured = []
    for entry in index:
        if labels and entry["label"] not in labels:
            continue
        report = check(cases / entry["file"], pack, hidden=hidden)
        measured.append(
            Case(
                id=entry["id"],
                repo=entry["repo"],
                label=entry["label"],
                onset=entry["onset_step"],
                steps=report.steps,
                verdict=report.verdict,
                incidents=[
                    {**i.to_json(), "signal": i.evidence[0].signal if i.evidence else ""} for i in report.incidents
                ],
                signals=[s for s in report.signals if not s.startswith("host.")],
                evidence=entry["evidence"],
            )
        )
    return measured


def halves(cases: Sequence[Case]) -> dict[str, str]:
    """Repository → 'A' or 'B': the largest first, each into the half that has fewer runs."""
    counts: dict[str, int] = {}
    for case in cases:
        counts[case.repo] = counts.get(case.repo, 0) + 1
    sizes, placed = {"A": 0, "B": 0}, {}
    for repo in sorted(counts, key=lambda r: (-counts[r], r)):
        half = min(sizes, key=lambda h: (sizes[h], h))
        placed[repo] = half
        sizes[half] += counts[repo]
    return placed


def summary(cases: Sequence[Case]) -> dict[str, Any]:
    """All figures of a set of runs; shares are None where there is nothing to take a share of."""
    quiet = [c for c in cases if c.label in QUIET_LABELS]
    healed = [c for c in cases if c.label == "spike-recovered"]
    failed = [c for c in cases if c.label in FAILED_LABELS]
    dated = [c for c in failed if c.onset is not None]
    steps = sum(c.steps for c in quiet)
    critical = sum(len(c.found("critical")) for c in quiet)
    lasting = [c for c in healed if c.verdict == "critical"]
    return {
        "runs": len(cases),
        "quiet_runs": len(quiet),
        "quiet_steps": steps,
        "quiet_critical_share": _share(quiet, lambda c: bool(c.found("critical"))),
        "quiet_critical_per_1000_steps": round(1000 * critical / steps, 3) if steps else None,
        "quiet_warned_share": _share(quiet, lambda c: c.caught()),
        "quiet_incidents_per_1000_steps": round(1000 * sum(len(c.found()) for c in quiet) / steps, 3)
        if steps
        else None,
        "recovered_runs": len(healed),
        "recovered_critical_share": _share(healed, lambda c: bool(c.found("critical"))),
        "recovered_critical_open_share": round(len(lasting) / len(healed), 3) if healed else None,
        "recovered_warned_share": _share(healed, lambda c: c.caught()),
        "failed_runs": len(failed),
        "failed_caught_share": _share(failed, lambda c: c.caught()),
        "failed_critical_share": _share(failed, lambda c: bool(c.found("critical"))),
        "failed_early_share": _share(dated, lambda c: c.early()),
        "failed_early_lasting_share": _share(dated, lambda c: c.early(lasting=True)),
        "failed_caught_share_without_reward": _share(failed, lambda c: c.caught(REWARD_RULES)),
        "failed_early_share_without_reward": _share(dated, lambda c: c.early(REWARD_RULES)),
    }


def by_label(cases: Sequence[Case]) -> dict[str, dict[str, Any]]:
    """Label → runs, and how many of them got what."""
    table: dict[str, dict[str, Any]] = {}
    for label in sorted({c.label for c in cases}):
        some = [c for c in cases if c.label == label]
        steps = sum(c.steps for c in some)
        table[label] = {
            "runs": len(some),
            "steps": steps,
            "critical": sum(bool(c.found("critical")) for c in some),
            "critical_open": sum(c.verdict == "critical" for c in some),
            "warned": sum(c.caught() for c in some),
            "incidents_per_1000_steps": round(1000 * sum(len(c.found()) for c in some) / steps, 2),
            "early": sum(c.early() for c in some),
            "early_without_reward": sum(c.early(REWARD_RULES) for c in some),
        }
    return table


def by_rule(cases: Sequence[Case]) -> dict[str, dict[str, int]]:
    """Rule → on how many runs of each kind it spoke, and on how many failed ones early."""
    rules = sorted({i["rule"] for c in cases for i in c.incidents})
    table = {}
    for rule in rules:
        others = frozenset(rules) - {rule}
        quiet = [c for c in cases if c.label in QUIET_LABELS]
        failed = [c for c in cases if c.label in FAILED_LABELS]
        table[rule] = {
            "quiet_warned": sum(c.caught(others) for c in quiet),
            "quiet_critical": sum(bool(c.found("critical", others)) for c in quiet),
            "recovered": sum(c.caught(others) for c in cases if c.label == "spike-recovered"),
            "failed_caught": sum(c.caught(others) for c in failed),
            "failed_early": sum(c.early(others) for c in failed),
        }
    return table


def by_signal(cases: Sequence[Case], folder: Path, pack: Pack) -> dict[str, dict[str, Any]]:
    """Signal that ever spoke → failed runs that log it, in which it spoke first (and at or before the onset), and how
    many are caught, early and critical when it is taken for not logged. Judges the failed runs once more a signal."""
    failed = [c for c in cases if c.label in FAILED_LABELS]
    first = {c.id: min(c.found(), key=lambda i: int(i["opened_step"])) for c in failed if c.caught()}
    table: dict[str, dict[str, Any]] = {}
    for signal in sorted({str(i["signal"]) for c in failed for i in c.found()} - {""}):
        left = measure(folder, pack, FAILED_LABELS, frozenset({signal}))
        early = [c for c in failed if c.id in first and first[c.id]["signal"] == signal and c.early()]
        table[signal] = {
            "logged_by": sum(signal in c.signals for c in failed),
            "speaks_first": sum(i["signal"] == signal for i in first.values()),
            "speaks_first_and_early": len(early),
            "caught_without_it": sum(c.caught() for c in left),
            "early_without_it": sum(c.early() for c in left),
            "critical_without_it": sum(bool(c.found("critical")) for c in left),
        }
    return table


def _share(cases: Sequence[Case], test: Callable[[Case], bool]) -> float | None:
    return round(sum(map(test, cases)) / len(cases), 3) if cases else None


def figures(cases: Sequence[Case]) -> dict[str, Any]:
    """Everything that is published."""
    placed = halves(cases)
    return {
        "all": summary(cases),
        "half_a": summary([c for c in cases if placed[c.repo] == "A"]),
        "half_b": summary([c for c in cases if placed[c.repo] == "B"]),
        "halves": placed,
        "by_label": by_label(cases),
        "by_rule": by_rule(cases),
    }


def markdown(told: dict[str, Any]) -> str:
    """The tables of README.md."""
    parts = [_table("figure", {name: {h: told[h][name] for h in ("all", "half_a", "half_b")} for name in told["all"]})]
    parts += [_table(name, told[f"by_{name}"]) for name in ("label", "rule", "signal") if f"by_{name}" in told]
    return "\n\n".join(parts)


def _table(corner: str, rows: dict[str, dict[str, Any]]) -> str:
    columns = list(next(iter(rows.values()), {}))
    lines = [f"| {corner} | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, row in rows.items():
        cells = ("–" if row[c] is None else str(row[c]) for c in columns)
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def disagreements(cases: Iterable[Case]) -> Iterable[str]:
    """A line for each run on which rules and label part."""
    for c in cases:
        told = "; ".join(
            f"{i['severity']} {i['rule']} {i['opened_step']}–{i['resolved_step'] or ''}" for i in c.incidents
        )
        if (c.label in QUIET_LABELS and c.incidents) or (c.label == "spike-recovered" and c.found("critical")):
            yield f"{c.label:16} {c.id} ({c.steps}): {told} | {c.evidence}"
        elif c.label in FAILED_LABELS:
            mark = "MISSED" if not c.caught() else "early" if c.early() else "late"
            yield f"{c.label:16} {c.id} onset {c.onset} {mark}: {told} | {c.evidence}"


def main() -> int:
    """0 with figures on standard output, 2 without the runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="all figures and every run's incidents as JSON")
    parser.add_argument("--markdown", action="store_true", help="the tables of README.md")
    parser.add_argument("--runs", action="store_true", help="a line for each run on which rules and label part")
    parser.add_argument("--signals", action="store_true", help="also what each signal contributes (half a minute)")
    parser.add_argument("--rules", type=Path, help="a rule pack laid over the shipped one")
    given = parser.parse_args()
    if not (folder() / "index.json").is_file():
        print(f"no labelled runs in {folder()}: set FORESHOCK_CASES", file=sys.stderr)
        return 2
    cases = measure(folder(), load_pack(given.rules))
    told = figures(cases)
    if given.signals:
        told["by_signal"] = by_signal(cases, folder(), load_pack(given.rules))
    if given.json:
        print(json.dumps({**told, "runs": [asdict(c) for c in cases]}, indent=2))
    elif given.markdown:
        print(markdown(told))
    else:
        print(json.dumps(told["all"], indent=2))
    if given.runs:
        print("\n".join(disagreements(cases)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
