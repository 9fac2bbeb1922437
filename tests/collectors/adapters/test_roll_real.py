"""The watched worker on ROLL's real source: its shape, and its own strategy on Megatron-core over two gloo ranks.

Needs ROLL_HOME (a checkout; ROLL_HOME_BEFORE one from before 2025-12-08) and ROLL_PYTHON, an interpreter with what ROLL
imports; the runs also MEGATRON_HOME (MEGATRON_HOME_BEFORE), folders with the Megatron-core that each pins.
"""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foreshock.stats.merge import merge, statistics
from foreshock.wire import Frame
from lab.roll_onpolicy.processes import run_to_end
from tests.collectors.adapters.roll_fake import SHAPE
from tests.fake_service import FakeService

pytestmark = [pytest.mark.real_source, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[3]
HOMES = ["ROLL_HOME", "ROLL_HOME_BEFORE"]
Run = Callable[..., dict[str, Any]]


def given(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        pytest.skip(f"{name} is not set")
    return value


def parameters(home: str, place: str) -> dict[str, list[str]]:
    """Method → parameter names of a class, with its bases' in ROLL's own tree; read, not imported."""
    module, name = place.split(":")
    tree = ast.parse((Path(home) / (module.replace(".", "/") + ".py")).read_text())
    found: dict[str, list[str]] = {}
    wanted = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    imports = {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }  # fmt: skip
    local = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    for base in wanted.bases:
        if isinstance(base, ast.Name) and base.id in local:
            found |= parameters(home, f"{module}:{base.id}")
        elif isinstance(base, ast.Name) and imports.get(base.id, ("",))[0].startswith("roll."):
            found |= parameters(home, ":".join(imports[base.id]))
    for node in wanted.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = [a.arg for a in node.args.args + node.args.kwonlyargs if a.arg not in ("self", "cls")]
    return found


@pytest.mark.parametrize("variable", HOMES)
@pytest.mark.parametrize("place", list(SHAPE))
def test_the_fake_has_rolls_own_shape(place: str, variable: str) -> None:
    real = parameters(given(variable), place)
    for method, names in SHAPE[place].items():
        assert set(names) <= set(real[method]), method


@pytest.mark.parametrize("variable", HOMES)
def test_rolls_loop_skips_done_steps_and_ends_each_at_do_checkpoint(variable: str) -> None:
    source = (Path(given(variable)) / "roll/pipeline/rlvr/rlvr_pipeline.py").read_text()
    assert "if global_step <= self.state.step:" in source
    assert "self.do_checkpoint(global_step=global_step)" in source
    assert "reward_postprocess(" in source
    assert "system_envs" in (Path(given(variable)) / "roll/configs/worker_config.py").read_text()


@pytest.fixture
def run(service: FakeService, tmp_path: Path) -> Run:
    """Runs `roll_ranks.py` on two ranks against the fake service; gives what it wrote."""

    def start(variable: str, *options: str, plan: Any = None, **settings: str) -> dict[str, Any]:
        home, megatron = given(variable), given(variable.replace("ROLL_HOME", "MEGATRON_HOME"))
        out = tmp_path / "out.json"
        command = [
            given("ROLL_PYTHON"), "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node",
            "2", str(Path(__file__).parent / "roll_ranks.py"), "--home", home, "--megatron", megatron,
            "--out", str(out),
            "--plan", json.dumps(plan or {}), *options,
        ]  # fmt: skip
        environment = os.environ | {
            "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "collectors")]),
            "FORESHOCK_URL": service.url, "FORESHOCK_RUN": "lab/roll", "FORESHOCK_RAISE": "1",
            "FORESHOCK_SPOOL_DIR": str(tmp_path / "spool"), "ROLL_LOG_DIR": str(tmp_path),
        } | settings  # fmt: skip
        _, said = run_to_end(command, tmp_path, environment, 500)
        assert out.exists(), said[-3000:]
        result: dict[str, Any] = json.loads(out.read_text())
        assert result["errors"] == 0
        return result

    return start


def merged(service: FakeService, step: int, pair: str) -> dict[str, float]:
    frames = [f for f in service.frames() if f.step == step]
    assert sorted(f.rank for f in frames) == [0, 1]
    return dict(statistics(merge([f.pairs[pair] for f in frames])).values)


def scalar(service: FakeService, step: int, name: str) -> float:
    frames: list[Frame] = [f for f in service.frames() if f.step == step]
    return max(f.scalars[name] for f in frames)


@pytest.mark.parametrize("variable", HOMES)
def test_edges_groups_exact_correction_and_probe_on_the_real_worker(
    variable: str, run: Run, service: FakeService
) -> None:
    plan = {"1": [{"kind": "enable_is_correction", "arguments": {"cap": 1.5}}], "2": [{"kind": "probe"}]}
    settings = {"FORESHOCK_ROLL_ON_POLICY": "exact", "FORESHOCK_ROLL_REFUSE": "1", "FORESHOCK_ROLL_PROBE": "1"}
    options = ("--steps", "3", "--engine", "noisy", "--dtype", "bf16")
    result = run(variable, *options, plan=plan, **settings)
    for step in (0, 1, 2):
        assert merged(service, step, "policy")["kl_k2"] == 0.0
        assert merged(service, step, "mismatch")["kl_k2"] == pytest.approx(0.045, rel=0.2)
        assert scalar(service, step, "group.mixed") == 0.0
        assert scalar(service, step, "update.skipped") == 0.0
    assert result["steps"][1]["answers"][0][0] == "done"
    state, detail = result["steps"][2]["answers"][0]
    assert state == "done"
    assert detail["probe"]["repeat"]["kl_k2"] == 0.0


@pytest.mark.parametrize("variable", HOMES)
def test_mixed_groups_are_told_and_refused_bit_identical(variable: str, run: Run, service: FakeService) -> None:
    result = run(variable, "--steps", "2", "--mixed", "--dtype", "bf16", FORESHOCK_ROLL_REFUSE="1")
    for line in result["steps"]:
        assert scalar(service, line["step"], "group.mixed") > 0.9
        assert scalar(service, line["step"], "update.skipped") == 1.0
        assert line["before_digest"] == line["after_digest"]
    assert any("groups were formed across prompts" in n.data["text"] for n in service.notices("note"))


@pytest.mark.parametrize("variable", HOMES)
def test_a_stale_training_pass_is_refused_bit_identical(variable: str, run: Run, service: FakeService) -> None:
    options = ("--steps", "3", "--stale", "half", "--lr", "1e-3", "--dtype", "bf16")
    result = run(variable, *options, FORESHOCK_ROLL_ON_POLICY="exact", FORESHOCK_ROLL_REFUSE="1")
    assert merged(service, 0, "policy")["kl_k2"] == 0.0
    refused = [line for line in result["steps"] if line["before_digest"] == line["after_digest"]]
    skipped = [step for step in (0, 1, 2) if scalar(service, step, "update.skipped")]
    assert skipped == [line["step"] for line in refused]
    assert skipped
    assert merged(service, skipped[0], "policy")["kl_k2"] > 0


def test_where_old_is_reused_ranks_that_hold_other_parameters_are_told(run: Run, service: FakeService) -> None:
    options = ("--steps", "2", "--stale", "half", "--lr", "1e-3", "--dtype", "bf16", "--old", "reused")
    result = run("ROLL_HOME", *options, FORESHOCK_ROLL_RESAMPLE_EVERY="1", FORESHOCK_ROLL_REFUSE="1")
    assert [scalar(service, step, "update.skipped") for step in (0, 1)] == [0.0, 1.0]
    assert result["steps"][1]["before_digest"] == result["steps"][1]["after_digest"]
    assert "data-parallel ranks hold different parameters" in service.notices("weights")[0].data["reason"]


def test_rollback_brings_rolls_own_megatron_checkpoint_back_to_the_bit(run: Run, service: FakeService) -> None:
    # In float32: with the CPU's layer spec Megatron-core cannot save a bfloat16 model, whose last norm stays float32.
    # ROLL's source of then, for today's raises on float32 logits in a micro-batch of one row.
    plan = {"1": [{"kind": "save", "arguments": {"step": 0}}], "3": [{"kind": "rollback", "arguments": {"step": 0}}]}
    result = run("ROLL_HOME_BEFORE", "--steps", "5", "--offload", plan=plan)
    steps = result["steps"]
    assert steps[3]["answers"][0][0] == "done"
    assert steps[3]["before_digest"] == steps[1]["before_digest"]
    assert steps[3]["before_digest"]["parameters"] != steps[2]["after_digest"]["parameters"]
    assert steps[4]["before_digest"] != steps[3]["before_digest"], "training goes on"
    assert merged(service, 4, "policy")["kl_k2"] == 0.0
    assert {notice.data["step"] for notice in service.notices("checkpoint")} == {0}
