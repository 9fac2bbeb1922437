"""The common synthetic stream: false alarms, detection window and first alarm, over 20 seeds and two entropy levels.

200 steps of nine scalars of a GRPO-like run. `healthy` stays so. `collapse` shows precursors from step 90 (approxkl
grows by a fifth a step, entropy falls, gradient spikes) and breaks at 120. In `approxkl_only` nothing but approxkl
moves between 90 and 120. The draws are those on which other tools were measured, in the same order, so figures compare.

`python -m benchmarks.detection.common_stream [--json FILE]`; exits 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.detection.watching import Incident, incidents

STEPS, PRECURSOR, BREAK = 200, 90, 120
SEEDS, ENTROPIES = 20, (0.6, 2.0)
KINDS = ("healthy", "collapse", "approxkl_only")
CERTAIN_SPIKES = frozenset({94, 101, 107, 112, 116})
TARGET_MEDIAN = 98.0


def stream(kind: str, seed: int, entropy_start: float) -> Iterator[tuple[int, dict[str, float]]]:
    """(step, signals) under the catalogue's names. Raises ValueError for an unknown kind."""
    if kind not in KINDS:
        raise ValueError(f"no stream of kind {kind!r}; there are: {', '.join(KINDS)}")
    draw = np.random.default_rng(1000 + seed)
    for step in range(STEPS):
        values = _healthy(step, draw, entropy_start)
        spiking = draw.random() < 0.10
        if kind != "healthy" and step >= PRECURSOR:
            values["policy.kl_k2"] = 1e-4 * np.exp(0.2 * (min(step, 150) - PRECURSOR) + draw.normal(0, 0.20))
            if kind == "collapse":
                _precursors(values, step, spiking, draw)
            if step >= BREAK:
                _break(values, step - BREAK, draw)
        values["update.clip_high"] = min(values["update.clip_high"], 1.0)
        values["reward.std"] = max(values["reward.std"], 0.0)
        yield step, {name: float(value) for name, value in values.items()}


def _healthy(step: int, draw: np.random.Generator, entropy_start: float) -> dict[str, float]:
    """One draw per signal, in the stream's fixed order."""
    return {
        "reward.mean": 0.35 + 0.25 * (1 - np.exp(-step / 80)) + draw.normal(0, 0.03),
        "reference.kl_k3": 1e-3 + 2.5e-4 * step + abs(draw.normal(0, 3e-3)),
        "entropy.mean": entropy_start * (0.75 + 0.25 * np.exp(-step / 120)) * (1 + draw.normal(0, 0.02)),
        "grad.norm": 0.25 * np.exp(draw.normal(0, 0.18)),
        "update.clip_high": abs(draw.normal(0.004, 0.0015)),
        "policy.kl_k2": 1e-4 * np.exp(draw.normal(0, 0.20)),
        "length.mean": 600 + 1.5 * step + draw.normal(0, 20),
        "loss": draw.normal(0.0, 0.01) + 0.02,
        "reward.std": 0.40 + draw.normal(0, 0.02),
    }


def _precursors(values: dict[str, float], step: int, spiking: bool, draw: np.random.Generator) -> None:
    since = min(step, BREAK) - PRECURSOR
    values["entropy.mean"] *= np.exp(-since / 25)
    if step in CERTAIN_SPIKES or spiking:
        values["grad.norm"] *= 6 + 10 * draw.random()
    values["reference.kl_k3"] += 0.004 * since
    values["update.clip_high"] += 0.002 * since


def _break(values: dict[str, float], since: int, draw: np.random.Generator) -> None:
    capped = min(since, 40)
    values["reward.mean"] *= np.exp(-since / 6)
    values["reward.std"] *= np.exp(-since / 10)
    values["reference.kl_k3"] += 0.05 * (np.exp(capped / 8) - 1)
    values["entropy.mean"] *= np.exp(-capped / 12)
    values["grad.norm"] *= 8 + 12 * draw.random()
    values["update.clip_high"] += 0.08 * since
    values["update.clip_high"] = min(0.9, values["update.clip_high"])
    values["length.mean"] = min(4096.0, values["length.mean"] * np.exp(capped / 15))
    values["loss"] = 0.02 + 0.05 * since + abs(draw.normal(0, 0.15))


def measure() -> list[dict[str, object]]:
    """One row per kind and entropy start."""
    rows: list[dict[str, object]] = []
    for entropy_start in ENTROPIES:
        for kind in KINDS:
            found = [incidents(stream(kind, seed, entropy_start)) for seed in range(SEEDS)]
            rows.append(_row(kind, entropy_start, found))
    return rows


def _row(kind: str, entropy_start: float, found: list[list[Incident]]) -> dict[str, object]:
    ill = kind != "healthy"
    early = [i for run in found for i in run if not ill or i.opened < PRECURSOR]
    first = [min((i.opened for i in run if i.opened >= PRECURSOR), default=None) for run in found]
    seen = [step for step in first if step is not None]
    return {
        "kind": kind,
        "entropy_start": entropy_start,
        "runs": len(found),
        "false_alarms": len(early),
        "detected_in_window": sum(step < BREAK for step in seen) if ill else None,
        "median_first_alarm": statistics.median(seen) if ill and seen else None,
        "latest_first_alarm": max(seen) if ill and seen else None,
        "first_rule": dict(Counter(min(run, key=lambda i: i.opened).rule for run in found if run)),
    }


def missed(rows: list[dict[str, object]]) -> list[str]:
    """The targets that a measurement misses, in words."""
    wrong = []
    for row in rows:
        name = f"{row['kind']} at entropy {row['entropy_start']}"
        median = row["median_first_alarm"]
        if row["false_alarms"]:
            wrong.append(f"{name}: {row['false_alarms']} false alarms")
        if row["kind"] != "healthy" and row["detected_in_window"] != row["runs"]:
            wrong.append(f"{name}: {row['detected_in_window']} of {row['runs']} detected in [{PRECURSOR}, {BREAK})")
        if row["kind"] != "healthy" and not (isinstance(median, int | float) and median <= TARGET_MEDIAN):
            wrong.append(f"{name}: median first alarm {median}")
    return wrong


def main() -> int:
    """Prints the table; 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    rows = measure()
    head = f"{'kind':15s} {'entropy':>7s} {'false alarms':>12s} {'in window':>10s} {'median first':>12s} {'latest':>6s}"
    print(f"{head}  first rule")
    for row in rows:
        window = "-" if row["detected_in_window"] is None else f"{row['detected_in_window']}/{row['runs']}"
        print(
            f"{row['kind']!s:15s} {row['entropy_start']!s:>7s} {row['false_alarms']!s:>12s} {window:>10s} "
            f"{row['median_first_alarm'] or '-'!s:>12} {row['latest_first_alarm'] or '-'!s:>6}  {row['first_rule']}"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    for sentence in missed(rows):
        print(f"missed: {sentence}")
    return 1 if missed(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
