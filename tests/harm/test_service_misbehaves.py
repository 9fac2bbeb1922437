"""The service refuses, hangs, talks nonsense: the run goes on, nothing is lost in silence, in the end all arrives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from foreshock.monitor import Monitor
from tests.fake_service import FakeService, Request

MakeMonitor = Callable[..., Monitor]
STEPS = 5


def run(monitor: Monitor, steps: range = range(STEPS)) -> float:
    """Trains; returns the longest time that one step's calls took, in seconds."""
    longest = 0.0
    for step in steps:
        began = time.perf_counter()
        monitor.log({"reward.mean": float(step), "loss": 1.0})
        monitor.end_step(step)
        longest = max(longest, time.perf_counter() - began)
    return longest


def only_first(requests: int, answer: Callable[[Request], object]) -> Callable[[Request], bool]:
    """Misbehaves towards the first `requests` envelopes."""
    left = [requests]

    def misbehave(request: Request) -> bool:
        if request.path != "/v1/ingest" or left[0] == 0:
            return False
        left[0] -= 1
        answer(request)
        return True

    return misbehave


def garbage(request: Request) -> None:
    request.close_connection = True
    request.wfile.write(b"\x00\xffnot http at all\r\n\r\n")


def drip(request: Request) -> None:
    """An answer whose every byte comes in time and whose end never does."""
    request.close_connection = True
    request.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    for _ in range(100):
        request.wfile.write(b"x")
        time.sleep(0.05)


def drip_headers(request: Request) -> None:
    request.close_connection = True
    for _ in range(100):
        request.wfile.write(b"H")
        time.sleep(0.05)


def endless(request: Request) -> None:
    request.close_connection = True
    request.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(100):
        request.wfile.write(b"10000\r\n" + bytes(0x10000) + b"\r\n")


KEPT: dict[str, Callable[[Request], object]] = {
    "500": lambda r: r.answer(500, b"oops"),
    "503 with a Retry-After": lambda r: r.answer(503, b"", Retry_After="0.05"),
    "401": lambda r: r.answer(401, b""),
    "403": lambda r: r.answer(403, b""),
    "408": lambda r: r.answer(408, b""),
    "429": lambda r: r.answer(429, b"", Retry_After="0.05"),
    "a redirect": lambda r: r.answer(307, b"", Location="http://127.0.0.1:1/"),
    "204": lambda r: r.answer(204, b""),
    "200 with HTML": lambda r: r.answer(200, b"<html>login</html>"),
    "200 with the wrong reply": lambda r: r.answer(200, b"\x81\xacacknowledged\xa3abc"),
    "200 acknowledging nothing": lambda r: r.answer(200, b"\x81\xacacknowledged\x00"),
    "a reset": lambda r: r.reset(),
    "garbage": garbage,
    "an endless answer": endless,
}


@pytest.mark.parametrize("how", KEPT)
def test_nothing_is_lost_while_the_service_answers_with(
    how: str, service: FakeService, make_monitor: MakeMonitor
) -> None:
    service.misbehave = only_first(3, KEPT[how])
    monitor = make_monitor()
    run(monitor)
    service.wait_for(lambda: len(service.frames()) == STEPS)
    assert service.steps() == list(range(STEPS))
    assert monitor.losses.counts() == {}


@pytest.mark.parametrize("how", [drip, drip_headers, lambda request: time.sleep(0.6)])
def test_a_service_that_hangs_or_drips_holds_nobody_up(
    how: Callable[[Request], object], service: FakeService, make_monitor: MakeMonitor
) -> None:
    service.misbehave = only_first(1, how)
    monitor = make_monitor(timeout_s=0.3)
    run(monitor)
    service.wait_for(lambda: len(service.frames()) == STEPS, seconds=3.0)
    assert monitor.losses.counts() == {}


def test_a_hanging_service_does_not_delay_the_loop_nor_the_end(service: FakeService, make_monitor: MakeMonitor) -> None:
    released = threading.Event()
    service.misbehave = lambda request: released.wait(20.0)
    monitor = make_monitor(timeout_s=15.0, finish_s=0.3)
    try:
        run(monitor)
        began = time.monotonic()
        monitor.finish()
        assert time.monotonic() - began < 2.5
    finally:
        released.set()


