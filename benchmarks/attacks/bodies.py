"""What comes in: bodies that are too many, too large, too slow, too deep or not what they say."""

from __future__ import annotations

import socket
import time
from collections import Counter
from typing import Any

import msgspec
import zstandard

from benchmarks.attacks.target import HEAD_S, Target, attack

MSGPACK = "application/msgpack"


def post(
    target: Target, body: bytes, kind: str = "application/json", encoding: str = "", path: str = "/v1/ingest"
) -> str:
    """The status of a body, and whether the service lives on."""
    headers = {"Content-Type": kind} | ({"Content-Encoding": encoding} if encoding else {})
    return f"{target.ask('POST', path, target.admin, content=body, headers=headers).status_code}{target.alive()}"


@attack("rates", "60 requests at once where 5 a second are allowed", "429 with Retry-After")
def flood(target: Target) -> str:
    answers = [target.ask("GET", "/v1/runs", target.narrow_admin, base=target.narrow.url) for _ in range(60)]
    refused = [a for a in answers if a.status_code == 429]
    kinds = Counter(a.status_code for a in answers)
    return "429 with Retry-After" if refused and "retry-after" in refused[0].headers else str(dict(kinds))


@attack("rates", "60 guesses of a token", "429 with Retry-After")
def guessing(target: Target) -> str:
    answers = [target.ask("GET", "/v1/runs", base=target.narrow.url) for _ in range(60)]
    found = [a for a in answers if a.status_code == 429]
    return "429 with Retry-After" if found and "retry-after" in found[0].headers else "unlimited"


@attack("size", "9 MiB to ingest; 2 MiB elsewhere; 9 MiB in chunks of unknown length", "413, 413, 413, serving on")
def large(target: Target) -> str:
    first = target.ask("POST", "/v1/ingest", target.admin, content=b"x" * (9 << 20)).status_code
    second = target.ask("POST", "/v1/silences", target.admin, content=b"x" * (2 << 20)).status_code

    def chunks() -> Any:
        for _ in range(9 * 16):
            yield b"x" * (1 << 16)

    head = {"Content-Type": MSGPACK}
    third = target.ask("POST", "/v1/ingest", target.admin, content=chunks(), headers=head).status_code
    return f"{first}, {second}, {third}{target.alive()}"


@attack("size", "a zstd bomb: 1 GiB in 32 KiB", "413, serving on")
def bomb(target: Target) -> str:
    packer = zstandard.ZstdCompressor(level=19).compressobj()
    body = b"".join([*(packer.compress(bytes(1 << 20)) for _ in range(1024)), packer.flush()])
    assert len(body) < 200_000
    return post(target, body, MSGPACK, "zstd")


@attack("size", "zstd in zstd", "415, serving on")
def nested_bomb(target: Target) -> str:
    inner = zstandard.ZstdCompressor().compress(bytes(1 << 20))
    return post(target, zstandard.ZstdCompressor().compress(inner), MSGPACK, "zstd, zstd")


@attack("size", "zstd that claims a window of 2 GiB", "400, serving on")
def wide_window(target: Target) -> str:
    # Frame header: magic, no single segment, window descriptor 0xB0 (2^32 bytes), an empty last block.
    return post(target, b"\x28\xb5\x2f\xfd\x00\xb0\x01\x00\x00", MSGPACK, "zstd")


@attack("size", "gzip, which is not spoken here", "415, serving on")
def other_encoding(target: Target) -> str:
    return post(target, b"\x1f\x8b\x08", MSGPACK, "gzip")


@attack("shape", "JSON nested 100,000 deep; msgpack nested 100,000 deep", "400, 400, serving on")
def deep(target: Target) -> str:
    first = post(target, b"[" * 100_000).partition(",")[0]
    return f"{first}, {post(target, bytes([0x91]) * 100_000, MSGPACK)}"


@attack("shape", "a notice nested 40 deep in an envelope that is otherwise good", "400, serving on")
def deep_notice(target: Target) -> str:
    data: Any = {}
    for _ in range(40):
        data = {"x": data}
    envelope = target.envelope("math/q")
    notice = {"sequence": envelope["sequence"], "kind": "note", "sealed_s": 1.0, "data": data}
    return post(target, msgspec.msgpack.encode({**envelope, "notices": [notice]}), MSGPACK)


