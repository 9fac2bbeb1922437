"""The binary wire, fuzzed at the front door: whatever the bytes, 200 or a clear 4xx, never half an envelope."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import func, select

from foreshock.stats.packed import pack
from foreshock.stats.record import PairRecord
from foreshock.wire import Reply
from foreshock_service.app import create_app
from foreshock_service.settings import Settings
from foreshock_service.store.models import FrameRow
from foreshock_service.store.models import Notice as NoticeRow

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from fastapi.testclient import TestClient

MSGPACK = "application/msgpack"
BOUNDED = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
REFUSALS = {400, 413, 415, 422, 426}

numbers = st.floats(allow_nan=True, allow_infinity=True) | st.integers(-(2**65), 2**65)
texts = st.text(max_size=20) | st.sampled_from(
    ["", "\x00", "a/b", "trainer", "<script>", "../..", "loss", "policy.kl_k2"]
)
plain = st.recursive(
    st.none() | st.booleans() | numbers | texts | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
GOOD = pack(PairRecord(masked=9, tokens=0, nonfinite=9, abs_sketch=[7, 2, -40, 1], missing={"*": "empty_mask"}))


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    block = bytearray(GOOD)
    for _ in range(draw(st.integers(0, 4))):
        block[draw(st.integers(0, len(block) - 1))] = draw(st.integers(0, 255))
    return bytes(block[: draw(st.integers(0, len(block)))]) if draw(st.booleans()) else bytes(block)


frames = st.fixed_dictionaries(
    {},
    optional={
        "sequence": st.integers(0, 5) | numbers,
        "step": st.integers(0, 50) | numbers,
        "role": st.sampled_from(["trainer", "rollout"]) | texts,
        "rank": st.integers(0, 3) | numbers,
        "sealed_s": numbers,
        "generation": st.integers(0, 2) | numbers,
        "pairs": st.dictionaries(st.sampled_from(["policy", "mismatch"]) | texts, plain | damaged(), max_size=2),
        "scalars": st.dictionaries(st.sampled_from(["loss", "reward.mean"]) | texts, numbers, max_size=4),
        "missing": st.dictionaries(texts, texts, max_size=2),
        "semantics": plain,
        "step_s": numbers | st.none(),
    },
)
notices = st.fixed_dictionaries(
    {"sequence": st.integers(1, 5), "kind": st.sampled_from(["started", "finished", "checkpoint", "attempt", "x"])},
    optional={"sealed_s": numbers, "step": numbers | st.none(), "generation": st.integers(0, 2), "data": plain},
)
envelopes = st.fixed_dictionaries(
    {
        "protocol": st.sampled_from([1, 2]) | numbers,
        "client": st.uuids().map(lambda u: u.hex) | texts,
        "sequence": st.integers(1, 9) | numbers,
        "run": st.sampled_from(["math/q", "math/r"]) | texts,
        "launch": st.just("launch") | texts,
    },
    optional={
        "sdk": texts,
        "role": st.sampled_from(["trainer"]) | texts,
        "rank": st.integers(0, 3) | numbers,
        "sent_s": numbers | st.none(),
        "controller": st.booleans() | plain,
        "expected_ranks": st.dictionaries(texts, numbers, max_size=3) | st.none(),
        "losses": st.dictionaries(texts, numbers, max_size=3),
        "frames": st.lists(frames, max_size=3),
        "notices": st.lists(notices, max_size=3),
        "unknown": plain,
    },
)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    url = f"sqlite:///{tmp_path_factory.mktemp('wire') / 'foreshock.db'}"
    app = create_app(Settings(database_url=url, request_rate_per_s=1e5, ingest_rate_per_s=1e5))
    with TestClient(app, base_url="http://localhost:8720", client=("127.0.0.1", 5)) as opened:
        yield opened


def post(client: TestClient, body: bytes) -> Any:
    return client.post("/v1/ingest", content=body, headers={"Content-Type": MSGPACK})


def items(client: TestClient) -> int:
    with client.app.state.rooms.store.read() as session:  # type: ignore[attr-defined]
        return sum(session.scalar(select(func.count()).select_from(t)) or 0 for t in (FrameRow, NoticeRow))


def encoded(tree: Any) -> bytes | None:
    try:
        return msgspec.msgpack.encode(tree)
    except (OverflowError, ValueError):  # beyond 64 bits or not Unicode: msgpack has no spelling for it
        return None


def check(client: TestClient, body: bytes) -> None:
    before = items(client)
    answer = post(client, body)
    if answer.status_code == 200:
        assert msgspec.msgpack.decode(answer.content, type=Reply).acknowledged >= 0
        return
    assert answer.status_code in REFUSALS, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert items(client) == before, "an envelope that was refused left something behind"


@BOUNDED
@given(tree=envelopes)
def test_envelopes_of_the_right_shape_and_wrong_values(client: TestClient, tree: Any) -> None:
    body = encoded(tree)
    if body is not None:
        check(client, body)


@BOUNDED
@given(body=st.binary(max_size=300))
def test_noise(client: TestClient, body: bytes) -> None:
    check(client, body)


@BOUNDED
@given(data=st.data())
def test_a_good_envelope_with_some_bytes_changed(client: TestClient, data: st.DataObject) -> None:
    good = {
        "protocol": 2,
        "client": "e" * 32,
        "sequence": 2,
        "run": "math/q",
        "launch": "launch",
        "frames": [
            {
                "sequence": 1,
                "step": 1,
                "role": "trainer",
                "rank": 0,
                "sealed_s": 1.0,
                "scalars": {"loss": 1.0},
                "pairs": {"policy": GOOD},
            }
        ],
        "notices": [{"sequence": 2, "kind": "note", "sealed_s": 1.0, "data": {"text": "x"}}],
    }
    body = bytearray(msgspec.msgpack.encode(good))
    for _ in range(data.draw(st.integers(1, 6))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    check(client, bytes(body[: data.draw(st.integers(1, len(body)))]))


def test_the_service_is_alive_and_evaluates_afterwards(client: TestClient) -> None:
    assert client.get("/readyz").status_code == 200
    assert client.app.state.rooms.supervisor.crashes == {}  # type: ignore[attr-defined]
    for path in ("/v1/runs", "/v1/incidents", "/v1/runs/math/q", "/metrics", "/"):
        assert client.get(path).status_code == 200, path
