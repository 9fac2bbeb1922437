"""NeMo-RL's driver watched, in miniature (`nemo_rl_fake`); with NEMO_RL_HOME the real source has what is stood on."""

from __future__ import annotations

import ast
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from foreshock.adapters import nemo_rl as adapter
from foreshock.control.inbox import Pending
from foreshock.monitor import Monitor
from foreshock.stats.merge import statistics
from foreshock.transport.clock import boot_s
from foreshock.wire import Action, Command
from tests.collectors.adapters import nemo_rl_fake as fake
from tests.fake_service import FakeService

pytestmark = pytest.mark.timeout(60)
HOME = os.environ.get("NEMO_RL_HOME")
real_source = pytest.mark.skipif(not HOME, reason="NEMO_RL_HOME is not set: NeMo-RL's source is not here")


def trained(monitor: Monitor, folder: Path, forced: bool = False, **generation: Any) -> fake.Policy:
    policy, logger, checkpointer = fake.Policy(), fake.Logger(), fake.Checkpointer()
    adapter.attach(policy, logger, checkpointer, fake.make_config(**generation), monitor=monitor)
    fake.grpo_train(policy, logger, checkpointer, fake.Loss(forced), folder)
    return policy


def asked(monitor: Monitor, kind: str) -> None:
    """A command that is due at the first boundary."""
    wire = Command(id="c1", run=monitor.identity.run, attempt=1, actions=[Action(kind=kind)])
    monitor._process.inbox.put(Pending(wire, boot_s() + 100.0))


def test_the_engines_edge_arrives_every_step_over_all_sampled_tokens(
    service: FakeService, make_monitor: Callable[..., Monitor], tmp_path: Path
) -> None:
    trained(make_monitor(), tmp_path)
    frames = service.frames()
    assert [frame.step for frame in frames] == [1, 2, 3]
    for frame in frames:
        values = statistics(frame.pairs["mismatch"]).values
        assert values["tokens"] == 8  # also of the sequence that the loss leaves out
        assert math.isclose(values["delta_mean"], -0.03, rel_tol=1e-4)
        assert "policy" not in frame.pairs


def test_its_figures_bear_our_names_and_a_validation_its_own_step(
    service: FakeService, make_monitor: Callable[..., Monitor], tmp_path: Path
) -> None:
    trained(make_monitor(), tmp_path)
    first, second, _ = service.frames()
    assert {"reward.mean", "grad.norm", "lr", "entropy.mean", "filter.share", "advantage.mean"} <= set(first.scalars)
    assert not any(name.startswith("mismatch") for name in first.scalars)
    assert "reward.validation" not in first.scalars
    assert "reward.validation" in second.scalars


def test_a_finished_checkpoint_is_announced_under_its_last_name(
    service: FakeService, make_monitor: Callable[..., Monitor], tmp_path: Path
) -> None:
    trained(make_monitor(), tmp_path)
    [notice] = service.notices("checkpoint")
    assert notice.data["path"] == str(tmp_path / "step_2")
    assert Path(notice.data["path"]).is_dir()
    assert set(notice.data["scope"]) == {"weights", "data", "optimizer", "scheduler"}
    assert service.notices("finished")[0].data["status"] == "completed"


def test_a_batch_is_left_as_it_was(make_monitor: Callable[..., Monitor], monkeypatch: pytest.MonkeyPatch,
                                   tmp_path: Path) -> None:  # fmt: skip
    kept: list[dict[str, Any]] = []
    plain = fake.batch

    def keeping(step: int) -> dict[str, Any]:
        kept.append(plain(step))
        return kept[-1]

    monkeypatch.setattr(fake, "batch", keeping)
    trained(make_monitor(), tmp_path)
    for number, batch in enumerate(kept, start=1):
        assert all(torch.equal(batch[name], tensor) for name, tensor in plain(number).items())


def throws(*_: Any, **__: Any) -> None:
    raise RuntimeError("of ours")


