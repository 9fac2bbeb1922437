"""What was encoded comes back, and what is not an envelope is a WireError, whatever its bytes."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import msgspec
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.stats.packed import SHAPE, pack
from foreshock.stats.record import EvidenceToken, PairRecord
from foreshock.wire import PROTOCOL, Envelope, Frame, Notice, Reply, Semantics
from foreshock.wire.checks import Limits
from foreshock.wire.codec import (
    JSON,
    MSGPACK,
    compress,
    decode_ack,
    decode_envelope,
    decode_reply,
    encode,
    encode_raw_envelope,
)
from foreshock.wire.errors import Malformed, TooLarge, UnsupportedMediaType, UnsupportedVersion, WireError

CLIENT = "0123456789abcdef" * 2
BOTH = pytest.mark.parametrize("kind", [MSGPACK, JSON])


def record() -> PairRecord:
    made = PairRecord(tokens=3, masked=4, nonfinite=1, logp=[-1.0, math.inf], sums=[0.5, math.nan], abs_sketch=[1, 2])
    made.missing["kl_k3"] = "overflow"
    made.set_evidence([EvidenceToken(1, 2, 3, -0.5, -0.25)])
    return made


def block(reasons: dict[str, str] | None = None) -> bytes:
    missing = {"kl_k3": "overflow"} if reasons is None else reasons
    made = PairRecord(
        tokens=3, masked=4, nonfinite=1, logp=[-1.0, math.inf, *[0.5] * 5], prob=[math.nan] * 5, sums=[0.5] * 5,
        extremes=[-1.0, 2.0, 0.5], abs_sketch=[1, 2, -40, 1], missing=missing,
    )  # fmt: skip
    made.set_evidence([EvidenceToken(1, 2, 3, -0.5, -0.25)])
    return pack(made)


def envelope(**changes: Any) -> Envelope:
    """One pair as a block, and one field by field, as wire version 1 has it."""
    frame = Frame(
        sequence=2, step=7, role="trainer", rank=0, sealed_s=1.5, pairs={"policy": block(), "mismatch@lag2": record()},
        scalars={"reward.mean": 0.5, "grad.norm": math.nan, "loss": -math.inf}, missing={"update": "not_reported"},
        semantics={"mismatch": {"b": Semantics(engine="vllm", temperature=0.7)}}, step_s=0.25,
    )  # fmt: skip
    notice = Notice(sequence=1, kind="started", sealed_s=1.0, data={"config": {"lr": 1e-6, "deep": [1, None, "nan"]}})
    fields: dict[str, Any] = {
        "protocol": PROTOCOL, "client": CLIENT, "sequence": 2, "run": "lab/x", "launch": "one", "sent_s": 2.0,
        "expected_ranks": {"trainer": 8}, "losses": {"spool_full": 3}, "frames": [frame], "notices": [notice],
    }  # fmt: skip
    return Envelope(**(fields | changes))


@BOTH
def test_an_envelope_survives_both_encodings_with_its_non_finite_numbers(kind: str) -> None:
    decoded = decode_envelope(encode(envelope(), kind), kind)
    assert msgspec.msgpack.encode(decoded) == msgspec.msgpack.encode(envelope())
    assert math.isnan(decoded.frames[0].scalars["grad.norm"])
    assert decoded.notices[0].data["config"]["deep"] == [1, None, "nan"]


def test_raw_items_make_the_same_bytes_as_the_envelope_itself() -> None:
    whole = envelope()
    fields = {
        name: getattr(whole, name) for name in whole.__struct_fields__ if name not in ("protocol", "frames", "notices")
    }
    raw = encode_raw_envelope(
        **fields,
        frames=[msgspec.Raw(msgspec.msgpack.encode(item)) for item in whole.frames],
        notices=[msgspec.Raw(msgspec.msgpack.encode(item)) for item in whole.notices],
    )
    assert raw == encode(whole)


def test_json_spells_non_finite_numbers_as_strings() -> None:
    text = encode(envelope(), JSON)
    assert b'"grad.norm":"nan"' in text
    assert b'"loss":"-inf"' in text


def test_zstd_is_used_where_it_pays_and_understood() -> None:
    body = encode(envelope(notices=[Notice(sequence=1, kind="note", sealed_s=0.0, data={"text": "x" * 9000})]))
    small, headers = compress(body)
    assert headers == {"Content-Encoding": "zstd"}
    assert len(small) < len(body) / 10
    assert decode_envelope(small, MSGPACK, "zstd").notices[0].data["text"] == "x" * 9000
    assert compress(b"short") == (b"short", {})


def test_a_decompression_bomb_is_too_large_and_costs_no_memory() -> None:
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 28))
    assert len(bomb) < 1 << 16
    with pytest.raises(TooLarge):
        decode_envelope(bomb, MSGPACK, "zstd")


@pytest.mark.parametrize(
    ("body", "kind", "encoding", "error"),
    [
        (b"", MSGPACK, "", Malformed),
        (encode(envelope())[:-9], MSGPACK, "", Malformed),
        (b"[1, 2]", JSON, "", Malformed),
        (b'{"protocol": 1, "client": NaN}', JSON, "", Malformed),
        (b"\x81\xa4data" + b"\x91" * 100_000, MSGPACK, "", Malformed),
        (b'{"a":' * 100_000, JSON, "", Malformed),
        (b"\xdd\xff\xff\xff\xff", MSGPACK, "", Malformed),
        (b"not zstd at all", MSGPACK, "zstd", Malformed),
        (b"{}", "text/html", "", UnsupportedMediaType),
        (b"{}", JSON, "br", UnsupportedMediaType),
        (b'{"protocol": 99, "whatever": true}', JSON, "", UnsupportedVersion),
        (msgspec.msgpack.encode({"protocol": 0}), MSGPACK, "", UnsupportedVersion),
        (bytes((8 << 20) + 1), MSGPACK, "", TooLarge),
    ],
)
def test_what_is_no_envelope_is_refused_with_its_reason(body: bytes, kind: str, encoding: str, error: type) -> None:
    with pytest.raises(error):
        decode_envelope(body, kind, encoding)


def frame(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"sequence": 2, "step": 7, "role": "trainer", "rank": 0, "sealed_s": 1.5}
    return {"frames": [Frame(**(fields | changes))], "notices": []}


def notice(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"sequence": 2, "kind": "note", "sealed_s": 1.5}
    return {"frames": [], "notices": [Notice(**(fields | changes))]}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"run": "no-project"}, Malformed),
        ({"run": "a/b/c"}, Malformed),
        ({"client": "me"}, Malformed),
        ({"launch": "with blank"}, Malformed),
        ({"rank": -1}, Malformed),
        ({"sequence": 1}, Malformed),
        ({"losses": {"x": -1}}, Malformed),
        (frame(scalars={"<script>": 1.0}), Malformed),
        (frame(scalars={"a" * 129: 1.0}), Malformed),
        (frame(missing={"policy": "no reason; at all"}), Malformed),
        (frame(scalars={f"s{i}": 0.0 for i in range(5000)}), TooLarge),
        (frame(pairs={f"p{i}": PairRecord() for i in range(65)}), TooLarge),
        (frame(pairs={"policy": PairRecord(abs_sketch=[0] * 70_000)}), TooLarge),
        (frame(pairs={"policy": b""}), Malformed),
        (frame(pairs={"policy": block()[:-1]}), Malformed),
        (frame(pairs={"policy": block() + b"x"}), Malformed),
        (frame(pairs={"policy": b"\xff" + block()[1:]}), Malformed),
        (frame(pairs={"policy": block()[:SHAPE] + b"\xff" * 6 + block()[SHAPE + 6 :]}), Malformed),
        (frame(pairs={"policy": block()[:-1] + b"\xc1"}), Malformed),
        (frame(pairs={"policy": block({"kl_k3": "<script>"})}), Malformed),
        (frame(pairs={"policy": block({f"s{i}": "overflow" for i in range(300)})}), TooLarge),
        (frame(step=1 << 64 - 1), Malformed),
        (frame(semantics={"policy": {"c": Semantics()}}), Malformed),
        (notice(kind="two words"), Malformed),
        (notice(data={"text": "a\x00b"}), Malformed),
        (notice(data={"text": b"bytes"}), Malformed),
        (notice(data={"n": 1 << 63}), Malformed),
        (notice(data={"n": list(range(30_000))}), TooLarge),
        ({"frames": [Frame(sequence=1, step=1, role="t", rank=0, sealed_s=0.0)] * 2, "notices": []}, Malformed),
        ({"frames": [Frame(sequence=i, step=1, role="t", rank=0, sealed_s=0.0) for i in range(9)]}, TooLarge),
    ],
)
def test_a_well_typed_envelope_out_of_bounds_is_refused(changes: dict[str, Any], error: type) -> None:
    limits = Limits(items=8) if len(changes.get("frames", [])) > 8 else Limits()
    with pytest.raises(error):
        decode_envelope(encode(envelope(**changes)), limits=limits)


def test_findings_are_no_errors() -> None:
    odd = envelope(sent_s=-1e300, **frame(step=-5, sealed_s=math.nan, scalars={"reward.mean": math.nan}))
    assert decode_envelope(encode(odd)).frames[0].step == -5


def test_unknown_fields_are_ignored() -> None:
    tree = msgspec.json.decode(encode(envelope(), JSON))
    tree["invented_later"] = {"x": 1}
    tree["frames"][0]["invented_later"] = 7
    assert decode_envelope(msgspec.json.encode(tree), JSON).frames[0].step == 7


@BOTH
def test_replies_survive_and_garbage_is_malformed(kind: str) -> None:
    reply = Reply(acknowledged=7, attempt=2, warnings=["steps went backwards"])
    assert decode_reply(encode(reply, kind), kind) == reply
    with pytest.raises(Malformed):
        decode_reply(b"<html>", kind)
    with pytest.raises(Malformed):
        decode_ack(b'{"state": 1}')


@given(body=st.binary(max_size=300), kind=st.sampled_from([MSGPACK, JSON]), encoding=st.sampled_from(["", "zstd"]))
@settings(max_examples=400)
def test_any_bytes_are_an_envelope_or_a_wire_error(body: bytes, kind: str, encoding: str) -> None:
    with contextlib.suppress(WireError):
        assert isinstance(decode_envelope(body, kind, encoding), Envelope)


VALID = {kind: encode(envelope(), kind) for kind in (MSGPACK, JSON)}


@given(data=st.data(), kind=st.sampled_from([MSGPACK, JSON]))
@settings(max_examples=600)
def test_a_damaged_envelope_is_an_envelope_or_a_wire_error(data: st.DataObject, kind: str) -> None:
    body = bytearray(VALID[kind])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body) - 1))
        match data.draw(st.integers(0, 2)):
            case 0:
                body[at] = data.draw(st.integers(0, 255))
            case 1:
                del body[at : at + data.draw(st.integers(1, 9))]
            case _:
                body[at:at] = data.draw(st.binary(max_size=9))
        if not body:
            break
    try:
        decoded = decode_envelope(bytes(body), kind)
    except WireError:
        return
    encode(decoded, JSON)


_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**64), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    field=st.sampled_from(Envelope.__struct_fields__), value=_values, item=st.sampled_from(["", "frames", "notices"])
)
@settings(max_examples=400)
def test_any_value_in_any_field_is_an_envelope_or_a_wire_error(field: str, value: Any, item: str) -> None:
    tree = msgspec.msgpack.decode(encode(envelope()))
    if item:
        fields = list(tree[item][0])
        tree[item][0][fields[len(field) % len(fields)]] = value
    else:
        tree[field] = value
    try:
        body = msgspec.msgpack.encode(tree)
    except (OverflowError, ValueError):
        return
    with contextlib.suppress(WireError):
        decode_envelope(body)
