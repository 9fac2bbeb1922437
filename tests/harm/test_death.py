"""Processes that fork, exit, crash and are killed: what they sealed arrives once, and nobody waits long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from foreshock.monitor import Monitor
from foreshock.wire import Frame
from tests.fake_service import FakeService, Request

MakeMonitor = Callable[..., Monitor]
HOST = """
import os, sys, time
import foreshock
url, spool = sys.argv[1:3]
monitor = foreshock.init(run="lab/x", url=url, spool_dir=spool, launch="first", backoff_s=0.02, backoff_max_s=0.1)
for step in range(5):
    monitor.log({"reward.mean": float(step)})
    monitor.end_step(step)
"""


def host(service: FakeService, spool: Path, rest: str, **environment: str) -> subprocess.Popen[str]:
    """A training process of its own: five steps, then `rest`."""
    return subprocess.Popen(
        [sys.executable, "-c", HOST + rest, service.url, str(spool)],
        env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def out(process: subprocess.Popen[str], seconds: float = 20.0) -> tuple[int, str, str]:
    stdout, stderr = process.communicate(timeout=seconds)
    return process.returncode, stdout, stderr


def away(request: Request) -> bool:
    request.answer(503, b"")
    return True


def test_a_script_that_just_ends_has_sent_everything_and_said_goodbye(service: FakeService, tmp_path: Path) -> None:
    code, _, errors = out(host(service, tmp_path / "spool", ""))
    assert (code, errors) == (0, "")
    assert service.steps() == [0, 1, 2, 3, 4]
    assert [notice.data["status"] for notice in service.notices("finished")] == ["completed"]
    assert not (tmp_path / "spool").exists(), "nothing touched the disk"


def test_a_script_that_raises_says_that_it_crashed(service: FakeService, tmp_path: Path) -> None:
    code, _, errors = out(host(service, tmp_path / "spool", "raise RuntimeError('CUDA out of memory')"))
    assert code == 1
    assert "CUDA out of memory" in errors
    assert service.steps() == [0, 1, 2, 3, 4]
    assert [notice.data["status"] for notice in service.notices("finished")] == ["crashed"]


def test_exit_is_bounded_when_the_service_hangs_and_the_successor_sends_the_rest(
    service: FakeService, tmp_path: Path, make_monitor: MakeMonitor
) -> None:
    service.misbehave = lambda request: not time.sleep(30.0)
    process = host(service, tmp_path / "spool", "print(time.monotonic(), flush=True)", FORESHOCK_EXIT_FLUSH_S="0.3")
    code, printed, errors = out(process)
    assert (code, errors.count("Traceback")) == (0, 0)
    assert time.monotonic() - float(printed) < 4.0
    service.misbehave = None
    make_monitor(launch="second").end_step(0)
    service.wait_for(lambda: len(service.frames()) == 6)
    by_launch = {envelope.client: envelope.launch for envelope in service.envelopes}
    assert sorted(by_launch.values()) == ["first", "second"]


def test_a_killed_process_loses_nothing_that_it_had_spooled(
    service: FakeService, tmp_path: Path, make_monitor: MakeMonitor
) -> None:
    service.misbehave = away
    process = host(service, tmp_path / "spool", "time.sleep(0.5); print('spooled', flush=True); time.sleep(60)")
    assert process.stdout is not None
    assert process.stdout.readline() == "spooled\n"
    process.send_signal(signal.SIGKILL)
    out(process)
    service.misbehave = None
    monitor = make_monitor(launch="second")
    monitor.end_step(100)
    service.wait_for(lambda: len(service.frames()) == 6)
    old = [frame for frame in service.frames() if frame.step < 100]
    assert [frame.step for frame in old] == [0, 1, 2, 3, 4]
    adopted = next(e for e in service.envelopes if e.launch == "first")
    assert adopted.sent_s is not None, "the same boot: the age is known"
    assert not adopted.controller
    monitor.finish()
    assert list((tmp_path / "spool").iterdir()) == []


def test_a_spool_of_another_boot_comes_without_an_age(
    service: FakeService, tmp_path: Path, make_monitor: MakeMonitor
) -> None:
    service.misbehave = away
    out(host(service, tmp_path / "spool", "", FORESHOCK_EXIT_FLUSH_S="0.1"))
    (folder,) = (tmp_path / "spool").iterdir()
    header = folder / "header.json"
    header.write_text(header.read_text().replace('"boot":"', '"boot":"another-'))
    service.misbehave = None
    make_monitor(launch="second").end_step(100)
    service.wait_for(lambda: len(service.frames()) == 6)
    assert next(e for e in service.envelopes if e.launch == "first").sent_s is None


def test_a_living_clients_spool_is_left_alone_and_so_is_another_runs(
    service: FakeService, tmp_path: Path, make_monitor: MakeMonitor
) -> None:
    service.misbehave = away
    alive = make_monitor()
    alive.end_step(0)
    out(host(service, tmp_path / "spool", "", FORESHOCK_EXIT_FLUSH_S="0.1"))
    folders = sorted((tmp_path / "spool").iterdir())
    assert len(folders) == 2
    other = make_monitor(run="lab/other", finish_s=0.1)
    other.end_step(0)
    other.finish()
    assert set(folders) <= set((tmp_path / "spool").iterdir())


def test_a_forked_child_is_a_client_of_its_own_and_the_parent_goes_on(
    service: FakeService, make_monitor: MakeMonitor
) -> None:
    monitor = make_monitor()
    monitor.log({"loss": 1.0})
    monitor.end_step(0)
    service.wait_for(lambda: service.steps() == [0])
    monitor.log({"loss": 7.0})
    parent = monitor.client
    child = os.fork()
    if child == 0:
        code = 1
        try:
            monitor.log({"reward.mean": 2.0})
            monitor.end_step(1)
            monitor.finish()
            code = 0 if monitor.client != parent else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    monitor.end_step(1)
    service.wait_for(lambda: len(service.frames()) == 3)
    by_client: dict[str, list[Frame]] = {}
    for (client, _), item in service.items.items():
        if isinstance(item, Frame):
            by_client.setdefault(client, []).append(item)
    assert [dict(f.scalars) for f in by_client.pop(parent)] == [{"loss": 1.0}, {"loss": 7.0}]
    ((childs,),) = by_client.values()
    assert childs.scalars == {"reward.mean": 2.0}, "the parent's half step stays the parent's"
    assert [e.controller for e in service.envelopes if e.client != parent] == [False] * (
        len(service.envelopes) - sum(e.client == parent for e in service.envelopes)
    )


def test_a_fork_in_the_middle_of_an_outage_leaves_the_parents_spool_to_the_parent(
    service: FakeService, tmp_path: Path, make_monitor: MakeMonitor
) -> None:
    service.misbehave = away
    monitor = make_monitor()
    for step in range(20):
        monitor.end_step(step)
        if step % 5 == 2:
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)
    service.misbehave = None
    service.wait_for(lambda: len(service.frames()) == 20)
    assert service.steps() == list(range(20))
    assert monitor.losses.counts() == {}


def test_children_of_multiprocessing_send_before_they_leave(service: FakeService, tmp_path: Path) -> None:
    rest = """
