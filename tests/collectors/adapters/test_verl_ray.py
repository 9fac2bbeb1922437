"""The driver's way to its workers on real Ray: verl's colocated worker group, two workers, no GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from omegaconf import OmegaConf

from foreshock.adapters.verl import worker
from foreshock.adapters.verl.workers import Workers
from tests.fake_service import FakeService

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing verl warns
    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import Dispatch, register
    from verl.single_controller.ray import (
        RayClassWithInitArgs,
        RayResourcePool,
        RayWorkerGroup,
        create_colocated_worker_cls,
    )

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(240)]


def toy() -> type:
    """A worker with the members that `watch` stands on; defined here so that Ray ships it by value."""

    class Toy(Worker):
        def __init__(self, config: Any) -> None:
            super().__init__()
            from types import SimpleNamespace

            rank = self.rank
            engine = SimpleNamespace(
                is_mp_src_rank_with_outputs=lambda: True, get_data_parallel_rank=lambda: rank,
                get_data_parallel_size=lambda: 2, optimizer=SimpleNamespace(param_groups=[{"lr": 0.1}]),
                optimizer_step=lambda: 1.0,
            )  # fmt: skip
            self.actor = SimpleNamespace(engine=engine, train_mini_batch=lambda data: data)
            self.config = config

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def twice(self, value: int) -> int:
            return 2 * value

    return Toy


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    inner = RayClassWithInitArgs(cls=ray.remote(toy()), config=OmegaConf.create({"rollout": {"name": "vllm"}}))
    made = RayWorkerGroup(
        resource_pool=RayResourcePool(process_on_nodes=[2], use_gpu=False, max_colocate_count=1),
        ray_cls_with_init=create_colocated_worker_cls({"actor_rollout": inner}),
        device_name="cpu",
    )
    yield made.spawn(prefix_set={"actor_rollout"})["actor_rollout"]
    ray.shutdown()


def test_each_worker_answers_and_its_frames_arrive(group: Any, service: FakeService) -> None:
    assert group.twice(4) == [8, 8], "verl's own calls work"
    workers = Workers(group)
    note = {"run": "lab/x", "launch": "one", "bypass": False, "settings": {"url": service.url}}
    answers = workers.ask(worker.watch, note)
    assert answers == [{"rank": 0, "scale_lr": True}, {"rank": 1, "scale_lr": True}]
    assert workers.ask(worker.scale, {"factor": 0.5}) == [{"lr_factor": 0.5}] * 2
    workers.tell(worker.seal, 7)
    workers.ask(worker.finish, "completed")
    assert workers.failures() == []
    service.wait_for(lambda: len(service.frames()) == 2)
    assert {(frame.role, frame.rank, frame.step) for frame in service.frames()} == {
        ("trainer", 0, 7),
        ("trainer", 1, 7),
    }


def test_what_fails_in_the_background_is_found_at_the_next_look(group: Any) -> None:
    workers = Workers(group)
    workers.tell(worker.scale, None)
    workers.ask(worker.scale, {"factor": 1.0})
    found = workers.failures()
    assert len(found) == 2
    assert "AttributeError" in str(found[0])
