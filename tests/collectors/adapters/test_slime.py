"""slime's hooks on a loop of slime's shape (`slime_fake`); with SLIME_HOME, on slime's real loss and source."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from foreshock.adapters import slime as adapter
from foreshock.adapters import slime_batch
from foreshock.control.inbox import Pending
from foreshock.stats.merge import statistics
from foreshock.transport.clock import boot_s
from foreshock.wire import Action, Command, Frame
from tests.collectors.adapters import slime_fake
from tests.fake_service import FakeService

pytestmark = pytest.mark.timeout(120)
ROOT = Path(__file__).parents[3]


@pytest.fixture
def actor(service: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes a training rank of the fake; the adapter begins at its first step."""
    loss = slime_fake.fake_loss()
    monkeypatch.setattr(slime_batch, "loss_module", lambda: loss)
    monkeypatch.setattr(slime_batch, "place", lambda: slime_batch.Place(0, 1, True, True))
    settings = {"URL": service.url, "RUN": "lab/x", "LAUNCH": "one", "SPOOL_DIR": str(tmp_path), "FINISH_S": "3"}
    for name, value in settings.items():
        monkeypatch.setenv(f"FORESHOCK_{name}", value)
    monkeypatch.setattr(adapter, "_adapter", None)
    yield lambda **changed: slime_fake.Actor(loss, slime_fake.make_args(**changed))
    if adapter._adapter is not None:
        adapter._adapter.monitor.end("completed", None, 0.2)


def trained(actor: slime_fake.Actor, rollouts: int = 3) -> slime_fake.Actor:
    for rollout_id in range(rollouts):
        actor.train(rollout_id)
    if adapter._adapter is not None:
        adapter._adapter.monitor.finish()
    return actor


def bare(rollouts: int = 3, **changed: Any) -> slime_fake.Actor:
    """The same rank without hooks."""
    plain = slime_fake.Actor(slime_fake.fake_loss(), slime_fake.make_args(**changed), hooked=False)
    for rollout_id in range(rollouts):
        plain.train(rollout_id)
    return plain


def commanded(actor: slime_fake.Actor, kind: str, **arguments: Any) -> None:
    """One rollout; then a command waits for the end of the next."""
    actor.train(0)
    assert adapter._adapter is not None
    wire = Command(id="c1", run="lab/x", attempt=1, actions=[Action(kind=kind, arguments=arguments)])
    adapter._adapter.monitor._process.inbox.put(Pending(wire, boot_s() + 100.0))
    actor.train(1)


def check_frames(frames: list[Frame], logged: list[dict[str, float]]) -> None:
    assert [frame.step for frame in frames] == [0, 1, 2]
    for frame, steps in zip(frames, zip(logged[::2], logged[1::2], strict=True), strict=True):
        mismatch = statistics(frame.pairs["mismatch"]).values
        told = sum(step["train_rollout_logprob_abs_diff"] for step in steps) / 2
        assert mismatch["abs_mean_seqmean"] == pytest.approx(told, rel=1e-5)
        assert mismatch["sequences"] == slime_fake.SAMPLES
        assert statistics(frame.pairs["policy"]).values["abs_max"] < 1e-5
        assert statistics(frame.pairs["update"]).values["abs_mean"] > 1e-3
        assert statistics(frame.pairs["policy"]).values["sequences"] == slime_fake.SAMPLES / 2
        assert {"grad.norm", "lr", "entropy.mean", "reward.mean", "length.max", "advantage.std"} <= set(frame.scalars)


def test_pairs_equal_slimes_own_figures(actor: Callable[..., Any], service: FakeService) -> None:
    logged = trained(actor()).logged
    check_frames(service.frames(), logged)


def test_losses_and_weights_are_bit_identical_with_and_without(actor: Callable[..., Any]) -> None:
    watched, plain = trained(actor()), bare()
    assert (watched.losses, watched.state()) == (plain.losses, plain.state())