def test_a_collector_that_throws_at_every_call_never_reaches_nemo_rl(
    make_monitor: Callable[..., Monitor], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FORESHOCK_RAISE", "0")
    monitor = make_monitor()
    for name in ("observe", "log", "checkpoint"):
        monkeypatch.setattr(monitor, name, throws)
    assert len(trained(monitor, tmp_path).corrected) == 3
    assert (tmp_path / "step_2").is_dir()
    assert monitor.guard.errors > 4


def test_a_forced_ratio_and_unlike_log_probs_report_no_number(
    service: FakeService, make_monitor: Callable[..., Monitor], tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    trained(make_monitor(), tmp_path / "a", forced=True)
    assert all("mismatch" not in frame.pairs for frame in service.frames())
    seen = len(service.frames())
    (tmp_path / "b").mkdir()
    trained(make_monitor(), tmp_path / "b", temperature=0.7)  # vLLM's default is before temperature
    assert service.frames()[seen].missing["mismatch"] == "semantics_differ"


def test_processed_log_probs_under_top_p_are_comparable_for_the_trainer_filters_too(
    service: FakeService, make_monitor: Callable[..., Monitor], tmp_path: Path
) -> None:
    trained(make_monitor(), tmp_path, temperature=0.7, top_p=0.9, vllm_cfg={"logprobs_mode": "processed_logprobs"})
    assert "mismatch" in service.frames()[0].pairs


def test_the_correction_is_sent_with_the_next_batch(
    service: FakeService, make_monitor: Callable[..., Monitor], tmp_path: Path
) -> None:
    monitor = make_monitor()
    asked(monitor, "enable_is_correction")
    assert trained(monitor, tmp_path).corrected == [False, True, True]
    service.wait_for(lambda: any(ack.state == "done" for _, ack in service.acks))


def test_stop_leaves_the_script_behind_the_steps_last_log(
    service: FakeService, make_monitor: Callable[..., Monitor], tmp_path: Path
) -> None:
    monitor = make_monitor()
    asked(monitor, "stop")
    with pytest.raises(adapter.StopAskedError):
        trained(monitor, tmp_path)
    assert [frame.step for frame in service.frames()] == [1]
    assert service.notices("finished")[0].data["status"] == "stopped"


def test_secrets_of_the_loggers_do_not_leave() -> None:
    assert "secret" not in repr(adapter.configuration(fake.make_config()))


def test_objects_of_another_kind_are_a_clear_error_and_without_a_url_nothing_is_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("FORESHOCK_URL", raising=False)
    with pytest.raises(TypeError, match="has no loggers"):
        adapter.attach(fake.Policy(), object(), fake.Checkpointer(), fake.make_config())
    policy, logger = fake.Policy(), fake.Logger()
    adapter.attach(policy, logger, fake.Checkpointer(), fake.make_config(), run="lab/x")
    assert logger.loggers == []
    assert "train" not in vars(policy)


def source(path: str) -> str:
    return ast.unparse(ast.parse((Path(HOME or "") / path).read_text()))


@real_source
def test_the_real_source_has_what_the_adapter_stands_on() -> None:
    stands_on = {
        "nemo_rl/algorithms/grpo.py": (
            "policy.train(train_data, loss_fn, timer=timer)", "step_finished=True", "prefix='train'",
            "prefix='validation'", "train_data['prev_logprobs'] = torch.zeros_like(",
            "'generation_logprobs': flat_messages['generation_logprobs']",
            "'token_mask': flat_messages['token_loss_mask']", "'sample_mask': repeated_batch['loss_multiplier']",
        ),
        "nemo_rl/utils/logger.py": (
            "self.loggers: list[LoggerInterface] = []",
            "logger.log_metrics(metrics, step, prefix, step_metric, step_finished)",
            "finish = getattr(logger, 'finish'",
        ),
        "nemo_rl/utils/checkpoint.py": (
            "def _rename_checkpoint(self, checkpoint_path: PathLike)", "self._rename_checkpoint(checkpoint_path)",
            "checkpoint_path.name.split('_')[2]", "self.save_optimizer",
        ),
        "nemo_rl/algorithms/loss/loss_functions.py": (
            "if self.use_importance_sampling_correction:", "self.force_on_policy_ratio",
            "prev_logprobs = None if self.force_on_policy_ratio else data['prev_logprobs'][:, 1:]",
        ),
        "nemo_rl/models/policy/lm_policy.py": ("'loss_fn': loss_fn",),
    }  # fmt: skip
    for path, pieces in stands_on.items():
        text = source(path)
        for piece in pieces:
            assert piece in text, (path, piece)
