"""The driver's half on a pipeline with ROLL's loop: `test_roll_real.py` holds that shape against ROLL's source."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foreshock.adapters.roll.driver import mixed_share, put_back, watch_groups, watched_pipeline
from foreshock.wire import Action, Command
from tests.fake_service import FakeService


class FakePipeline:
    """As RLVRPipeline: a loop over steps that skips what the record says is done, and a boundary at its end."""

    def __init__(self, pipeline_config: Any) -> None:
        self.pipeline_config = pipeline_config
        self.state = SimpleNamespace(step=-1, log_history=[], kv={})
        self.tracker = SimpleNamespace(log=lambda values, step: self.tracked.append(step))
        self.tracked: list[int] = []
        self.trained: list[int] = []
        self.asked: list[tuple[str, Any]] = []
        self.answer = "done"

        def foreshock_apply(kind: str, arguments: Any) -> list[tuple[str, Any]]:
            self.asked.append((kind, arguments))
            return [("done", {"scope": ["weights"]}), (self.answer, {"reason": "rank 1 says no"})]

        self.actor_train = SimpleNamespace(foreshock_apply=foreshock_apply)
        self.between: Any = lambda step: None

    def run(self) -> str:
        for global_step in range(self.pipeline_config.max_steps):
            if global_step <= self.state.step:
                continue
            self.trained.append(global_step)
            self.state.step = global_step
            self.state.log_history.append({"system/step": global_step, "val_correct/all/mean": 0.5})
            self.between(global_step)
            self.do_checkpoint(global_step=global_step)
            self.tracker.log(values=self.state.log_history[-1], step=global_step)
        return "complete"

    def do_checkpoint(self, global_step: int, is_last_step: bool | None = None) -> None:
        return None


@pytest.fixture
def pipeline(service: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    environment = {
        "FORESHOCK_URL": service.url, "FORESHOCK_RUN": "lab/roll", "FORESHOCK_SPOOL_DIR": str(tmp_path / "spool"),
        "FORESHOCK_POLL_S": "0.2", "FORESHOCK_FINISH_S": "3",
    }  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    weight = SimpleNamespace(enabled=False, upper_bound=1.2)
    config = SimpleNamespace(
        max_steps=6, train_infer_correction=SimpleNamespace(is_weight=weight), async_pipeline=False
    )
    made = watched_pipeline(FakePipeline)(config)
    yield made
    made._foreshock.monitor.end("completed", None, 0.2)


def command_at(pipeline: Any, service: FakeService, step: int, action: Action) -> None:
    """The service asks at a step, and the loop waits until the poller has won its acceptance."""

    asked: list[int] = []

    def between(now: int) -> None:
        if now == step and not asked:
            asked.append(now)
            service.commands = [Command(id="c1", run="lab/roll", attempt=1, actions=[action], at_step=step)]
            service.wait_for(lambda: any(ack.state == "accepted" for _, ack in service.acks))
            service.wait_for(lambda: len(pipeline._foreshock.monitor._process.inbox))

    pipeline.between = between


def finished(service: FakeService) -> str:
    service.wait_for(lambda: service.notices("finished"))
    return str(service.notices("finished")[-1].data["status"])


def test_without_commands_the_loop_is_rolls_own(pipeline: Any, service: FakeService) -> None:
    assert pipeline.run() == "complete"
    assert pipeline.trained == pipeline.tracked == [0, 1, 2, 3, 4, 5]
    assert finished(service) == "completed"
    assert service.frames()[0].scalars["reward.validation"] == 0.5


def test_rollback_rewinds_the_loop_and_begins_an_attempt(pipeline: Any, service: FakeService) -> None:
    arguments = {"checkpoint": "/models/checkpoint-1", "step": 1}
    command_at(pipeline, service, 3, Action(kind="rollback", arguments=arguments))
    assert pipeline.run() == "complete"
    assert pipeline.asked == [("rollback", arguments), ("finish", {"status": "completed"})]
    assert pipeline.trained == pipeline.tracked == [0, 1, 2, 3, 2, 3, 4, 5]
    assert [m["system/step"] for m in pipeline.state.log_history] == [0, 1, 2, 3, 4, 5]
    assert finished(service) == "completed"
    assert [frame.generation for frame in service.frames()] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_stop_leaves_the_loop_after_its_checkpoint(pipeline: Any, service: FakeService) -> None:
    command_at(pipeline, service, 2, Action(kind="stop"))
    assert pipeline.run() is None
    assert pipeline.trained == pipeline.tracked == [0, 1, 2]
    assert finished(service) == "stopped"


def test_correction_turns_the_drivers_switch_too(pipeline: Any, service: FakeService) -> None:
    command_at(pipeline, service, 2, Action(kind="enable_is_correction", arguments={"cap": 1.5}))
    pipeline.run()
    assert pipeline.pipeline_config.train_infer_correction.is_weight == SimpleNamespace(enabled=True, upper_bound=1.5)


def test_what_one_worker_refuses_is_refused(pipeline: Any, service: FakeService) -> None:
    pipeline.answer = "refused"
    command_at(pipeline, service, 2, Action(kind="rollback", arguments={"checkpoint": "/models/checkpoint-1"}))
    assert pipeline.run() == "complete"
    assert pipeline.trained == [0, 1, 2, 3, 4, 5]
    service.wait_for(lambda: any(ack.state == "refused" for _, ack in service.acks))


def test_an_asynchronous_pipeline_announces_no_rollback(service: FakeService, tmp_path: Path, pipeline: Any) -> None:
    assert "rollback" in pipeline._foreshock.monitor.kinds()
    config = SimpleNamespace(max_steps=1, async_pipeline=True)
    other = watched_pipeline(FakePipeline)(config)
    assert "rollback" not in other._foreshock.monitor.kinds()
    assert "stop" in other._foreshock.monitor.kinds()
    other._foreshock.monitor.end("completed", None, 0.2)


def test_groups_are_read_where_they_are_normalised(pipeline: Any, service: FakeService) -> None:
    prompts = torch.arange(8).repeat_interleave(4)[:, None].repeat(1, 3)
    assert mixed_share(SimpleNamespace(batch={"prompts": prompts}), 4) == 0.0
    assert mixed_share(SimpleNamespace(batch={"prompts": prompts.roll(1, 0)}), 4) == 1.0
    module = SimpleNamespace(reward_postprocess=lambda data, config, running: "normalised")
    watch_groups(module, lambda: pipeline._foreshock)
    infer = SimpleNamespace(generating_args=SimpleNamespace(num_return_sequences=4))
    config = SimpleNamespace(adv_estimator="grpo", actor_infer=infer)
    data = SimpleNamespace(batch={"prompts": prompts.roll(1, 0)})
    pipeline.between = lambda step: module.reward_postprocess(data, config, {})
    pipeline.run()
    service.wait_for(service.frames)
    assert service.frames()[0].scalars["group.mixed"] == 1.0
    assert module.reward_postprocess(data, config, {}) == "normalised"


class Rows(SimpleNamespace):
    """As DataProto: `reorder` moves every row of every tensor, in place."""

    def reorder(self, indices: torch.Tensor) -> None:
        self.batch = {name: rows[indices] for name, rows in self.batch.items()}


def rows_by_length() -> Rows:
    """Eight prompts × four answers, sorted by length as ROLL's dynamic batching leaves them."""
    prompts = torch.arange(8).repeat_interleave(4)[:, None].repeat(1, 3)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(1))
    return Rows(batch={"prompts": prompts[order], "row": order})


