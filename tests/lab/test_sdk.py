"""The lab through the real SDK over real HTTP, against a service that takes frames and hands out commands."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from foreshock.monitor import Monitor
from foreshock.stats.merge import statistics
from foreshock.wire.commands import Action, Command
from lab.train import CAPABILITIES, Job, RunConfig
from tests.fake_service import FakeService, make_monitor, service

__all__ = ["make_monitor", "service"]


def test_what_arrives_is_what_the_trainer_measured(
    service: FakeService, make_monitor: Callable[..., Monitor], tmp_path: Path
) -> None:
    config = RunConfig(steps=5, checkpoints=str(tmp_path / "c"))
    history = Job(config, make_monitor(capabilities=CAPABILITIES)).run().history
    service.wait_for(lambda: service.notices("finished"))
    frames = service.frames()
    assert [frame.step for frame in frames] == [1, 2, 3, 4, 5]
    for frame, entry in zip(frames, history, strict=True):
        assert frame.missing == {}
        for pair in ("policy", "update", "mismatch", "mismatch_current"):
            values = statistics(frame.pairs[pair]).values
            for name in ("kl_k2", "kl_k3", "abs_max", "logp_pearson"):
                assert values[name] == pytest.approx(entry[f"{pair}.{name}"], rel=1e-5, abs=1e-9), (pair, name)
        for name in ("reward.mean", "grad.norm", "length.mean", "weights.changed_share", "entropy.mean"):
            assert frame.scalars[name] == pytest.approx(entry[name])
    assert [notice.data["step"] for notice in service.notices("checkpoint")] == [0, 5]
    assert set(service.notices("started")[0].data["capabilities"]) == set(CAPABILITIES)


def test_a_rollback_from_the_service_is_carried_out_and_begins_an_attempt(
    service: FakeService, make_monitor: Callable[..., Monitor], tmp_path: Path
) -> None:
    job = Job(RunConfig(steps=8, checkpoints=str(tmp_path / "c")), make_monitor())
    path = str(tmp_path / "c" / "attempt-1" / "step-00005.pt")
    action = Action(kind="rollback", arguments={"checkpoint": path, "step": 5, "skip_until_step": 7})
    command = Command(id="r1", run="lab/x", attempt=1, actions=[action], at_step=7)
    asked = threading.Event()

    def ask() -> None:
        service.wait_for(lambda: 5 in service.steps(), 60.0)
        with service.changed:
            service.commands = [command]
            service.changed.notify_all()
        service.wait_for(lambda: ("r1", "accepted") in [(i, a.state) for i, a in service.acks])
        asked.set()

    thread = threading.Thread(target=ask)
    thread.start()
    monitor_end = job.monitor.end_step

    def end_step(step: int) -> None:
        if step == 7 and job.attempt == 1:  # the trainer is faster than the test's service
            assert asked.wait(60.0)
        monitor_end(step)

    job.monitor.end_step = end_step  # type: ignore[method-assign]
    result = job.run()
    thread.join()
    service.wait_for(lambda: service.notices("finished"))
    done = [ack for _, ack in service.acks if ack.state == "done"]
    assert [(ack.step, ack.detail["step"], ack.detail["data_position"]) for ack in done] == [(7, 5, 7)]
    steps = [(frame.generation, frame.step) for frame in service.frames()]
    assert steps == [(0, step) for step in range(1, 8)] + [(1, step) for step in (6, 7, 8)]
    assert [n.data["reason"] for n in service.notices("attempt")] == ["rollback"]
    assert (result.attempts, result.steps) == (2, 8)
