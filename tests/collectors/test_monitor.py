"""What the loop says is what the service gets."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from foreshock import Semantics
from foreshock.monitor import Monitor
from tests.fake_service import FakeService

MakeMonitor = Callable[..., Monitor]


def test_a_step_arrives_with_all_that_was_said_of_it(service: FakeService, make_monitor: MakeMonitor) -> None:
    monitor = make_monitor(config={"lr": 1e-6, "hf_token": "abc"}, mode="approve", capabilities=["stop"], token="t")
    a = torch.full((2, 3), -1.0)
    monitor.observe("policy", a=a, b=a - 0.1, mask=torch.ones(2, 3), clip_range=(0.2, 0.28))
    monitor.observe("mismatch", a=a, b=None)
    monitor.log({"reward.mean": 0.5})
    monitor.end_step(3)
    service.wait_for(lambda: service.steps() == [3])
    (frame,) = service.frames()
    record = frame.pairs["policy"]
    assert (record.tokens, record.clip_tokens, record.clip_high) == (6, 6, 0)
    assert frame.missing == {"mismatch": "no_rollout_logprobs"}
    assert frame.scalars == {"reward.mean": 0.5}
    (started,) = service.notices("started")
    assert started.data == {
        "config": {"lr": 1e-6, "hf_token": "[redacted]"}, "capabilities": ["stop"], "mode": "approve",
        "controller": True, "world": 1,
    }  # fmt: skip
    envelope = service.envelopes[0]
    assert (envelope.run, envelope.launch, envelope.role, envelope.rank) == ("lab/x", "one", "trainer", 0)
    assert envelope.sdk.startswith("python-")


def test_only_the_controller_speaks_of_the_runs_mode(service: FakeService, make_monitor: MakeMonitor) -> None:
    make_monitor(role="rollout").end_step(1)
    service.wait_for(lambda: service.notices("started"))
    assert service.notices("started")[0].data["mode"] is None


@pytest.mark.parametrize(("clip", "high"), [((0.2, 0.28), 0), ((0.8, 1.28), 0), ((0.05, 0.05), 6), ((0.9, 1.05), 6)])
def test_a_clip_range_is_taken_as_bounds_or_as_epsilons(
    clip: tuple[float, float], high: int, service: FakeService, make_monitor: MakeMonitor
) -> None:
    monitor = make_monitor()
    a = torch.full((2, 3), -1.0)
    monitor.observe("policy", a=a, b=a - 0.1, mask=torch.ones(2, 3), clip_range=clip)
    monitor.end_step(0)
    service.wait_for(lambda: service.steps() == [0])
    assert service.frames()[0].pairs["policy"].clip_high == high


def test_sequences_rise_by_one_over_frames_and_notices(service: FakeService, make_monitor: MakeMonitor) -> None:
    monitor = make_monitor()
    for step in range(3):
        monitor.checkpoint(f"/ckpt/{step}", step, scope=["weights", "rng"])
        monitor.notice("settings", lr=1e-6)
        monitor.end_step(step)
    monitor.finish("stopped", detail="by hand")
    assert [item.sequence for item in service._in_order()] == list(range(1, 12))
    assert service.notices("finished")[0].data == {"status": "stopped", "detail": "by hand"}
    assert service.notices("checkpoint")[0].data == {"path": "/ckpt/0", "step": 0, "scope": ["weights", "rng"]}


def test_a_checkpoint_carries_the_last_validation(service: FakeService, make_monitor: MakeMonitor) -> None:
    monitor = make_monitor()
    monitor.log({"reward.validation": 0.75})
    monitor.end_step(0)
    monitor.checkpoint("/a", 0)
    monitor.checkpoint("/b", 0, reward=0.5)
    service.wait_for(lambda: len(service.notices("checkpoint")) == 2)
    assert [notice.data["reward"] for notice in service.notices("checkpoint")] == [0.75, 0.5]


def test_odd_scalars_are_counted_in_the_envelope_and_told_once(service: FakeService, make_monitor: MakeMonitor) -> None:
    monitor = make_monitor()
    for step in range(3):
        monitor.log({"two words": 1.0, "loss": "high", "lr": 1.0})
        monitor.end_step(step)
    service.wait_for(lambda: service.losses.get(monitor.client) == {"invalid_signal": 6})
    (note,) = service.notices("note")
    assert "'two words': not a signal name" in note.data["text"]
    assert "'loss': not a number but str" in note.data["text"]


def test_streams_that_differ_are_told_once(service: FakeService, make_monitor: MakeMonitor) -> None:
    monitor = make_monitor()
    a = torch.zeros(1, 2)
    said = {"a": Semantics(temperature=1.0), "b": Semantics(temperature=0.6)}
    for step in range(3):
        monitor.observe("mismatch", a=a, b=a, mask=torch.ones(1, 2), semantics=said)
        monitor.end_step(step)
    service.wait_for(lambda: len(service.frames()) == 3)
    assert [frame.missing for frame in service.frames()] == [{"mismatch": "semantics_differ"}] * 3
    assert len(service.notices("note")) == 1


def test_steps_may_go_backwards_and_attempts_begin_by_hand(service: FakeService, make_monitor: MakeMonitor) -> None:
    monitor = make_monitor()
    monitor.new_attempt("before anything")
    for step in (5, 3):
        monitor.end_step(step)
    monitor.log({"loss": 1.0})
    monitor.new_attempt("restored by hand")
    monitor.new_attempt("again")
    monitor.end_step(3)
    service.wait_for(lambda: len(service.frames()) == 3)
    assert [(frame.step, frame.generation) for frame in service.frames()] == [(5, 0), (3, 0), (3, 1)]
    assert [notice.data for notice in service.notices("attempt")] == [{"reason": "restored by hand"}]
    assert service.frames()[2].scalars == {}, "a half step ends with its attempt"


def test_the_token_travels_in_the_header_only(service: FakeService, make_monitor: MakeMonitor) -> None:
    seen: list[tuple[str | None, bytes]] = []

    def look(request: object) -> bool:
        seen.append((request.headers.get("Authorization"), request.body))  # type: ignore[attr-defined]
        return False

    service.misbehave = look
    make_monitor(token="s3cret-t0ken", config={"x": 1}).end_step(0)
    service.wait_for(lambda: service.steps() == [0])
    assert {header for header, _ in seen} == {"Bearer s3cret-t0ken"}
    assert not any(b"s3cret" in body for _, body in seen)
