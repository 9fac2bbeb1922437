"""One recorded envelope and reply per protocol version: today's code reads them all, and still writes the newest.

A new version adds a folder; a recorded one never changes. `python tests/contract/test_golden.py` records a missing one.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from foreshock.stats.packed import pack
from foreshock.stats.record import EvidenceToken, PairRecord
from foreshock.wire import PROTOCOL, SUPPORTED, Action, Command, Envelope, Frame, Notice, Reply, Semantics
from foreshock.wire.codec import JSON, MSGPACK, decode_envelope, decode_reply, encode

GOLDEN = Path(__file__).parent / "golden"


def envelope() -> Envelope:
    record = PairRecord(
        masked=5, tokens=3, nonfinite=1, sentinels=1, zeros=1, positives=1, sequences=1,
        logp=[-1.5, 0.25, 0.5, 0.125, 0.75, 0.0, 1.0], prob=[0.25, 0.125, 0.5, 0.0625, 0.03125],
        sums=[0.75, 0.5, 3.25, 3.5, 0.375], extremes=[-0.25, 0.5, 0.125], abs_sketch=[1, 2, -9, 1],
        seq_sums=[0.25, 0.5, 0.125, 0.75, 0.75], seq_weights=[0.5, 1.0, 1.0], seq_abs_sketch=[900, 1],
        missing={"kl_k3": "overflow"},
    )  # fmt: skip
    record.set_evidence([EvidenceToken(4, 2, 1234, -0.5, -1.0)])
    frame = Frame(
        sequence=3, step=41, role="trainer", rank=1, sealed_s=1000.5, generation=1, pairs={"policy": pack(record)},
        scalars={"reward.mean": 0.5, "grad.norm": math.inf}, missing={"mismatch": "no_rollout_logprobs"},
        semantics={"policy": {"b": Semantics(engine="trainer", temperature=1.0, source="rescore")}}, step_s=12.5,
    )  # fmt: skip
    notices = [
        Notice(sequence=1, kind="started", sealed_s=990.0, role="trainer", rank=1, data={"config": {"lr": 1e-6}}),
        Notice(sequence=2, kind="checkpoint", sealed_s=999.0, step=40, data={"path": "/ckpt/40", "step": 40}),
    ]
    return Envelope(
        protocol=PROTOCOL, client="0123456789abcdef0123456789abcdef", sequence=3, run="lab/golden", launch="slurm-17-0",
        sdk="python-0.1.0", role="trainer", rank=1, sent_s=1001.0, controller=True, expected_ranks={"trainer": 2},
        losses={"spool_full": 2}, frames=[frame], notices=notices,
    )  # fmt: skip


def reply() -> Reply:
    action = Action(kind="scale_lr", arguments={"factor": 0.5})
    command = Command(
        id="c-1", run="lab/golden", attempt=2, actions=[action], issued_step=41, reason="kl_k2 above floor"
    )
    return Reply(acknowledged=3, run_verdict="critical", attempt=2, mode="auto", commands=[command], warnings=["late"])


@pytest.mark.parametrize("version", sorted(SUPPORTED))
def test_every_supported_version_has_its_recording_and_is_still_read(version: int) -> None:
    folder = GOLDEN / f"v{version}"
    expected = msgspec.to_builtins(decode_envelope((folder / "envelope.msgpack").read_bytes()))
    assert expected["protocol"] == version
    assert msgspec.to_builtins(decode_envelope((folder / "envelope.json").read_bytes(), JSON)) == expected
    assert decode_reply((folder / "reply.msgpack").read_bytes()) == decode_reply(
        (folder / "reply.json").read_bytes(), JSON
    )


def test_the_newest_version_is_still_written_byte_for_byte() -> None:
    folder = GOLDEN / f"v{PROTOCOL}"
    for kind, suffix in ((MSGPACK, "msgpack"), (JSON, "json")):
        assert encode(envelope(), kind) == (folder / f"envelope.{suffix}").read_bytes()
        assert encode(reply(), kind) == (folder / f"reply.{suffix}").read_bytes()


if __name__ == "__main__":
    target = GOLDEN / f"v{PROTOCOL}"
    target.mkdir(parents=True)  # fails where it exists: what was recorded stays
    for media, name in ((MSGPACK, "msgpack"), (JSON, "json")):
        (target / f"envelope.{name}").write_bytes(encode(envelope(), media))
        (target / f"reply.{name}").write_bytes(encode(reply(), media))