@pytest.mark.parametrize(
    "place",
    [
        "foreshock.frames.builder.StepBuilder.observe",
        "foreshock.frames.builder.StepBuilder.seal",
        "foreshock.frames.scalars.Scalars.add",
        "foreshock.transport.sender.Sender.put",
        "foreshock.adapters.slime_batch.rows",
    ],
)
def test_a_collector_that_throws_at_every_call_changes_no_bit(
    place: str, actor: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setenv("FORESHOCK_RAISE", "0")
    watched = actor()
    watched.train(0)
    assert adapter._adapter is not None
    monkeypatch.setattr(place, broken)
    watched.train(1)
    watched.train(2)
    plain = bare()
    assert (watched.losses, watched.state()) == (plain.losses, plain.state())
    assert adapter._adapter.guard.errors > 0


def test_without_a_url_nothing_is_wrapped(actor: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORESHOCK_URL")
    watched = actor()
    trained(watched, 1)
    assert "step" not in vars(watched.optimizer)


def test_detached_old_log_probs_are_missing_and_not_zero(actor: Callable[..., Any], service: FakeService) -> None:
    watched = actor()
    original = watched.rollout
    watched.rollout = lambda: {name: rows for name, rows in original().items() if name != "log_probs"}
    trained(watched, 1)
    assert service.frames()[0].missing["policy"] == "detached"
    assert statistics(service.frames()[0].pairs["mismatch"]).values["tokens"] > 0


def test_critics_are_left_alone(actor: Callable[..., Any]) -> None:
    watched = actor()
    watched.model[0].role = "critic"
    watched.train(0)
    assert adapter._adapter is None


def test_correction_is_toggled_in_slimes_own_settings(actor: Callable[..., Any], service: FakeService) -> None:
    watched = actor()
    commanded(watched, "enable_is_correction", cap=1.05)
    assert (watched.args.use_tis, watched.args.tis_clip) == (True, 1.05)
    trained(watched, 0)
    assert service.acks[-1][1].state == "done"
    assert "enable_is_correction" not in _kinds_of(actor, use_rollout_logprobs=True)


def _kinds_of(actor: Callable[..., Any], **changed: Any) -> set[str]:
    adapter._adapter = None
    actor(**changed).train(0)
    assert adapter._adapter is not None
    return adapter._adapter.monitor.kinds()


def test_skip_update_leaves_parameters_moments_and_schedule_as_they_are(
    actor: Callable[..., Any], service: FakeService
) -> None:
    watched = actor()
    commanded(watched, "skip_update", steps=2)
    before = watched.state()
    watched.train(2)
    assert watched.state() == before
    watched.train(3)
    assert watched.state() != before
    trained(watched, 0)
    assert [frame.scalars["update.skipped"] for frame in service.frames()] == [0, 0, 1, 0]


def test_scale_lr_scales_the_update_and_not_the_schedule(actor: Callable[..., Any], service: FakeService) -> None:
    watched = actor()
    commanded(watched, "scale_lr", factor=0.5)
    unscaled = watched.optimizer.param_groups[0]["lr"]
    watched.train(2)
    trained(watched, 0)
    assert service.frames()[-1].scalars["lr"] < 0.55 * unscaled
    assert watched.optimizer.param_groups[0]["lr"] == bare().optimizer.param_groups[0]["lr"]


def test_stop_leaves_the_loop_at_the_rollouts_end(actor: Callable[..., Any]) -> None:
    with pytest.raises(adapter.StopAskedError):
        commanded(actor(), "stop")


def test_checkpoints_are_announced_once_slime_says_they_are_complete(
    actor: Callable[..., Any], service: FakeService, tmp_path: Path
) -> None:
    watched = actor(save=str(tmp_path / "ckpt"))
    watched.train(0)
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").write_text("0")
    watched.train(1)
    watched.train(2)
    trained(watched, 0)
    assert [notice.data["path"] for notice in service.notices("checkpoint")] == [str(tmp_path / "ckpt/iter_0000000")]


# --- the real source ------------------------------------------------------------------------------------------------


@pytest.fixture
def home() -> Path:
    given = os.environ.get("SLIME_HOME")
    if not given:
        pytest.skip("SLIME_HOME is not set")
    return Path(given)


def run(home: Path, folder: Path, *options: str, **environment: str) -> Any:
    script = (
        "import sys, types; tests = types.ModuleType('tests'); "
        f"tests.__path__ = [{str(ROOT / 'tests')!r}]; sys.modules['tests'] = tests; "
        "from tests.collectors.adapters.slime_fake import main; main()"
    )
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(folder / f"rendezvous{len(options)}"), *options],
        env=os.environ | {"PYTHONPATH": str(home)} | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-3000:]
    return json.loads(found.stdout.strip().splitlines()[-1])


@pytest.mark.real_source
@pytest.mark.parametrize("options", [(), ("recompute",)], ids=["", "recompute"])
def test_slimes_real_loss_gives_the_same_figures_and_the_same_bits(
    home: Path, service: FakeService, tmp_path: Path, options: tuple[str, ...]
) -> None:
    settings = {"FORESHOCK_URL": service.url, "FORESHOCK_RUN": "lab/x", "FORESHOCK_SPOOL_DIR": str(tmp_path / "spool")}
    watched = run(home, tmp_path, *options, **settings)
    plain = run(home, tmp_path, "bare", *options)
    assert watched == plain
    check_frames(service.frames(), watched["logged"])


@pytest.mark.real_source
def test_slime_calls_the_hooks_as_the_adapter_expects(home: Path) -> None:
    model = (home / "slime/backends/megatron_utils/model.py").read_text()
    assert "custom_before_train_step_hook(args, rollout_id, step_id, model, optimizer, opt_param_scheduler)" in model
    assert "update_successful, grad_norm, num_zeros_in_grad = optimizer.step()" in model
    assert "opt_param_scheduler.step(increment=" in model
    actor = (home / "slime/backends/megatron_utils/actor.py").read_text()
    assert "self.rollout_data_postprocess(self.args, rollout_id, rollout_data)" in actor
    arguments = (home / "slime/utils/arguments.py").read_text()
    assert '"--custom-megatron-before-train-step-hook-path"' in arguments
    assert '"--rollout-data-postprocess-path"' in arguments
    loss = ast.parse((home / "slime/backends/megatron_utils/loss.py").read_text())
    names = {node.name: [a.arg for a in node.args.args] for node in loss.body if isinstance(node, ast.FunctionDef)}
    assert names["policy_loss_function"][:3] == ["args", "batch", "logits"]
    assert "get_log_probs_and_entropy" in names
