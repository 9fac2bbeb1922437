"""A real local Ray cluster: every rank carries out a command at one step, or none does; deaths and pauses included."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foreshock.wire import Action, Command
from tests.fake_service import FakeService

ray = pytest.importorskip("ray")
# Workers cannot import this file: what is of it travels with its code.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
WORLD = 3


class Worker:
    """A rank that trains until told otherwise, off the actor's main thread as real workers do."""

    def __init__(self, run: str, rank: int, url: str, spool: str) -> None:
        import threading

        import foreshock.ray

        self.rank = rank
        self.ran: list[tuple[str, int | None]] = []
        self.step = 0
        self.pace_s = 0.1 * (1 + rank)  # ranks are never at the same step
        self.monitor = foreshock.ray.join(
            run=run, rank=rank, world=3, url=url, spool_dir=spool, backoff_s=0.02, patience_s=15.0, raise_errors=False
        )
        self.monitor.on("scale_lr", self.scale, accepts=lambda a: "too small" if a.get("factor") == rank else "")
        self.monitor.on("rollback", self.note)
        self.monitor.on("checkpoint_now", self.die)
        self.monitor.on("pause", self.note)
        self.monitor.on("resume", self.note)
        self.training = threading.Thread(target=self.train, daemon=True)
        self.training.start()

    def note(self, command: Any) -> None:
        self.ran.append((command.id, command.step))

    def scale(self, command: Any) -> dict[str, float]:
        self.note(command)
        return {"lr": command.arguments["factor"]}

    def die(self, command: Any) -> None:
        import os

        if self.rank == command.arguments.get("rank"):
            os._exit(1)
        self.note(command)

    def train(self) -> None:
        import time

        while True:
            self.monitor.log({"reward.mean": 0.5})
            self.monitor.end_step(self.step)
            self.step += 1
            time.sleep(self.pace_s)

    def seen(self) -> tuple[list[tuple[str, int | None]], int, int, bool]:
        return self.ran, self.step, self.monitor.generation, self.monitor.paused


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=1, include_dashboard=False, configure_logging=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def job(cluster: None, service: FakeService, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    from foreshock.ray import Controller

    run = f"lab/{request.node.name[:40]}"
    spool = str(tmp_path / "spool")
    controller = Controller.start(
        run, WORLD, url=service.url, spool_dir=spool, backoff_s=0.02, poll_s=1.0, patience_s=15.0, raise_errors=False
    )
    client = ray.get(controller.client.remote(), timeout=60)
    actor = ray.remote(num_cpus=0, max_concurrency=4)(Worker)
    workers = [actor.remote(run, rank, service.url, spool) for rank in range(WORLD)]
    ray.get([worker.seen.remote() for worker in workers], timeout=60)
    service.wait_for(
        lambda: any(n.data["controller"] and "resume" in n.data["capabilities"] for n in service.notices("started")), 30
    )
    yield run, client, workers
    for handle in (*workers, controller):
        ray.kill(handle)


def issue(service: FakeService, run: str, kind: str, name: str, attempt: int = 1, **arguments: Any) -> None:
    with service.changed:
        action = Action(kind=kind, arguments=arguments)
        service.commands = [Command(id=name, run=run, attempt=attempt, actions=[action])]
        service.changed.notify_all()


def answer(service: FakeService, name: str, seconds: float = 60.0) -> Any:
    def final() -> list[Any]:
        return [ack for one, ack in service.acks if one == name and ack.state != "accepted"]

    service.wait_for(final, seconds)
    return final()[0]


def test_every_rank_carries_it_out_at_the_same_step_and_the_controller_answers_once(
    job: Any, service: FakeService
) -> None:
    run, client, workers = job
    issue(service, run, "scale_lr", "c1", factor=0.5)
    ack = answer(service, "c1")
    assert (ack.state, ack.client) == ("done", client), ack.detail
    assert ack.detail == {"lr": 0.5}
    ran = [ray.get(worker.seen.remote())[0] for worker in workers]
    assert {len(one) for one in ran} == {1}
    assert len({one[0] for one in ran}) == 1, "the same command at the same step"
    assert ran[0][0][1] == ack.step
    assert [n for n, a in service.acks if a.state == "accepted"] == ["c1"]


def test_a_rank_that_refuses_keeps_all_of_them_from_it(job: Any, service: FakeService) -> None:
    run, _, workers = job
    issue(service, run, "scale_lr", "c1", factor=2)
    ack = answer(service, "c1")
    assert (ack.state, ack.detail) == ("refused", {"reason": "not all ranks accept", "ranks": {"2": "too small"}})
    before = [ray.get(worker.seen.remote()) for worker in workers]
    assert [one[0] for one in before] == [[], [], []]
    time.sleep(1.5)
    after = [ray.get(worker.seen.remote()) for worker in workers]
    assert all(b[1] > a[1] for a, b in zip(before, after, strict=True)), "and all train on"


def test_a_dead_rank_means_refused_before_and_failed_after_the_decision(job: Any, service: FakeService) -> None:
    run, _, workers = job
    issue(service, run, "checkpoint_now", "c1", rank=1)
    ack = answer(service, "c1")
    assert ack.state == "failed", ack.detail
    assert ack.detail["ranks"]["1"]["state"] == "lost"
    issue(service, run, "scale_lr", "c2", factor=0.5)
    ack = answer(service, "c2")
    assert (ack.state, ack.detail["ranks"]) == ("refused", {"1": "did not answer"})
    for worker in (workers[0], workers[2]):
        ran, step, _, _ = ray.get(worker.seen.remote())
        assert [name for name, _ in ran] == ["c1"]
        time.sleep(1.5)
        assert ray.get(worker.seen.remote())[1] > step


def test_a_rollback_begins_a_new_attempt_on_every_rank_and_the_next_command_is_of_that(
    job: Any, service: FakeService
) -> None:
    run, _, workers = job
    issue(service, run, "rollback", "c1")
    ack = answer(service, "c1")
    assert (ack.state, ack.detail) == ("done", {})
    service.attempt = 2
    service.wait_for(lambda: len({n.data.get("command") for n in service.notices("attempt")}) == 1)
    assert [ray.get(worker.seen.remote())[2] for worker in workers] == [1, 1, 1]
    issue(service, run, "scale_lr", "c2", attempt=2, factor=0.5)
    assert answer(service, "c2").state == "done"


def test_a_pause_holds_all_and_resume_frees_them(job: Any, service: FakeService) -> None:
    run, _, workers = job
    issue(service, run, "pause", "c1")
    ack = answer(service, "c1")
    assert (ack.state, ack.detail) == ("done", {})
    time.sleep(0.3)
    held = [ray.get(worker.seen.remote()) for worker in workers]
    assert all(one[3] for one in held)
    assert len({one[1] for one in held}) == 1, "at the same boundary"
    issue(service, run, "resume", "c2")
    assert answer(service, "c2").state == "done"
    time.sleep(1.5)
    assert all(ray.get(worker.seen.remote())[1] > held[0][1] for worker in workers)
