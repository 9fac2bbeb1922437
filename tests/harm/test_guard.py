"""Our own errors never reach the loop, the host's always do; a collector that keeps failing switches itself off."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import foreshock
from foreshock.monitor import Monitor
from tests.fake_service import FakeService

MakeMonitor = Callable[..., Monitor]


def broken(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("a bug of ours")


@pytest.mark.parametrize("place", ["foreshock.frames.builder.StepBuilder.observe",
                                   "foreshock.frames.scalars.Scalars.add",
                                   "foreshock.frames.builder.StepBuilder.seal",
                                   "foreshock.transport.sender.Sender.put",
                                   "foreshock.stats.pair.PairAccumulator.observe"])  # fmt: skip
def test_an_error_at_every_call_never_reaches_the_loop_and_switches_off(
    place: str, make_monitor: MakeMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = make_monitor(raise_errors=False, guard_limit=5)
    monkeypatch.setattr(place, broken)
    a = torch.zeros(2, 3)
    for step in range(10):
        monitor.observe("policy", a=a, b=a, mask=torch.ones(2, 3))
        monitor.log({"loss": 1.0})
        monitor.checkpoint("/tmp/x", step)
        monitor.notice("note", text="x")
        monitor.end_step(step)
        assert list(monitor.commands()) == []
    assert monitor.guard.errors == 5
    assert monitor.guard.off


def test_the_service_is_told_that_the_collector_switched_itself_off(
    service: FakeService, make_monitor: MakeMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = make_monitor(raise_errors=False, guard_limit=3)
    monkeypatch.setattr(monitor._builder.scalars, "add", broken)
    for _ in range(5):
        monitor.log({"loss": 1.0})
    service.wait_for(lambda: any("switched itself off" in n.data["text"] for n in service.notices("note")))
    monitor.finish()
    assert len(service.notices("finished")) == 1


def test_an_error_is_logged_once(make_monitor: MakeMonitor, caplog: pytest.LogCaptureFixture) -> None:
    monitor = make_monitor(raise_errors=False)
    for _ in range(10):
        monitor.observe("no such pair", a=1, b=2, mask=3)
    assert monitor.guard.errors == 10
    assert sum("observe failed" in record.message for record in caplog.records) == 1


def test_in_tests_the_guard_raises(make_monitor: MakeMonitor) -> None:
    monitor = make_monitor()
    with pytest.raises(ValueError, match="unknown pair"):
        monitor.observe("no such pair", a=1, b=2, mask=3)


def test_what_a_thread_met_is_raised_at_the_next_call_in_tests(
    service: FakeService, make_monitor: MakeMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = make_monitor()
    monkeypatch.setattr("foreshock.frames.builder.SealedStep.build", broken)
    monitor.end_step(0)
    service.wait_for(lambda: monitor.losses.counts() == {"unencodable": 1})
    with pytest.raises(ZeroDivisionError):
        monitor.log({"loss": 1.0})


def test_the_hosts_own_exceptions_pass(make_monitor: MakeMonitor) -> None:
    def collective(_: Any) -> Any:
        raise RuntimeError("NCCL timed out")

    monitor = make_monitor(raise_errors=False, broadcast=collective)
    with pytest.raises(RuntimeError, match="NCCL timed out"):
        monitor.end_step(0)


def test_wrong_shapes_spoil_their_pair_and_leave_the_rest(service: FakeService, make_monitor: MakeMonitor) -> None:
    monitor = make_monitor(raise_errors=False)
    good = torch.zeros(2, 3)
    monitor.observe("mismatch", a=good, b=good, mask=torch.ones(2, 3))
    monitor.observe("policy", a=good, b=torch.zeros(4, 3), mask=torch.ones(2, 3))
    monitor.end_step(0)
    service.wait_for(lambda: service.steps() == [0])
    frame = service.frames()[0]
    assert set(frame.pairs) == {"mismatch"}
    assert frame.missing == {"policy": "not_reported"}


def train(**arguments: Any) -> bytes:
    """A small real loop; the bytes of all that it leaves behind: parameters and the state of every generator."""
    torch.manual_seed(3)
    random.seed(3)
    numpy.random.seed(3)
    monitor = foreshock.init(run="lab/x", **arguments)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(20):
        logp = model(torch.randn(4, 8)).log_softmax(-1)
        old, mask = logp.detach() + 0.01 * torch.randn(4, 8), torch.rand(4, 8) > 0.2
        monitor.observe("policy", a=logp, b=old, mask=mask, advantages=torch.randn(4), versions=[0, 1, 1, 2])
        loss = -(logp * torch.randn(4, 8)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.log({"loss": loss, "grad.norm": numpy.float32(1.0), "x": random.random(), "y": numpy.random.rand()})
        monitor.end_step(step)
    monitor.finish()
    states = (torch.get_rng_state().numpy().tobytes(), repr(random.getstate()), repr(numpy.random.get_state()))
    return repr((*(p.detach().numpy().tobytes() for p in model.parameters()), *states)).encode()


def test_the_host_ends_bit_for_bit_the_same_with_and_without(service: FakeService, tmp_path: Path) -> None:
    assert train(url=service.url, spool_dir=str(tmp_path)) == train()
    assert len(service.frames()) == 20
    assert service.frames()[-1].pairs["policy"].tokens > 0


def test_without_a_url_everything_is_a_no_op_and_torch_is_not_imported() -> None:
    script = """
        import sys, threading
        import foreshock
        monitor = foreshock.init(run="lab/x")
        monitor.on("rollback", lambda command: None)
        monitor.observe("policy", a=object(), b=object(), mask=None)
        monitor.log({"loss": object()})
        monitor.checkpoint("/tmp/x", 1)
        monitor.end_step(1)
        assert list(monitor.commands()) == []
        monitor.new_attempt("x")
        monitor.finish()
        assert "torch" not in sys.modules
        assert threading.active_count() == 1
    """
    environment = {k: v for k, v in os.environ.items() if k != "FORESHOCK_URL"}
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=30, env=environment)


def test_a_wrong_argument_is_an_error_at_the_start(make_monitor: MakeMonitor) -> None:
    for wrong in ({"run": "a/b/c"}, {"mode": "yolo"}, {"capabilities": ["fly"]}, {"timeout_s": "soon"}, {"speed": 1},
                  {"url": "ftp://x"}, {"role": "boss"}, {"rank": 3, "world": 2}, {"launch": "a b"}):  # fmt: skip
        with pytest.raises(ValueError, match=r"."):
            make_monitor(**wrong)
    with pytest.raises(ValueError, match="unknown command kind"):
        foreshock.init(run="x").on("fly", lambda command: None)
