"""Stock and watched on ROLL's own pipeline, small: the table's verdicts, and two runs of the real thing.

The runs need ``ROLL_HOME_BEFORE`` (ROLL of 2025-11, whose order of rows mixes the groups) and ``ROLL_PYTHON``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lab.roll_onpolicy import rescue


def run(reward: float, setting: str, seed: int = 0, **more: Any) -> dict[str, Any]:
    steps = [{"reward": reward, "policy.kl_k2": 0.0, "truncated": 0.0, "refused": ""} for _ in range(60)]
    return {"rung": "identical", "dtype": "fp32", "setting": setting, "seed": seed, "status": "completed",
            "steps": steps, "refused": []} | more  # fmt: skip


def test_a_run_is_healthy_refused_or_what_became_of_it() -> None:
    healthy = [0.97, 0.99]
    assert rescue.verdict(run(0.98, "exact"), healthy) == "healthy"
    assert rescue.verdict(run(0.1, "exact"), healthy) == "crashes"
    assert rescue.verdict(run(0.1, "refuse", status="refused"), healthy) == "refused"
    assert rescue.verdict(run(0.6, "refuse", refused=[{"step": 1, "cause": "old"}]), healthy) == "refused"
    assert rescue.verdict(run(0.98, "refuse", refused=[{"step": 1, "cause": "old"}]), healthy) == "healthy"


def test_the_table_counts_by_setting_and_shows_the_first_refusal_with_its_cause() -> None:
    refused = run(0.5, "refuse", 1, status="refused", refused=[{"step": 3, "cause": "rows"}], incidents=[])
    mixed = {"rung": "mixed groups"}
    runs = [run(0.98, "stock"), run(0.99, "stock", 1), run(0.1, "stock") | mixed, refused | mixed]
    rows = rescue.table(runs)
    assert [row["rung"] for row in rows] == ["identical", "mixed groups"]
    assert rows[0]["stock"]["verdict"] == ["healthy", "healthy"]
    assert rows[1]["refuse"]["first refused"] == [3]
    text = rescue.markdown(rows)
    assert "crashes 1/1; 0.10" in text
    assert "refused 1/1" in text
    assert "3: rows" in text


@pytest.mark.real_source
@pytest.mark.timeout(400)
def test_rolls_own_pipeline_mixes_groups_and_the_watched_one_refuses_them_or_puts_rows_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, python = os.environ.get("ROLL_HOME_BEFORE"), os.environ.get("ROLL_PYTHON")
    if not home or not python:
        pytest.skip("ROLL_HOME_BEFORE or ROLL_PYTHON is not set")
    monkeypatch.setenv("FORESHOCK_LAB_CACHE", str(tmp_path / "cache"))
    options = ["--out", str(tmp_path), "--home", home, "--python", python, "--small", "--steps", "6", "--seeds", "1"]
    names = ["mixed-groups__fp32__exact", "mixed-groups__fp32__refuse", "rows-misordered__fp32__exact"]
    assert rescue.main([*options, "--jobs", "1", "--only", *names]) == 0

    def record(name: str) -> dict[str, Any]:
        found = next((tmp_path / "runs").glob(f"{name}*.json"))
        return dict(json.loads(found.read_text()))

    refused, put_back, misordered = (record(name) for name in (names[1], names[0], names[2]))
    assert [found["step"] for found in refused["refused"]] == [0, 1, 2, 3, 4, 5]
    assert "advantage groups were formed across prompts" in refused["refused"][0]["cause"]
    assert refused["steps"][-1]["updates"] == 0
    assert ["mixed_groups", "critical", 0] in refused["incidents"]
    for healed in (put_back, misordered):
        assert healed["refused"] == []
        assert healed["steps"][-1]["updates"] > 0
        assert {step["policy.kl_k2"] for step in healed["steps"]} == {0.0}
        assert healed["incidents"] == []