@attack("shape", "integers of 65 bits and of 6,000 digits", "400, 400, serving on")
def huge_integers(target: Target) -> str:
    text = msgspec.json.encode(target.envelope("math/q")).decode()
    first = post(target, text.replace('"protocol":1', f'"protocol":1,"rank":{1 << 65}').encode()).partition(",")[0]
    return f"{first}, {post(target, text.replace('1,', '9' * 6000 + ',', 1).encode())}"


@attack("shape", "msgpack that claims an array of four thousand million items", "400, serving on")
def lying_length(target: Target) -> str:
    return post(target, b"\x81\xa6frames\xdd\xff\xff\xff\xff", MSGPACK)


@attack("shape", "100,000 signal names in a frame; 5,000 frames", "413, 413, serving on")
def many(target: Target) -> str:
    envelope = target.envelope("math/q")
    frame = {"sequence": envelope["sequence"], "step": 2, "role": "trainer", "rank": 0, "sealed_s": 1.0}
    wide = {**envelope, "frames": [{**frame, "scalars": {f"s{i}": 1.0 for i in range(100_000)}}]}
    first = post(target, msgspec.msgpack.encode(wide), MSGPACK).partition(",")[0]
    frames = [{**frame, "sequence": i, "step": i} for i in range(1, 5001)]
    return f"{first}, {post(target, msgspec.msgpack.encode({**envelope, 'sequence': 5000, 'frames': frames}), MSGPACK)}"


@attack("shape", "pickle, YAML and form data where an envelope belongs", "415, 415, 415, serving on")
def other_kinds(target: Target) -> str:
    kinds = ("application/python-pickle", "application/yaml", "application/x-www-form-urlencoded")
    got = [post(target, b"cos\nsystem\n(S'id'\ntR.", kind).partition(",")[0] for kind in kinds]
    return f"{', '.join(got)}{target.alive()}"


def drip(target: Target, head: bytes, piece: bytes, seconds: float) -> tuple[float, bytes]:
    """(seconds until the service ended it, its answer) for a request that never ends."""
    host, port = "127.0.0.1", target.service.port
    with socket.create_connection((host, port), timeout=1) as wire:
        wire.sendall(head)
        began, answer = time.monotonic(), b""
        wire.settimeout(0.2)
        while time.monotonic() - began < seconds:
            try:
                wire.sendall(piece)
                answer += (got := wire.recv(4096))
                if not got:
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        return time.monotonic() - began, answer


@attack("slowness", "a body of one byte every fifth of a second", "408 in time, serving on")
def slow_body(target: Target) -> str:
    head = f"POST /v1/ingest HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {target.admin}\r\n"
    head += "Content-Type: application/msgpack\r\nContent-Length: 100000\r\n\r\n"
    took, answer = drip(target, head.encode(), b"x", 4 * HEAD_S)
    return f"{answer[9:12].decode()} {'in time' if took < 2.5 * HEAD_S else f'after {took:.1f} s'}{target.alive()}"


@attack("slowness", "a head that never ends, on 200 connections", "closed in time, serving on")
def slow_head(target: Target) -> str:
    others = [socket.create_connection(("127.0.0.1", target.service.port), timeout=1) for _ in range(200)]
    for wire in others:
        wire.sendall(b"GET /healthz HTTP/1.1\r\nX-A: ")
    took, _ = drip(target, b"GET /healthz HTTP/1.1\r\n", b"X-A: b\r\n", 4 * HEAD_S)
    for wire in others:
        wire.close()
    return f"{'closed in time' if took < 2.5 * HEAD_S else f'after {took:.1f} s'}{target.alive()}"


@attack("slowness", "two requests in one with two lengths (smuggling)", "400")
def smuggling(target: Target) -> str:
    head = b"POST /v1/ingest HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
    head += b"0\r\n\r\n"
    _, answer = drip(target, head, b"", 1)
    return answer[9:12].decode() or "closed"
