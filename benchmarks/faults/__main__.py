"""`python -m benchmarks.faults [--small] [--fault NAME …] [--trials N] [--database sqlite|postgresql] [--json FILE]`

Prints fault × trials × lost × doubled × slowed × loss counts, last, and exits 1 unless nothing was lost without being
counted, nothing doubled, no command carried out twice, every training run ended normally, every loss was counted under
its reason, no run was slowed by more than 5 % (the median of the trials), and every trial came to its end.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.faults.count import ITEM_REASONS
from benchmarks.faults.faults import FAULTS, Fault, NotPossibleError, Trial
from benchmarks.faults.stage import Stage, postgres

SLOWED = 0.05
TRIALS = 3
HEADER = """\
| fault | database | trials | sealed | stored | lost | doubled | acts | twice | slowed: wall / CPU | losses | verdict |
|---|---|---|---|---|---|---|---|---|---|---|---|"""


def attempt(stage: Stage, fault: Fault, trials: int, small: bool) -> tuple[list[Trial], list[str]]:
    """Runs the trials of one fault; (what came of them, what was wrong)."""
    done: list[Trial] = []
    wrong: list[str] = []
    for _ in range(trials):
        stage.begin(fault.name)
        try:
            trial = fault.trial(stage, small)
        except (TimeoutError, AssertionError) as error:
            wrong.append(f"{type(error).__name__}: {error}")
            continue
        done.append(trial)
        wrong += trial.wrong + judge(fault, trial)
    return done, wrong


def judge(fault: Fault, trial: Trial) -> list[str]:
    """What a trial must not show."""
    found = trial.count
    wrong = [f"{n} {what}" for n, what in ((found.lost, "lost"), (found.doubled, "doubled")) if n]
    if found.executed_twice:
        wrong.append(f"{found.executed_twice} commands carried out twice")
    if not found.sealed:
        wrong.append("nothing was sealed")
    reasons = {reason for reason in found.counted if reason in ITEM_REASONS}
    if reasons != ({fault.reason} if fault.reason else set()):
        wrong.append(f"losses were counted as {sorted(reasons)}, not as {fault.reason}")
    return wrong


def slowed(trials: Sequence[Trial]) -> tuple[str, list[str]]:
    """The medians over the trials that had a twin, as text, and what was wrong with them."""
    walls = [trial.wall for trial in trials if trial.wall is not None]
    cpus = [trial.cpu for trial in trials if trial.cpu is not None]
    if not walls or not cpus:
        return "–", []
    wall, cpu = median(walls), median(cpus)
    wrong = [f"slowed by {x:.1%} {what}" for x, what in ((wall, "of wall time"), (cpu, "of CPU time")) if x > SLOWED]
    return f"{wall:+.1%} / {cpu:+.1%}", wrong


def row(fault: Fault, database: str, trials: Sequence[Trial], wrong: Sequence[str]) -> str:
    """One line of the table."""
    counted: Counter[str] = Counter()
    for trial in trials:
        counted.update(trial.count.counted)
    cells = [fault.sentence, database, str(len(trials))]
    for name in ("sealed", "stored", "lost", "doubled", "executed", "executed_twice"):
        cells.append(str(sum(getattr(trial.count, name) for trial in trials)))
    told = ", ".join(f"{reason} {n}" for reason, n in sorted(counted.items())) or "none"
    known = sum(trial.count.stored_all_the_same for trial in trials)
    cells += [slowed(trials)[0], f"{told} ({known} of them stored all the same)" if known else told]
    return f"| {' | '.join([*cells, 'WRONG: ' + '; '.join(wrong) if wrong else 'as it should'])} |"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description="Breaks things while jobs train.")
    parser.add_argument("--small", action="store_true", help="light loops only")
    parser.add_argument("--fault", action="append", choices=[fault.name for fault in FAULTS], help="repeatable")
    parser.add_argument("--trials", type=int, help="of each fault; 3 unless --small")
    parser.add_argument("--database", choices=["sqlite", "postgresql"], action="append")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    wanted = chosen.trials or (1 if chosen.small else TRIALS)
    rows, failed, skipped = [], [], []
    with tempfile.TemporaryDirectory(prefix="foreshock-faults-") as folder, postgres() as server:
        for database in chosen.database or ("sqlite", "postgresql"):
            if database == "postgresql" and server is None:
                sys.exit("no PostgreSQL found (Debian: apt-get install postgresql); or choose --database sqlite")
            stage = Stage(Path(folder) / database, server if database == "postgresql" else None)
            try:
                stage.service.start()
                for fault in FAULTS:
                    if database not in fault.databases or fault.name not in (chosen.fault or [fault.name]):
                        continue
                    try:
                        trials, wrong = attempt(stage, fault, wanted, chosen.small)
                    except NotPossibleError as error:
                        skipped.append(f"{fault.name}: not tried: {error}")
                        continue
                    wrong += slowed(trials)[1]
                    failed += wrong
                    rows.append(row(fault, database, trials, wrong))
                    print(rows[-1], file=sys.stderr, flush=True)
            finally:
                stage.close()
    if chosen.json:
        chosen.json.write_text(json.dumps({"rows": rows, "not_tried": skipped, "failed": failed}, indent=1) + "\n")
    print("\n".join([HEADER, *rows, *skipped]))
    sys.exit(1 if failed or skipped or not rows else 0)


if __name__ == "__main__":
    main()
