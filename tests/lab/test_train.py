"""The loop tells the monitor what it should, is deterministic, and runs from a shipped folder."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import foreshock
import lab
from lab.faults import fault_named
from lab.model import forward, initial_weights
from lab.task import draw_prompts, reward, training_prompts
from lab.train import RunConfig, run
from lab.trainer import SEMANTICS

from .conftest import JobMaker


def test_the_same_seed_gives_the_same_statistics_watched_or_not(tmp_path: Path) -> None:
    alone = run(RunConfig(steps=6, checkpoints=str(tmp_path / "alone")), foreshock.init(url=""))
    out = tmp_path / "watched.json"
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: the service is down
        environment = {
            **os.environ, "FORESHOCK_URL": f"http://127.0.0.1:{closed.getsockname()[1]}",
            "FORESHOCK_SPOOL_DIR": str(tmp_path / "spool"),
        }  # fmt: skip
        subprocess.run(
            [sys.executable, "-m", "lab.train", "--steps", "6", "--out", out, "--checkpoints", tmp_path / "watched"],
            check=True, env=environment, cwd=Path(lab.__file__).parents[1], timeout=120,
        )  # fmt: skip
    assert any((tmp_path / "spool").rglob("*"))
    assert json.loads(out.read_text())["history"] == alone.history


def test_every_step_reports_three_edges_and_the_later_updates(make_job: JobMaker) -> None:
    job, monitor = make_job(steps=1)
    job.run()
    seen = [(pair, where.get("optimizer_step", 0), where["a"].shape[0]) for pair, where in monitor.observed]
    first, later = [("policy", 0, 32), ("mismatch_current", 0, 32)] * 2, [("policy", 1, 32)] * 2
    assert seen == [("mismatch", 0, 128), *first, *later]
    for pair, where in monitor.observed:
        assert where["a"].shape == where["b"].shape == where["mask"].shape == where["token_ids"].shape
        assert len(where["seq_ids"]) == len(where["a"])
        assert not where["a"].requires_grad
        if pair == "policy":
            assert where["clip_range"] == (0.2, 0.28)
        else:
            assert where["semantics"] is SEMANTICS


def test_the_third_edge_closes_the_triangle(make_job: JobMaker) -> None:
    job, monitor = make_job(steps=1)
    job.run()
    rollout = {}
    for pair, where in monitor.observed:
        if pair == "mismatch":
            rollout = dict(zip(where["seq_ids"].tolist(), where["b"], strict=True))
        if pair == "mismatch_current":
            for sequence, row in zip(where["seq_ids"].tolist(), where["b"], strict=True):
                assert torch.equal(row, rollout[sequence])


def test_the_scalars_bear_the_catalogues_names(make_job: JobMaker) -> None:
    from foreshock.frames import catalogue

    job, monitor = make_job(steps=5)
    job.run()
    unknown = {name for name in monitor.scalars if catalogue.find(name) is None}
    assert unknown == set()
    assert len(monitor.scalars["reward.validation"]) == 1
    assert all(math.isfinite(value) for values in monitor.scalars.values() for value in values)


def test_a_job_that_raises_finishes_as_failed(make_job: JobMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    job, monitor = make_job(steps=2)

    def out_of_memory(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(job.trainer, "step", out_of_memory)
    with pytest.raises(MemoryError):
        job.run()
    assert monitor.status == "failed"


def test_the_lab_runs_from_the_folder_it_is_shipped_in(tmp_path: Path) -> None:
    shipped = tmp_path / "_shipped"
    shutil.copytree(Path(lab.__file__).parent, shipped / "lab", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(
        [sys.executable, "-m", "lab.train", "--steps", "1", "--out", str(tmp_path / "r.json")],
        check=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": f"{shipped}:{os.environ.get('PYTHONPATH', '')}"},
        timeout=120,
    )  # fmt: skip
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["illness"], result["seed"], result["onset_step"], result["steps"]) == ("none", 0, 25, 1)


def test_an_unknown_illness_is_named_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"no illness named 'flu'; there are: none, dropout"):
        fault_named("flu")


def test_a_sequence_gets_other_log_probs_in_a_micro_batch_of_another_size() -> None:
    weights = initial_weights(0)
    ids = torch.cat([p := draw_prompts(64, torch.Generator().manual_seed(0)).ids_NP, p], 1)
    whole, part = forward(weights, ids, 4), forward(weights, ids[:32], 4)
    assert torch.equal(whole, forward(weights, ids, 4))
    assert 0 < float((whole[:32] - part).abs().max()) < 0.1


def test_only_the_exact_and_ended_answer_is_rewarded() -> None:
    prompts = training_prompts(seed=0, position=3, count=4)
    mask = (torch.arange(8)[None] <= prompts.lengths_N[:, None]).float()
    tokens = prompts.targets_NR.clone()
    whole = torch.zeros(4, dtype=torch.bool)
    assert reward(tokens, mask, whole, prompts).tolist() == [1, 1, 1, 1]
    assert reward(tokens, mask, ~whole, prompts).tolist() == [0, 0, 0, 0]
    tokens[0, 0] += 1
    mask[1, prompts.lengths_N[1]] = 0
    assert reward(tokens, mask, whole, prompts).tolist() == [0, 0, 1, 1]


def test_the_data_position_alone_decides_the_batch() -> None:
    a, b, c = (training_prompts(1, position, 4).ids_NP for position in (7, 7, 8))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
