"""Does the diagnosis name the right cause? A confusion matrix over the lab's illnesses, and over published figures.

    python -m benchmarks.detection.diagnosis [--seeds 5 6 7 8] [--healthy 20] [--record FOLDER] [--plot FILE]

Lab: as `foreshock check` would ask, `LATER` steps after the first incident of a pair opened, over the steps since its
onset (sixteen at most), with the baselines as of then; where nothing opened, over the first ten ill steps. A healthy
run is asked at every step. Nothing is fitted, so there is nothing to refit a fold; the signatures were written
with seeds 0 to 4 in sight, and seeds from 5 on were not looked at.

Published figures (`published.json`): one step each, so growth is unknown; a run's own floor is that of its table.
Exits 1 where fewer than 90 % of the lab's runs have their cause or family first, or a healthy run is called ill.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from benchmarks.detection.lab import ONSET, default_recordings, recorded
from benchmarks.detection.watching import incidents, outcomes
from foreshock_service.check.judge import DIAGNOSED, WINDOW
from foreshock_service.diagnosis.signature import Diagnosis, diagnose

LATER: Final = 9
"""Steps after an incident opened: growth needs six, and people read an alert minutes after it came."""
CAUSES: Final[Mapping[str, str | None]] = {
    "stale_parameters": "stale_trainer_parameters",
    "ramped_stale_parameters": "stale_trainer_parameters",
    "stale_scoring": "stale_trainer_parameters",
    "dropout": "dropout",
    "old_batch": "misaligned_rows",
    "stale_engine": "stale_engine_weights",
    "frozen_engine": "stale_engine_weights",
    "ramped_stale_engine": "stale_engine_weights",
    "quantised_engine": "quantised_engine",
    "ramped_quantised_engine": "quantised_engine",
    "temperature": "temperature",
    "top_k": "truncation",
    "shifted_labels": "shifted_labels",
    "frozen_update": None,
    "forced_eos": None,
}
"""Illness of the lab → its cause; None: no pair of log-probs moves, so nothing may be named."""
HARMLESS: Final = frozenset({"numeric_noise", "length_confounding"})
"""Causes that say that there is no fault."""
PUBLISHED: Final = Path(__file__).with_name("published.json")
FLOOR_RATIO: Final = 3.0
"""How far above the largest figure of its table without a fault a run's own range goes."""
Outcome = Literal["right", "family", "named", "abstained", "wrong"]


@dataclass(frozen=True)
class Answer:
    """One question and what was said. `first` is the best cause, None where none was named."""

    group: str
    case: str
    expected: str | None
    first: str | None
    family: str | None
    between: tuple[str, ...]
    edge: str | None

    @property
    def outcome(self) -> Outcome:
        """`right`: the cause is first; `family`: its family is; `named`: it is one of those said not to be separated.

        Where nothing is ill or no signature exists, silence is right. `abstained` elsewhere: no cause was named.
        """
        if self.expected is None:
            return "right" if self.first is None else "named" if self.between else "wrong"
        if self.first is None:
            return "abstained"
        if self.first == self.expected:
            return "right"
        if self.family is not None and self.family == FAMILIES.get(self.expected):
            return "family"
        return "named" if self.expected in self.between else "wrong"

    @property
    def confident(self) -> bool:
        """One cause was named alone."""
        return self.first is not None and not self.between


def _families() -> dict[str, str]:
    from foreshock_service.diagnosis.causes import CAUSES as KNOWN

    return {cause.name: cause.family for cause in KNOWN if cause.family}


FAMILIES: Final = _families()


def answer(group: str, case: str, expected: str | None, found: Diagnosis) -> Answer:
    """What the diagnosis says, a cause without fault counting as silence."""
    best = found.causes[0] if found.causes else None
    quiet = best is None or best.name in HARMLESS
    return Answer(
        group=group,
        case=case,
        expected=None if expected in HARMLESS else expected,
        first=None if quiet or best is None else best.name,
        family=None if quiet or best is None else best.family,
        between=found.undecided_between,
        edge=found.edge,
    )


def of_lab(illness: str, seed: int, rows: Sequence[tuple[int, Mapping[str, float]]]) -> Answer:
    """Asks of one ill run, once."""
    opened, onset = ONSET, ONSET
    pairs = [i for i in incidents(rows) if i.rule in DIAGNOSED]
    if pairs:
        first = min(pairs, key=lambda i: i.opened)
        opened, onset = first.opened, first.opened if first.onset is None else first.onset
    bands = next(outcome.bands for step, outcome in outcomes(rows) if step == min(opened + LATER, rows[-1][0]))
    window = [values for step, values in rows if onset <= step <= opened + LATER][-WINDOW:]
    return answer(illness, str(seed), CAUSES[illness], diagnose(window, bands=bands))


