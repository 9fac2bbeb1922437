"""Whatever the bytes are, a report comes back: no reader raises anything but `Unreadable`."""

from __future__ import annotations

import io
import json
import math
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foreshock_service.check import readers
from foreshock_service.check.assemble import Assembler
from foreshock_service.check.judge import Judge
from foreshock_service.check.readers import (
    console,
    json_document,
    json_lines,
    table,
    tensorboard,
    wandb_offline,
)
from foreshock_service.check.readers.base import Notes, Row, Unreadable
from foreshock_service.check.readers.numbers import number
from foreshock_service.rules.pack import default_pack
from tests.service.check import logs

READERS = {
    "jsonl": json_lines.rows,
    "json": json_document.rows,
    "csv": table.rows,
    "tensorboard": tensorboard.rows,
    "wandb": wandb_offline.rows,
    "console": console.reader(None),
    **{way: console.reader(way) for way in console.WAYS},
}
PIECES = st.sampled_from(
    [
        "{", "}", "[", "]", '"', "'", ":", ",", "\n", "\r", " ", "step", "step:3 - ", "reward", "'loss': ", "nan",
        "1e999", "-inf", "0.5", "{'loss': 0.1, 'reward': 1}", '{"step": 1, "loss": NaN}', "actor/entropy:0.3", "\x00",
        "\x1b[31m", "====== Step 3/9 ======", "• Loss: 0.1", " 3/9 [00:01<00:02, loss=0.1]", "训练", '"log_history": [',
        "Step 3 | Reward: 0.3 | Loss: 0.1", "tensor(", "np.float64(1", ";", "\t", "|", "\\", "9" * 30, "\ufeff",
        "__MIN", " - ",
    ]
)  # fmt: skip
TEXTS = st.lists(PIECES, max_size=40).map("".join).map(lambda s: s.encode())
NUMBERS = st.one_of(st.floats(), st.integers(), st.booleans(), st.none(), st.text(max_size=8))


def read(name: str, data: bytes) -> list[Row]:
    try:
        return list(READERS[name](io.BytesIO(data), Notes()))
    except Unreadable:
        return []


@pytest.mark.parametrize("name", list(READERS))
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.one_of(TEXTS, st.binary(max_size=200)))
def test_no_bytes_break_a_reader(name, data):
    for row in read(name, data):
        assert row.step is None or row.step >= 0
        assert all(isinstance(n, str) and type(v) is float for n, v in row.values.items())


@settings(max_examples=200, deadline=None)
@given(data=st.one_of(TEXTS, st.binary(max_size=300)))
def test_every_file_gets_a_reader_or_a_reason(data):
    try:
        name, reader = readers.detect(data)
        list(reader(io.BytesIO(data), Notes()))
    except Unreadable as error:
        name = str(error)
    assert name


@pytest.mark.parametrize("kind", ["wandb", "tensorboard"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_binary_log_is_read_as_far_as_it_goes(kind, data):
    whole = bytearray(BINARY[kind])
    for _ in range(data.draw(st.integers(0, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    read(kind, bytes(whole[: data.draw(st.integers(0, len(whole)))]))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.dictionaries(st.sampled_from(["step", "reward", "entropy", "kl", "grad_norm", "é", ""]), NUMBERS))
)
def test_any_mapping_of_anything_is_judged(rows):
    data = "\n".join(json.dumps(r) for r in rows).encode()
    notes = Notes()
    assembler, judge = Assembler(notes), Judge(default_pack())
    steps = [raw for row in json_lines.rows(io.BytesIO(data), notes) for raw in assembler.feed(row)]
    with suppress(Unreadable):  # steps that stand still, or are in no order
        steps += assembler.flush()
    for raw in steps:
        judge.feed(raw)
    report = judge.report("jsonl", notes.sentences())
    json.dumps(report.to_json(), allow_nan=False)


@given(st.one_of(st.text(), st.floats(), st.integers(), st.none(), st.binary(), st.lists(st.integers())))
def test_a_number_is_a_float_or_nothing(said):
    got = number(said)
    assert got is None or type(got) is float


@given(st.floats(allow_nan=False))
def test_a_number_survives_its_spelling(value):
    for text in (repr(value), f"np.float64({value!r})", f"tensor({value!r}, device='cuda:0')", f" {value!r} "):
        got = number(text)
        assert got is not None
        assert math.isclose(got, value, rel_tol=1e-12) or got == value


def _binary() -> dict[str, bytes]:
    """One record of each kind, made by hand."""
    event = b"\x09" + bytes(8) + b"\x10\x03" + b"\x2a\x10\x0a\x0e\x0a\x07t/loss1\x15\x00\x00\x00\x3f"
    head = len(event).to_bytes(8, "little")
    record = head + tensorboard.masked_crc32c(head).to_bytes(4, "little") + event
    record += tensorboard.masked_crc32c(event).to_bytes(4, "little")
    item = b"\x0a\x04loss\x82\x01\x030.5"
    history = b"\x0a" + bytes([len(item)]) + item + b"\x12\x02\x08\x05"
    message = b"\x12" + bytes([len(history)]) + history
    block = bytes(4) + len(message).to_bytes(2, "little") + b"\x01" + message
    return {"tensorboard": record * 3, "wandb": b":W&B\xe1\xbe\x00" + block * 3}


BINARY = _binary()


def test_the_binary_records_made_by_hand_are_sound():
    """Else the damage above would be done to nothing."""
    assert read("tensorboard", BINARY["tensorboard"]) == [Row(3, {"t/loss1": 0.5})] * 3
    assert read("wandb", BINARY["wandb"]) == [Row(5, {"loss": 0.5})] * 3


def test_the_runs_of_these_tests_are_what_they_claim():
    ill, well = list(logs.steps(break_at=40)), list(logs.steps())
    assert [a["reward"] for a in ill[:42]] == [b["reward"] for b in well[:42]]
    assert max(r["reward"] for r in ill[44:]) < 0.2 < min(r["reward"] for r in well)
