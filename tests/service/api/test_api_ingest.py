"""Bad bodies at the front door: a clear 4xx, nothing stored in part, the service alive."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import zstandard
from sqlalchemy import func, select

from foreshock.wire import PROTOCOL, Envelope, Frame, Reply
from foreshock_service.store.models import Client, FrameRow, Run

MSGPACK = "application/msgpack"
CLIENT = "c" * 32


def envelope(**changes: Any) -> Envelope:
    frame = Frame(sequence=1, step=1, role="trainer", rank=0, sealed_s=1.0, scalars={"loss": 1.0})
    fields: dict[str, Any] = {
        "protocol": PROTOCOL,
        "client": CLIENT,
        "sequence": 1,
        "run": "math/q",
        "launch": "launch-1",
        "frames": [frame],
    }
    return Envelope(**{**fields, **changes})


def packed(**changes: Any) -> bytes:
    return msgspec.msgpack.encode(envelope(**changes))


def post(house: Any, body: bytes, content_type: str = MSGPACK, **headers: str) -> Any:
    return house.near.post("/v1/ingest", content=body, headers={"Content-Type": content_type, **headers})


def stored(house: Any) -> tuple[int, int, int]:
    with house.rooms.store.read() as session:
        return tuple(session.scalar(select(func.count()).select_from(t)) for t in (Run, Client, FrameRow))  # type: ignore[return-value]


def many_signals(count: int) -> bytes:
    frame = Frame(
        sequence=1, step=1, role="trainer", rank=0, sealed_s=1.0, scalars={f"s{i}": 1.0 for i in range(count)}
    )
    return packed(frames=[frame])


WHOLE = packed()
BAD: dict[str, tuple[bytes, str, dict[str, str], int]] = {
    "nothing": (b"", MSGPACK, {}, 400),
    "truncated": (WHOLE[:-5], MSGPACK, {}, 400),
    "something behind": (WHOLE + b"\x00", MSGPACK, {}, 400),
    "noise": (b"\xc1" * 100, MSGPACK, {}, 400),
    "wrong type": (msgspec.msgpack.encode({**msgspec.to_builtins(envelope()), "frames": 7}), MSGPACK, {}, 400),
    "a list": (b"[]", "application/json", {}, 400),
    "JSON's NaN": (b'{"protocol": NaN}', "application/json", {}, 400),
    "nested beyond reason": (b"[" * 100_000, "application/json", {}, 400),
    "nested msgpack": (b"\x91" * 100_000, MSGPACK, {}, 400),
    "old protocol": (packed(protocol=0), MSGPACK, {}, 426),
    "future protocol": (packed(protocol=99), MSGPACK, {}, 426),
    "run without a slash": (packed(run="math"), MSGPACK, {}, 400),
    "run with markup": (packed(run="math/<script>"), MSGPACK, {}, 400),
    "run that climbs": (packed(run="../../etc"), MSGPACK, {}, 400),
    "step beyond 64 bits": (
        json.dumps({**msgspec.to_builtins(envelope()), "frames": [{"sequence": 1, "step": 2**70}]}).encode(),
        "application/json",
        {},
        400,
    ),
    "a million signals": (many_signals(1_000_000), MSGPACK, {}, 413),
    "a million signals, squeezed": (
        zstandard.ZstdCompressor().compress(many_signals(1_000_000)),
        MSGPACK,
        {"Content-Encoding": "zstd"},
        413,
    ),
    "too many items": (
        packed(
            sequence=2000,
            frames=[Frame(sequence=i, step=i, role="trainer", rank=0, sealed_s=1.0) for i in range(1, 2001)],
        ),
        MSGPACK,
        {},
        413,
    ),
    "64 MiB": (b"\x00" * (64 << 20), MSGPACK, {}, 413),
    "a zstd bomb": (
        zstandard.ZstdCompressor(level=19).compress(b"\x00" * (1 << 30)),
        MSGPACK,
        {"Content-Encoding": "zstd"},
        413,
    ),
    "not zstd": (WHOLE, MSGPACK, {"Content-Encoding": "zstd"}, 400),
    "truncated zstd": (
        zstandard.ZstdCompressor().compress(WHOLE)[:-8],
        MSGPACK,
        {"Content-Encoding": "zstd"},
        400,
    ),
    "another encoding": (WHOLE, MSGPACK, {"Content-Encoding": "br"}, 415),
    "another type": (WHOLE, "text/plain", {}, 415),
    "a NUL in a text": (packed(sdk="a\x00b"), MSGPACK, {}, 400),
    "another's item number": (packed(sequence=0), MSGPACK, {}, 400),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_body_gets_a_clear_4xx_and_nothing_of_it_is_stored(shared_house, case: str) -> None:
    body, content_type, headers, status = BAD[case]
    answer = post(shared_house, body, content_type, **headers)
    assert answer.status_code == status, answer.text[:500]
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["detail"]
    assert stored(shared_house) == (0, 0, 0)
    assert shared_house.near.get("/readyz").status_code == 200


def test_a_body_without_a_length_is_cut_off_while_it_streams_in(house) -> None:
    sent = 0

    def endless() -> Any:
        nonlocal sent
        for _ in range(1000):
            sent += 1 << 20
            yield b"\x00" * (1 << 20)

    answer = house.near.post("/v1/ingest", content=endless(), headers={"Content-Type": MSGPACK})
    assert answer.status_code == 413
    assert answer.headers["content-type"] == "application/problem+json"
    assert stored(house) == (0, 0, 0)


def test_an_oversized_body_elsewhere_is_refused_too(house) -> None:
    answer = house.near.post("/v1/rules/replay", json={"run": "math/q", "pack": "x" * (2 << 20)})
    assert answer.status_code == 413


def test_one_bad_frame_spoils_its_envelope_and_nothing_of_it_is_stored(house) -> None:
    good = Frame(sequence=1, step=1, role="trainer", rank=0, sealed_s=1.0, scalars={"loss": 1.0})
    bad = Frame(sequence=2, step=2, role="trainer", rank=0, sealed_s=1.0, scalars={"<b>": 1.0})
    assert post(house, packed(sequence=2, frames=[good, bad])).status_code == 400
    assert stored(house) == (0, 0, 0)


def test_what_is_odd_is_a_finding_and_stored(house_on_each) -> None:
    house = house_on_each
    frames = [
        Frame(sequence=1, step=9, role="trainer", rank=0, sealed_s=1e300, scalars={"loss": float("nan")}),
        Frame(sequence=2, step=3, role="trainer", rank=0, sealed_s=-5.0, scalars={"loss": float("-inf")}),
    ]
    answer = post(house, packed(sequence=2, sent_s=float("inf"), frames=frames))
    assert answer.status_code == 200, answer.text
    reply = msgspec.msgpack.decode(answer.content, type=Reply)
    assert reply.acknowledged == 2
    assert reply.warnings
    other = post(house, packed(client="d" * 32, frames=frames[:1]))
    assert other.status_code == 200
    assert stored(house) == (1, 2, 3)
    step = house.wait_for(lambda: ok(house.near.get("/v1/runs/math/q/steps/3")))
    assert step["values"]["loss"] == "-inf"
    found = house.wait_for(lambda: house.near.get("/v1/incidents?run=math/q").json()["incidents"])
    assert "non_finite" in [i["rule"] for i in found]


def ok(answer: Any) -> Any:
    return answer.json() if answer.status_code == 200 else None


def test_a_repeated_envelope_is_acknowledged_and_stored_once(house_on_each) -> None:
    for _ in range(3):
        answer = post(house_on_each, packed())
        assert msgspec.msgpack.decode(answer.content, type=Reply).acknowledged == 1
    assert stored(house_on_each) == (1, 1, 1)


def test_the_reply_speaks_the_senders_language(house) -> None:
    assert post(house, packed()).headers["content-type"] == MSGPACK
    answer = post(house, msgspec.json.encode(envelope(sequence=1)), "application/json; charset=utf-8")
    assert answer.json()["acknowledged"] == 1


def test_squeezed_envelopes_are_understood(house) -> None:
    body = zstandard.ZstdCompressor().compress(packed())
    assert post(house, body, MSGPACK, **{"Content-Encoding": "zstd"}).status_code == 200
    assert stored(house) == (1, 1, 1)


def test_a_full_queue_is_503_with_retry_after(make_house, monkeypatch) -> None:
    house = make_house()
    from foreshock_service.errors import Unavailable

    def full(*_: Any, **__: Any) -> Any:
        raise Unavailable("too many envelopes wait to be stored")

    monkeypatch.setattr(house.rooms.writer, "store", full)
    answer = post(house, packed())
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1


def test_whoever_leaves_in_the_middle_of_a_body_is_no_error_of_the_service(house, caplog) -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        raise AssertionError(f"an answer to nobody: {message}")

    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "path": "/v1/ingest", "raw_path": b"/v1/ingest",
        "query_string": b"", "root_path": "", "scheme": "http", "state": {}, "server": ("localhost", 80),
        "client": ("127.0.0.1", 5000),
        "headers": [(b"host", b"localhost"), (b"content-type", MSGPACK.encode()), (b"content-length", b"10")],
    }  # fmt: skip
    house.near.portal.call(house.app, scope, receive, send)
    assert 'status="499"' in house.near.get("/metrics").text
    assert stored(house) == (0, 0, 0)
