"""Spools that cannot be written, are full, or damaged: memory takes over, the oldest go, and the counts say why."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from foreshock.monitor import Monitor
from foreshock.transport import clock
from tests.fake_service import FakeService, Request

MakeMonitor = Callable[..., Monitor]


def away(request: Request) -> bool:
    request.answer(503, b"")
    return True


def run(monitor: Monitor, steps: int, padding: int = 1) -> None:
    """As slowly as the sender takes the steps."""
    for step in range(steps):
        monitor.log({f"padding_{i}": float(step) for i in range(padding)})
        monitor.end_step(step)
        assert monitor._process.sender is not None
        deadline = time.monotonic() + 5.0
        while monitor._process.sender._items:
            assert time.monotonic() < deadline
            time.sleep(0.001)


@pytest.mark.parametrize("obstacle", ["a file", "a symbolic link", "a path below a file"])
def test_an_unwritable_spool_leaves_memory_and_counts_what_it_could_not_hold(
    obstacle: str, service: FakeService, make_monitor: MakeMonitor, tmp_path: Path
) -> None:
    spool = tmp_path / "blocked"
    if obstacle == "a symbolic link":
        (tmp_path / "target").mkdir()
        spool.symlink_to(tmp_path / "target")
    else:
        spool.write_text("not a folder")
    if obstacle == "a path below a file":
        spool = spool / "spool"
    service.misbehave = away
    monitor = make_monitor(spool_dir=str(spool), queue_items=10)
    run(monitor, 30)
    service.wait_for(lambda: sum(monitor.losses.counts().values()) == 21)
    service.misbehave = None
    service.wait_for(lambda: len(service.frames()) == 10)
    assert service.steps() == list(range(20, 30))
    lost = monitor.losses.counts()
    assert lost == {"spool_unwritable": 21}
    service.wait_for(lambda: service.losses.get(monitor.client) == lost)


def test_a_full_disk_loses_the_oldest_and_ends_the_run_normally(service: FakeService, tmp_path: Path) -> None:
    """RLIMIT_FSIZE stands in for the full disk: writes fail in the middle of a record, as they do there."""
    script = """
        import sys, time, resource, logging
        import foreshock
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
        monitor = foreshock.init(run="lab/x", url=sys.argv[1], spool_dir=sys.argv[2], launch="one",
                                 backoff_s=0.02, backoff_max_s=0.05, queue_items=12, finish_s=0.2)
        for step in range(60):
            monitor.log({f"padding_{i}": float(step) for i in range(20)})
            monitor.end_step(step)
            time.sleep(0.005)
        monitor.finish()
        print(monitor.losses.counts())
    """
    service.misbehave = away
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), service.url, str(tmp_path / "spool")],
        capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    lost = eval(done.stdout)
    assert lost["disk_full"] > 0
    (folder,) = (tmp_path / "spool").iterdir()
    assert all(path.stat().st_size <= 3000 for path in folder.iterdir())
    service.misbehave = None


def test_a_successor_reads_what_a_full_disk_had_taken_and_the_dead_ones_counts(
    service: FakeService, tmp_path: Path, make_monitor: MakeMonitor
) -> None:
    test_a_full_disk_loses_the_oldest_and_ends_the_run_normally(service, tmp_path)
    monitor = make_monitor(launch="two")
    monitor.end_step(1000)
    service.wait_for(lambda: 1000 in service.steps() and len(service.frames()) > 1)
    monitor.finish()
    (dead,) = {envelope.client for envelope in service.envelopes} - {monitor.client}
    assert "corrupt" not in service.losses[dead], "no torn record was left behind"


def test_a_spool_beyond_its_bound_drops_the_oldest_and_counts_them(
    service: FakeService, make_monitor: MakeMonitor, tmp_path: Path
) -> None:
    service.misbehave = away
    monitor = make_monitor(spool_bytes=20_000)
    for _ in range(10):
        run(monitor, 20, padding=20)
    service.wait_for(lambda: monitor.losses.counts().get("spool_full", 0) > 0)
    (folder,) = (tmp_path / "spool").iterdir()
    assert sum(path.stat().st_size for path in folder.glob("*.seg")) <= 25_000
    service.misbehave = None
    service.wait_for(lambda: monitor._process.sender is not None and monitor._process.sender.waiting == 0)
    lost = monitor.losses.counts()
    assert set(lost) == {"spool_full"}
    assert len(service.items) + lost["spool_full"] == 201, "every item is stored or counted"


def test_damaged_records_are_skipped_and_counted(
    service: FakeService, make_monitor: MakeMonitor, tmp_path: Path
) -> None:
    service.misbehave = away
    monitor = make_monitor(finish_s=0.1)
    run(monitor, 30)
    monitor.finish()
    (folder,) = (tmp_path / "spool").iterdir()
    segment = max(folder.glob("*.seg"), key=lambda path: path.stat().st_size)
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 0xFF
    segment.write_bytes(bytes(data) + b"FSR1 torn by a power cut")
    service.misbehave = None
    successor = make_monitor(launch="two")
    successor.end_step(1000)
    service.wait_for(lambda: len(service.items) >= 33)
    successor.finish()
    assert service.losses[monitor.client]["corrupt"] == 2
    assert len([frame for frame in service.frames() if frame.step < 30]) >= 29


def test_a_spool_that_nobody_adopts_is_deleted_after_its_time(
    service: FakeService, make_monitor: MakeMonitor, tmp_path: Path
) -> None:
    service.misbehave = away
    old = make_monitor(run="lab/forgotten", finish_s=0.1)
    run(old, 3)
    old.finish()
    (folder,) = (tmp_path / "spool").iterdir()
    os.utime(folder, (1.0, 1.0))
    service.misbehave = None
    make_monitor().end_step(1000)
    service.wait_for(lambda: 1000 in service.steps())
    assert not folder.exists()


def test_no_wall_clock_is_read_where_ages_are_told(
    service: FakeService, make_monitor: MakeMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter(range(10**9, 0, -(10**5)))
    monkeypatch.setattr("time.time", lambda: float(next(times)))
    monitor = make_monitor()
    before = clock.boot_s()
    run(monitor, 3)
    service.wait_for(lambda: len(service.frames()) == 3)
    after = clock.boot_s()
    sealed = [frame.sealed_s for frame in service.frames()]
    assert before <= sealed[0] <= sealed[1] <= sealed[2] <= after
    assert all(envelope.sent_s is not None and before <= envelope.sent_s <= after for envelope in service.envelopes)