import multiprocessing
def work():
    monitor.log({"reward.mean": 9.0})
    monitor.end_step(77)
child = multiprocessing.get_context("fork").Process(target=work)
child.start(); child.join(); print(child.exitcode)
"""
    code, printed, errors = out(host(service, tmp_path / "spool", rest))
    assert (code, printed.strip(), errors) == (0, "0", "")
    assert sorted(service.steps()) == [0, 1, 2, 3, 4, 77]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_sender_is_started_again(service: FakeService, make_monitor: MakeMonitor) -> None:
    monitor = make_monitor(heartbeat_s=0.05)
    monitor.end_step(0)
    service.wait_for(lambda: service.steps() == [0])
    sender = monitor._process.sender
    assert sender is not None
    first = sender._thread
    assert first is not None
    sender._turn, turn = sys.exit, sender._turn  # type: ignore[method-assign, misc]
    first.join(5.0)
    assert not first.is_alive()
    sender._turn = turn  # type: ignore[method-assign]
    monitor.end_step(1)
    service.wait_for(lambda: service.steps() == [0, 1])


def test_a_second_finish_and_calls_after_it_do_nothing(service: FakeService, make_monitor: MakeMonitor) -> None:
    monitor = make_monitor()
    monitor.end_step(0)
    monitor.finish()
    monitor.finish("failed")
    monitor.log({"loss": 1.0})
    monitor.end_step(1)
    assert list(monitor.commands()) == []
    assert service.steps() == [0]
    assert len(service.notices("finished")) == 1
