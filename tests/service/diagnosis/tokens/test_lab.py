"""The lab's illnesses, diagnosed from their token dumps alone: the right pass and cause; of a healthy run nothing."""

from __future__ import annotations

import pytest

from foreshock.stats.merge import merge, statistics
from foreshock_service.diagnosis.tokens.report import DumpDiagnosis, diagnose_dump
from tests.service.diagnosis.tokens.dumps import ONSET, STEPS, lab_dump


def of_lab(illness: str) -> DumpDiagnosis:
    return diagnose_dump([str(lab_dump(illness)[0])])


@pytest.mark.parametrize("illness", ["none", "stale_parameters"])
def test_the_statistics_recomputed_from_the_dump_are_those_that_the_frames_carried(illness: str) -> None:
    folder, service = lab_dump(illness)
    found = diagnose_dump([str(folder)], since=1)
    by_step = {frame.step: frame for frame in service.frames()}
    assert found.steps == list(range(1, STEPS + 1))
    for step, values in zip(found.window, found.values, strict=True):
        for pair, record in by_step[step].pairs.items():
            sent = statistics(merge([record])).values
            again = {n.removeprefix(f"{pair}."): v for n, v in values.items() if n.startswith(f"{pair}.")}
            assert sent.keys() == again.keys(), pair
            for name, value in sent.items():
                assert again[name] == pytest.approx(value, rel=1e-9, abs=1e-12), (step, pair, name)


def test_of_a_healthy_run_nothing_is_said() -> None:
    found = of_lab("none")
    assert (found.verdict, found.onset, found.diagnosis.edge) == ("healthy", None, None)


@pytest.mark.parametrize(
    ("illness", "edge", "cause"),
    [
        ("stale_parameters", "training_pass", "stale_trainer_parameters"),
        ("dropout", "training_pass", "dropout"),
        ("stale_scoring", "scoring_pass", "stale_trainer_parameters"),
        ("old_batch", "scoring_pass", "misaligned_rows"),
        ("frozen_engine", "engine", "stale_engine_weights"),
        ("stale_engine", "engine", "stale_engine"),
        ("quantised_engine", "engine", "quantised_engine"),
        ("shifted_labels", "engine", "shifted_labels"),
        ("temperature", "engine", "temperature"),
        ("top_k", "engine", "truncation"),
    ],
)
def test_an_illness_is_seen_at_its_onset_and_named(illness: str, edge: str, cause: str) -> None:
    found = of_lab(illness)
    assert found.verdict == "ill"
    assert found.onset in (ONSET, ONSET + 1)
    assert found.diagnosis.edge == edge
    assert found.diagnosis.names(cause)
    assert found.diagnosis.causes[0].speaks_for
