"""The confusion matrix of the diagnosis: its published figures, its counting, and a run made by hand."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.detection.diagnosis import (
    Answer,
    confusion,
    markdown,
    of_healthy,
    of_lab,
    of_published,
    share_first,
    tally,
)
from benchmarks.detection.plots import confusion_matrix


def said(expected: str | None, first: str | None, *between: str, family: str | None = None) -> Answer:
    return Answer("group", "case", expected, first, family, between, "engine")


def run(ill_from: int | None, steps: int = 60, seed: int = 0) -> list[tuple[int, dict[str, float]]]:
    """Both pairs at their floor; from `ill_from` on the training pass reads older and older parameters."""
    random.seed(seed)
    rows = []
    for step in range(1, steps + 1):
        behind = 0 if ill_from is None or step < ill_from else step - ill_from + 1
        values: dict[str, float] = {}
        for pair, floor in (("policy", 1e-5), ("mismatch", 4e-4), ("mismatch_current", 4e-4)):
            kl = floor * random.uniform(0.7, 1.4) + (0.0 if pair == "mismatch" else 4e-3 * behind)
            values |= {
                f"{pair}.kl_k2": kl, f"{pair}.kl_k3": kl, f"{pair}.kl_k1": 0.1 * kl, f"{pair}.delta_mean": -0.1 * kl,
                f"{pair}.abs_mean": kl**0.5, f"{pair}.slope": 1.0, f"{pair}.logp_pearson": 0.99,
                f"{pair}.positive_share": 0.5, f"{pair}.abs_q50": 0.01, f"{pair}.abs_q99": 0.1,
            }  # fmt: skip
        rows.append((step, values))
    return rows


def test_the_published_figures_without_a_fault_are_called_healthy_and_few_faults_are_misnamed() -> None:
    answers = of_published()
    counts = tally(answers)
    assert counts["numeric_noise"]["right"] == counts["numeric_noise"]["asked"] >= 70
    for cause in ("shifted_labels", "misaligned_rows", "truncation"):
        assert counts[cause]["right"] == counts[cause]["asked"] > 0
    seen = [a for a in answers if a.group != "hidden below rounding"]
    assert share_first(seen) >= 0.8
    # Two dropout passes held against each other look like weights that differ: only a repeat tells.
    misnamed = {a.case for a in seen if a.outcome == "wrong" and a.confident}
    assert misnamed <= {f"megatron S {dtype}: dropout 0.1 repeat vs repeat" for dtype in ("fp32", "bf16")}


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_run_is_asked_after_its_incident_and_its_healthy_twin_at_every_step(seed: int) -> None:
    found = of_lab("stale_parameters", seed, run(25, seed=seed))
    assert (found.outcome, found.edge, found.first) == ("right", "training_pass", "stale_trainer_parameters")
    healthy = of_healthy(seed, run(None, seed=seed))
    assert len(healthy) == 51
    assert {a.outcome for a in healthy} == {"right"}


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (said("dropout", "dropout"), "right"),
        (said("stale_kv_cache", "stale_engine_weights", family="stale_engine"), "family"),
        (said("dropout", "stale_trainer_parameters", "stale_trainer_parameters", "dropout"), "named"),
        (said("dropout", "temperature"), "wrong"),
        (said("dropout", None), "abstained"),
        (said(None, None), "right"),
        (said(None, "dropout"), "wrong"),
    ],
)
def test_an_answer_counts_as_what_it_is(answer: Answer, outcome: str) -> None:
    assert answer.outcome == outcome


def test_the_tables_count_every_answer_once() -> None:
    answers = [said("dropout", "dropout"), said("dropout", "temperature"), said("dropout", None)]
    row = tally(answers)["group"]
    assert (row["asked"], row["right"], row["wrong"], row["abstained"], row["confident_wrong"]) == (3, 1, 1, 1, 1)
    assert confusion(answers) == {"group": Counter(dropout=1, temperature=1, nothing=1)}
    assert markdown(answers).count("\n") == 2
    with pytest.raises(ValueError, match="nothing was asked"):
        share_first([])


def test_the_matrix_is_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "matrix.png"
    confusion_matrix(confusion([said("dropout", "dropout"), said("dropout", None)]), picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="nothing to draw"):
        confusion_matrix({}, picture)