def of_healthy(seed: int, rows: Sequence[tuple[int, Mapping[str, float]]]) -> list[Answer]:
    """Asks at each step from the tenth on, over the last ten."""
    told, window = list[Answer](), list[Mapping[str, float]]()
    for (step, values), (_, outcome) in zip(rows, outcomes(rows), strict=True):
        window = [*window[-LATER:], values]
        if len(window) > LATER:
            told.append(answer("none", f"{seed}, step {step}", None, diagnose(window, bands=outcome.bands)))
    return told


def of_published() -> list[Answer]:
    """Asks of each line of the published tables. Lines marked `hidden` are below the rounding of bfloat16."""
    lines = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    floors: dict[str, float] = {}
    for line in lines:
        if line.get("floor"):
            kl = max(line["values"][s] for s in ("policy.kl_k2", "mismatch.kl_k3") if s in line["values"])
            floors[line["table"]] = max(kl, floors.get(line["table"], 0.0))
    told = []
    for line in lines:
        floor = floors[line["table"]]
        bands = dict.fromkeys(("policy.kl_k2", "mismatch.kl_k3"), (0.0, floor, FLOOR_RATIO * floor))
        group = "hidden below rounding" if line.get("hidden") else line["cause"] or "no signature"
        told.append(
            answer(group, f"{line['table']}: {line['case']}", line["cause"], diagnose([line["values"]], bands=bands))
        )
    return told


def tally(answers: Iterable[Answer]) -> dict[str, dict[str, int]]:
    """Group → how many were asked, how they came out, and how many named one wrong cause alone."""
    table: dict[str, dict[str, int]] = {}
    for one in answers:
        row = table.setdefault(
            one.group, dict.fromkeys(("asked", "right", "family", "named", "abstained", "wrong", "confident_wrong"), 0)
        )
        row["asked"] += 1
        row[one.outcome] += 1
        row["confident_wrong"] += one.outcome == "wrong" and one.confident
    return table


def confusion(answers: Iterable[Answer]) -> dict[str, Counter[str]]:
    """Group → what was named first ("nothing" where nothing was) → how often."""
    matrix: dict[str, Counter[str]] = {}
    for one in answers:
        matrix.setdefault(one.group, Counter())[one.first or "nothing"] += 1
    return matrix


def share_first(answers: Sequence[Answer]) -> float:
    """Share whose cause or family came first. Raises ValueError on none."""
    if not answers:
        raise ValueError("nothing was asked")
    return sum(a.outcome in ("right", "family") for a in answers) / len(answers)


def markdown(answers: Sequence[Answer]) -> str:
    """A row per group: counts, and what was named first."""
    matrix = confusion(answers)
    lines = ["| group | asked | cause first | family first | among those not separated | abstained | wrong | of these alone | first |"]  # fmt: skip  # noqa: E501
    lines.append("|---" * 9 + "|")
    for group, row in tally(answers).items():
        said = ", ".join(f"{name} {n}" for name, n in matrix[group].most_common())
        lines.append(f"| `{group}` | " + " | ".join(str(n) for n in row.values()) + f" | {said} |")
    return "\n".join(lines)


def main() -> int:
    """Prints the tables; 1 where the promise of the first lines is broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[5, 6, 7, 8], help="seeds of each illness")
    parser.add_argument("--healthy", type=int, default=20, help="healthy seeds, from 0 on")
    parser.add_argument("--record", type=Path, default=default_recordings(), help="where runs are kept")
    parser.add_argument("--plot", type=Path, help="write the lab's confusion matrix as PNG")
    parser.add_argument("--json", type=Path, help="write every answer here")
    given = parser.parse_args()
    ill = [of_lab(name, seed, recorded(given.record, name, seed)) for name in CAUSES for seed in given.seeds]
    well = [a for seed in range(given.healthy) for a in of_healthy(seed, recorded(given.record, "none", seed))]
    published = of_published()
    for title, answers in (("Lab", ill + well), ("Published figures", published)):
        print(f"{title}\n\n{markdown(answers)}\n")
    seen = [a for a in published if a.group != "hidden below rounding"]
    false_alarms = [a for a in well if a.first is not None]
    told: dict[str, Any] = {
        "lab_first_share": round(share_first(ill), 3),
        "lab_confident_wrong": sum(a.outcome == "wrong" and a.confident for a in ill),
        "healthy_asked": len(well),
        "healthy_called_ill": len(false_alarms),
        "published_first_share": round(share_first(seen), 3),
        "published_confident_wrong": sum(a.outcome == "wrong" and a.confident for a in seen),
    }
    print(json.dumps(told, indent=2))
    for a in [*ill, *false_alarms, *published]:
        if a.outcome not in ("right", "family"):
            print(f"{a.outcome:9} {a.group} {a.case}: edge {a.edge}, first {a.first}, not separated {a.between}")
    if given.plot:
        from benchmarks.detection.plots import confusion_matrix

        confusion_matrix(confusion(ill + well), given.plot)
    if given.json:
        given.json.write_text(json.dumps([asdict(a) for a in [*ill, *well, *published]], indent=1), encoding="utf-8")
    return 1 if told["lab_first_share"] < 0.9 or false_alarms else 0


if __name__ == "__main__":
    sys.exit(main())