@pytest.mark.parametrize("status", [400, 404, 409, 410, 422, 426])
def test_what_is_refused_for_good_is_dropped_counted_and_blocks_nothing(
    status: int, service: FakeService, make_monitor: MakeMonitor
) -> None:
    monitor = make_monitor()
    monitor.end_step(0)
    service.wait_for(lambda: service.steps() == [0])
    service.misbehave = only_first(1, lambda r: r.answer(status, b"no"))
    monitor.end_step(1)
    service.wait_for(lambda: monitor.losses.counts() == {"refused": 1})
    monitor.end_step(2)
    service.wait_for(lambda: service.steps() == [0, 2])
    service.wait_for(lambda: service.losses[monitor.client] == {"refused": 1})


def test_one_poisoned_item_does_not_take_the_others_with_it(service: FakeService, make_monitor: MakeMonitor) -> None:
    down = threading.Event()

    def misbehave(request: Request) -> bool:
        if request.path != "/v1/ingest":
            return False
        if not down.is_set():
            request.answer(503, b"")
            return True
        if b"poison" in request.body:
            request.answer(413, b"too large")
            return True
        return False

    service.misbehave = misbehave
    monitor = make_monitor()
    for step in range(20):
        monitor.log({"poison" if step == 11 else "loss": 1.0})
        monitor.end_step(step)
    down.set()
    service.wait_for(lambda: len(service.frames()) == 19)
    assert service.steps() == [step for step in range(20) if step != 11]
    assert monitor.losses.counts() == {"refused": 1}


def test_a_service_that_is_away_gets_everything_in_order_when_it_is_back(
    tmp_path: Path, make_monitor: MakeMonitor
) -> None:
    first = FakeService()
    port = first.port
    monitor = make_monitor(url=first.url)
    run(monitor, range(3))
    first.wait_for(lambda: len(first.frames()) == 3)
    first.stop()
    assert run(monitor, range(3, 300)) < 0.25
    second = FakeService(port)
    try:
        run(monitor, range(300, 310))
        second.wait_for(lambda: 309 in second.steps())
        assert second.steps() == list(range(3, 310))
        assert monitor.losses.counts() == {}
        assert len(second.envelopes) < 100, "a backlog goes in batches"
        monitor.finish()
        assert list((tmp_path / "spool").iterdir()) == [], "nothing is left behind"
    finally:
        second.stop()


def test_a_wrong_token_for_the_whole_run_ends_normally_and_keeps_the_data(
    service: FakeService, make_monitor: MakeMonitor, tmp_path: Path
) -> None:
    service.misbehave = KEPT_FOR_EVER
    monitor = make_monitor(token="wrong", finish_s=0.2)
    run(monitor)
    monitor.finish()
    service.misbehave = None
    successor = make_monitor(token="right", launch="two")
    run(successor, range(STEPS, STEPS + 1))
    service.wait_for(lambda: len(service.frames()) == STEPS + 1)
    launches = {envelope.client: envelope.launch for envelope in service.envelopes}
    assert launches == {monitor.client: "one", successor.client: "two"}


def KEPT_FOR_EVER(request: Request) -> bool:
    request.answer(401, b"who are you")
    return True


def test_a_service_that_refuses_zstd_gets_it_plain(service: FakeService, make_monitor: MakeMonitor) -> None:
    def misbehave(request: Request) -> bool:
        if request.headers.get("Content-Encoding") == "zstd":
            request.answer(415, b"")
            return True
        return False

    service.misbehave = misbehave
    monitor = make_monitor(config={"text": ["x" * 1900] * 9})
    run(monitor)
    service.wait_for(lambda: len(service.frames()) == STEPS)
    assert monitor.losses.counts() == {}


def test_an_idle_client_shows_that_it_lives(service: FakeService, make_monitor: MakeMonitor) -> None:
    monitor = make_monitor(heartbeat_s=0.1)
    monitor.end_step(0)
    service.wait_for(lambda: sum(not e.frames and not e.notices for e in service.envelopes) >= 2)
    assert service.envelopes[-1].sequence == 2


def test_nobody_speaks_to_another_host_than_the_one_asked(service: FakeService, make_monitor: MakeMonitor) -> None:
    elsewhere = FakeService()
    try:
        service.misbehave = only_first(5, lambda r: r.answer(302, b"", Location=elsewhere.url + "/v1/ingest"))
        run(make_monitor())
        service.wait_for(lambda: len(service.frames()) == STEPS)
        assert elsewhere.requests == 0
    finally:
        elsewhere.stop()
