"""SkyRL's callback on its trainer in miniature (`skyrl_fake`), over SkyRL's own callback module with SKYRL_HOME."""

from __future__ import annotations

import ast
import importlib.util
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from foreshock.adapters import skyrl as adapter
from foreshock.control.inbox import Pending
from foreshock.monitor import Monitor
from foreshock.stats.merge import statistics
from foreshock.transport.clock import boot_s
from foreshock.wire import Action, Command
from tests.collectors.adapters import skyrl_fake as fake
from tests.fake_service import FakeService

pytestmark = pytest.mark.timeout(60)
HOME = os.environ.get("SKYRL_HOME")
real_source = pytest.mark.skipif(not HOME, reason="SKYRL_HOME is not set: SkyRL's source is not here")


def callbacks() -> Any:
    """SkyRL's own module where its source is at hand: it imports nothing of SkyRL when it runs."""
    if not HOME:
        return fake.STANDIN
    spec = importlib.util.spec_from_file_location("skyrl_callbacks", Path(HOME) / "skyrl/train/utils/callbacks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["skyrl_callbacks"] = module
    spec.loader.exec_module(module)
    return module


def trained(
    monitor: Monitor, ckpt_interval: int = 2, **changed: Any
) -> tuple[fake.RayPPOTrainer, adapter.SkyRLCallback]:
    trainer = fake.RayPPOTrainer(callbacks())
    trainer.cfg.trainer.ckpt_interval = ckpt_interval
    for name, value in changed.items():
        setattr(trainer.cfg.generator.sampling_params, name, value)
    callback = adapter.attach(trainer, monitor=monitor)
    trainer.train()
    return trainer, callback


def test_the_engines_edge_arrives_every_step_over_sampled_tokens_only(
    service: FakeService, make_monitor: Callable[..., Monitor]
) -> None:
    trained(make_monitor())
    frames = service.frames()
    assert [frame.step for frame in frames] == [1, 2, 3, 4]
    for frame in frames:
        values = statistics(frame.pairs["mismatch"]).values
        assert values["tokens"] == 11
        assert math.isclose(values["delta_mean"], -0.02, rel_tol=1e-4)
        assert "policy" not in frame.pairs


def test_skyrls_figures_bear_our_names(service: FakeService, make_monitor: Callable[..., Monitor]) -> None:
    trained(make_monitor())
    first, *_, last = service.frames()
    assert {"reward.mean", "grad.norm", "length.mean", "reward.validation", "advantage.mean"} <= set(first.scalars)
    assert "reward.validation" not in last.scalars
    assert not any(name.startswith("mismatch") for name in last.scalars)


def test_checkpoints_are_announced_with_what_they_hold(
    service: FakeService, make_monitor: Callable[..., Monitor]
) -> None:
    trained(make_monitor())
    notices = service.notices("checkpoint")
    assert [notice.data["step"] for notice in notices] == [2, 4]
    assert notices[0].data["path"].endswith("ckpts/global_step_2")
    assert "optimizer" in notices[0].data["scope"]


def test_a_batch_is_left_as_it_was(make_monitor: Callable[..., Monitor]) -> None:
    trainer, _ = trained(make_monitor())
    for number, batch in enumerate(trainer.batches, start=1):
        for name, tensor in fake.batch(number).items():
            assert torch.equal(batch[name], tensor)


def throws(*_: Any, **__: Any) -> None:
    raise RuntimeError("of ours")


def test_a_collector_that_throws_at_every_call_never_reaches_skyrl(
    make_monitor: Callable[..., Monitor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORESHOCK_RAISE", "0")
    monitor = make_monitor()
    for name in ("observe", "log", "checkpoint"):
        monkeypatch.setattr(monitor, name, throws)
    trainer, _ = trained(monitor)
    assert trainer.saved == [2, 4]
    assert len(trainer.batches) == 4
    assert monitor.guard.errors > 4


def test_log_probs_before_temperature_are_not_compared_with_those_after(
    service: FakeService, make_monitor: Callable[..., Monitor]
) -> None:
    trained(make_monitor(), temperature=0.7)
    assert service.frames()[0].missing["mismatch"] == "semantics_differ"


def test_losses_without_old_log_probs_report_no_pair(
    service: FakeService, make_monitor: Callable[..., Monitor], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = fake.batch
    monkeypatch.setattr(fake, "batch", lambda step: plain(step) | {"action_log_probs": None})
    trained(make_monitor())
    assert all("mismatch" not in frame.pairs for frame in service.frames())


@pytest.mark.parametrize("kind", ["stop", "checkpoint_now"])
def test_a_command_is_carried_out(kind: str, service: FakeService, make_monitor: Callable[..., Monitor]) -> None:
    monitor = make_monitor()
    wire = Command(id="c1", run=monitor.identity.run, attempt=1, actions=[Action(kind=kind)])
    monitor._process.inbox.put(Pending(wire, boot_s() + 100.0))
    trainer, callback = trained(monitor, ckpt_interval=3)
    service.wait_for(lambda: any(ack.state == "done" for _, ack in service.acks))
    steps = [frame.step for frame in service.frames()]
    if kind == "stop":
        assert steps[-1] < 4
        assert callback.stopped
        assert service.notices("finished")[0].data["status"] == "stopped"
    else:
        assert trainer.saved == [2, 3]  # asked at the end of step 1; and by the interval


def test_secrets_do_not_leave_in_the_configuration() -> None:
    told = repr(adapter.configuration(fake.Config()))
    assert "max_training_steps" in told
    assert "secret" not in told


def test_another_kind_of_trainer_is_a_clear_error() -> None:
    with pytest.raises(TypeError, match="no add_callback"):
        adapter.attach(object())


def test_without_a_url_the_trainer_is_left_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORESHOCK_URL", raising=False)
    trainer = fake.RayPPOTrainer()
    adapter.attach(trainer, run="lab/x")
    assert trainer._callback_handler.callbacks == []


@real_source
def test_the_real_trainer_fires_the_events_in_the_order_that_the_adapter_stands_on() -> None:
    path = Path(HOME or "") / "skyrl/train/trainer.py"
    tree = ast.parse(path.read_text())
    [train] = [node for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef) and node.name == "train"]
    fired = [
        (node.lineno, str(node.args[0].value))
        for node in ast.walk(train)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "self._fire"
        and isinstance(node.args[0], ast.Constant)
    ]
    assert [event for _, event in sorted(fired)] == [
        "on_train_start", "on_eval_start", "on_eval_end", "on_log", "on_epoch_start", "on_step_start", "on_step_end",
        "on_save", "on_eval_start", "on_eval_end", "on_log", "on_epoch_end", "on_save", "on_train_end",
    ]  # fmt: skip
    text = ast.unparse(tree)
    for used in (
        "self.global_step > self.cfg.trainer.max_training_steps", "force_save = self._training_control.should_save",
        "training_input['action_log_probs'] = action_log_probs", "'rollout_logprobs': rollout_logprobs_tensor",
        "'loss_mask': loss_masks_tensor", "data['advantages'] = advantages", "def add_callback",
    ):  # fmt: skip
        assert used in text, used


@real_source
def test_the_real_base_class_has_no_event_that_the_adapter_lacks() -> None:
    events = {name for name in vars(callbacks().TrainingCallback) if name.startswith("on_")}
    assert events == set(adapter.EVENTS)
