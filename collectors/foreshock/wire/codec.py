"""Envelopes and replies ↔ bytes: msgpack, or JSON with the same schema, either of them optionally in zstd.

JSON cannot spell non-finite numbers: they are the strings "nan", "inf" and "-inf" there, in scalars and pair records,
and are numbers again once decoded. Inside a notice's free `data` they stay strings.

`decode_envelope` takes bytes from anyone: whatever they are, it returns an Envelope within `limits` or raises a
WireError.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from foreshock.wire.checks import Limits, check
from foreshock.wire.commands import Ack
from foreshock.wire.envelope import Envelope, Reply
from foreshock.wire.errors import Malformed, TooLarge, UnsupportedMediaType, UnsupportedVersion
from foreshock.wire.version import PROTOCOL, SUPPORTED

try:
    import zstandard
except ImportError:  # optional; not looked for later, on a thread that may run while the interpreter ends
    zstandard = None  # type: ignore[assignment]

MSGPACK = "application/msgpack"
JSON = "application/json"
ZSTD_ABOVE = 4096
"""Bytes below which compressing costs more than it saves."""

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class _Version(msgspec.Struct):
    protocol: int


class _RawEnvelope(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`Envelope` with its items already encoded; field by field the same."""

    protocol: int
    client: str
    sequence: int
    run: str
    launch: str
    sdk: str = ""
    role: str = "trainer"
    rank: int = 0
    sent_s: float | None = None
    controller: bool = False
    expected_ranks: dict[str, int] | None = None
    losses: dict[str, int] = {}
    frames: list[msgspec.Raw] = []
    notices: list[msgspec.Raw] = []


_to_msgpack = msgspec.msgpack.Encoder()
_version_of = msgspec.msgpack.Decoder(_Version)
_envelope_of = msgspec.msgpack.Decoder(Envelope)
_reply_of = msgspec.msgpack.Decoder(Reply)
_json_reply_of = msgspec.json.Decoder(Reply)
_ack_of = msgspec.json.Decoder(Ack)


def encode_raw_envelope(**fields: Any) -> bytes:
    """msgpack of an envelope of this protocol whose frames and notices are msgspec.Raw."""
    return _to_msgpack.encode(_RawEnvelope(protocol=PROTOCOL, **fields))


def encode(value: Envelope | Reply, content_type: str = MSGPACK) -> bytes:
    """An envelope or a reply as msgpack or JSON. Raises UnsupportedMediaType."""
    if media(content_type) == MSGPACK:
        return _to_msgpack.encode(value)
    return msgspec.json.encode(_spelt(msgspec.to_builtins(value)))


def compress(body: bytes) -> tuple[bytes, dict[str, str]]:
    """(body, extra headers): in zstd where zstandard is installed and the body is worth it."""
    if zstandard is None or len(body) < ZSTD_ABOVE:
        return body, {}
    return zstandard.ZstdCompressor(level=1).compress(body), {"Content-Encoding": "zstd"}


def decode_envelope(
    body: bytes, content_type: str = MSGPACK, encoding: str = "", limits: Limits | None = None
) -> Envelope:
    """The envelope in `body`. Raises Malformed, TooLarge, UnsupportedMediaType or UnsupportedVersion, nothing else."""
    limits = limits or Limits()
    kind = media(content_type)
    if len(body) > limits.body_bytes:
        raise TooLarge(f"body of {len(body)} bytes, at most {limits.body_bytes} are taken")
    body = _inflate(body, encoding, limits.inflated_bytes)
    try:
        envelope = _from_msgpack(body) if kind == MSGPACK else _from_json(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeError, ValueError, OverflowError, TypeError) as error:
        raise Malformed(f"not an envelope: {error}"[:500]) from None
    check(envelope, limits)
    return envelope


def decode_reply(body: bytes, content_type: str = MSGPACK) -> Reply:
    """The reply in `body`. Raises Malformed or UnsupportedMediaType."""
    decoder = _reply_of if media(content_type) == MSGPACK else _json_reply_of
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeError, ValueError, OverflowError) as error:
        raise Malformed(f"not a reply: {error}"[:500]) from None


def decode_ack(body: bytes) -> Ack:
    """The acknowledgement in a JSON body. Raises Malformed or TooLarge."""
    if len(body) > 256 << 10:
        raise TooLarge("an acknowledgement of more than 256 KiB")
    try:
        return _ack_of.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeError, ValueError, OverflowError) as error:
        raise Malformed(f"not an acknowledgement: {error}"[:500]) from None


def media(content_type: str) -> str:
    """`MSGPACK` or `JSON`. Raises UnsupportedMediaType."""
    name = content_type.partition(";")[0].strip().lower()
    if name in (MSGPACK, "application/x-msgpack", "application/vnd.msgpack"):
        return MSGPACK
    if name == JSON:
        return JSON
    raise UnsupportedMediaType(f"content type {content_type[:100]!r}; {MSGPACK} and {JSON} are taken")


def _from_msgpack(body: bytes) -> Envelope:
    _check_version(_version_of.decode(body).protocol)
    return _envelope_of.decode(body)


def _from_json(body: bytes) -> Envelope:
    tree = msgspec.json.decode(body)
    if isinstance(tree, dict):
        _check_version(tree.get("protocol"))
        for frame in tree["frames"] if isinstance(tree.get("frames"), list) else ():
            if isinstance(frame, dict):
                _unspell(frame.get("scalars"))
                pairs = frame.get("pairs")
                for record in pairs.values() if isinstance(pairs, dict) else ():
                    _unspell(record)
    return msgspec.convert(tree, Envelope)


def _check_version(protocol: object) -> None:
    if isinstance(protocol, int) and not isinstance(protocol, bool) and protocol not in SUPPORTED:
        spoken = ", ".join(str(version) for version in sorted(SUPPORTED))
        raise UnsupportedVersion(f"protocol {str(protocol)[:20]} is not spoken here, {spoken} is: upgrade one side")


def _inflate(body: bytes, encoding: str, limit: int) -> bytes:
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return body
    if name != "zstd":
        raise UnsupportedMediaType(f"content encoding {encoding[:100]!r}; zstd and identity are taken")
    if zstandard is None:
        raise UnsupportedMediaType("content encoding zstd is not installed here")
    try:
        # Read one byte beyond the limit and no more, whatever the frame's header claims.
        with zstandard.ZstdDecompressor(max_window_size=1 << 23).stream_reader(body) as reader:
            inflated = reader.read(limit + 1)
    except zstandard.ZstdError as error:
        raise Malformed(f"not zstd: {error}") from None
    if len(inflated) > limit:
        raise TooLarge(f"more than {limit} bytes after decompression")
    return inflated


def _spelt(tree: Any) -> Any:
    """A copy with non-finite floats as strings."""
    if isinstance(tree, float) and not math.isfinite(tree):
        return "nan" if math.isnan(tree) else ("inf" if tree > 0 else "-inf")
    if isinstance(tree, dict):
        return {key: _spelt(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_spelt(value) for value in tree]
    return tree


def _unspell(tree: Any) -> None:
    """In place: the three strings become numbers again, in a mapping's values or a list at any depth."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            if isinstance(value, str) and value in _NON_FINITE:
                tree[key] = _NON_FINITE[value]
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            if isinstance(value, str) and value in _NON_FINITE:
                tree[index] = _NON_FINITE[value]
            elif isinstance(value, list):
                _unspell(value)
