"""The rules on another lab's runs. The program here is a fake of the study's, with its names and its order of calls."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks.detection import study

FAKE = """
import torch
LAB = "."

def stats(old, rollout, mask, advantage):
    return {"k3": 0.0}

def train(seed, fault, fargs, t0, steps, snap):
    generator, hist = torch.Generator().manual_seed(seed), []
    for t in range(steps):
        ill = fault == "quant" and t >= t0
        rollout = -torch.rand(128, 8, generator=generator)
        noise = 1e-3 * torch.randn(128, 8, generator=generator)
        s = stats(rollout + (BIAS if ill else 1.0) * noise, rollout, torch.ones(128, 8), torch.ones(128))
        reward = 0.3 if fault == "quant" and t >= t0 + 10 else 0.9
        s.update(step=t, reward=reward, ent=1.0, akl=1e-6, akl0=0.0, clipfrac=0.0, gn=1.0, len=5.0, trunc=0.0)
        if t % 5 == 0:
            s["eval"] = 0.9
        hist.append(s)
    return {"hist": hist}
"""


def ended(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["study", *arguments])
    return study.main()


@pytest.mark.parametrize(("bias", "status"), [(300.0, 0), (1.0, 1)])
def test_a_fault_that_the_rules_foresee_is_met_and_one_that_they_do_not_is_missed(
    bias: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = tmp_path / "lab.py"
    lab.write_text(FAKE.replace("BIAS", str(bias)))
    arguments = (str(lab), "--recipe", "int3t", "--seeds", "2", "--cache", str(tmp_path / "cache"))
    assert ended(monkeypatch, *arguments) == status
    printed = capsys.readouterr().out.splitlines()
    assert printed[2].startswith("| int3t | 2/2 |")
    assert ("| 11, mean 11.0 [11, 11] | mismatch." in printed[2]) is (status == 0)
    assert any(line.startswith("MISSED") for line in printed) is (status == 1)
    # The second time nothing is run again.
    lab.write_text(FAKE.replace("BIAS", "undefined"))
    assert ended(monkeypatch, *arguments) == status


@pytest.mark.skipif("FORESHOCK_STUDY" not in os.environ, reason="FORESHOCK_STUDY: the study's lab.py")
def test_three_bits_in_the_studys_own_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (os.environ["FORESHOCK_STUDY"], "--recipe", "int3t", "--seeds", "1", "--cache", str(tmp_path))
    assert ended(monkeypatch, *arguments) == 0