def test_rows_of_a_prompt_are_put_back_beside_each_other_in_their_order() -> None:
    data = rows_by_length()
    before = data.batch["row"].tolist()
    assert mixed_share(data, 4) == 1.0
    assert put_back(data, 4)
    assert mixed_share(data, 4) == 0.0
    assert (data.batch["row"] // 4 == data.batch["prompts"][:, 0]).all()
    for prompt in range(8):
        mine = [row for row in data.batch["row"].tolist() if row // 4 == prompt]
        assert mine == [row for row in before if row // 4 == prompt]
    assert not put_back(data, 4)


def test_rows_are_left_alone_where_a_prompt_has_lost_some() -> None:
    data = rows_by_length()
    data.batch = {name: rows[:-4] for name, rows in data.batch.items()}
    kept = data.batch["row"].clone()
    assert not put_back(data, 4)
    assert torch.equal(kept, data.batch["row"])


@pytest.mark.parametrize(("said", "mixed"), [("exact", 0.0), ("observe", 1.0)])
def test_exact_puts_rows_back_before_groups_are_formed_and_says_so_once(
    said: str, mixed: float, pipeline: Any, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORESHOCK_ROLL_ON_POLICY", said)
    made = watched_pipeline(FakePipeline)(pipeline.pipeline_config)
    seen: list[float] = []

    def reward_postprocess(data: Any, config: Any, running: Any) -> None:
        seen.append(mixed_share(data, 4))

    module = SimpleNamespace(reward_postprocess=reward_postprocess)
    watch_groups(module, lambda: made._foreshock)
    infer = SimpleNamespace(generating_args=SimpleNamespace(num_return_sequences=4))
    config = SimpleNamespace(adv_estimator="grpo", actor_infer=infer)
    made.between = lambda step: module.reward_postprocess(rows_by_length(), config, {})
    made.run()
    assert seen == [mixed] * 6
    service.wait_for(lambda: len(service.frames()) == 6)
    assert {frame.scalars["group.mixed"] for frame in service.frames()} == {mixed}
    notes = [n.data["text"] for n in service.notices("note")]
    assert len(notes) == (said == "exact")


def test_another_kind_of_class_is_named() -> None:
    with pytest.raises(TypeError, match="has no run"):
        watched_pipeline(object)
