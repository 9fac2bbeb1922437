"""Records on disk come back in order and whole, damage costs what it hit, and only the dead are adopted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshock.transport.adopt import adopt
from foreshock.transport.backlog import Backlog
from foreshock.transport.items import FRAME, NOTICE, Record
from foreshock.transport.losses import Losses
from foreshock.transport.spool import Header, Spool, SpoolError, frame, parse

HEADER = {"run": "lab/x", "launch": "one", "role": "trainer", "rank": 0, "url": "http://x"}
_records = st.lists(
    st.builds(Record, st.sampled_from([FRAME, NOTICE]), st.integers(0, 2**63), st.binary(max_size=200)), max_size=8
)


def spool(root: Path, client: str = "c" * 32, max_bytes: int = 1 << 20, losses: Losses | None = None) -> Spool:
    return Spool.create(root, Header(client=client, **HEADER), max_bytes, losses or Losses())  # type: ignore[arg-type]


def records(numbers: range, size: int = 10) -> list[Record]:
    return [Record(FRAME, number, bytes([number % 256]) * size) for number in numbers]


@given(_records)
def test_what_is_framed_is_parsed(written: list[Record]) -> None:
    assert parse(b"".join(map(frame, written))) == (written, 0)


@given(written=_records.filter(len), data=st.data())
def test_damage_costs_only_the_records_it_hit_and_invents_none(written: list[Record], data: st.DataObject) -> None:
    raw = bytearray(b"".join(map(frame, written)))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    found, damaged = parse(bytes(raw))
    assert damaged >= 1
    assert len(found) >= len(written) - 1 - damaged
    assert all(record in written for record in found)


@given(written=_records.filter(len), cut=st.integers(1, 40))
def test_a_torn_end_costs_the_last_records_only(written: list[Record], cut: int) -> None:
    raw = b"".join(map(frame, written))
    found, _ = parse(raw[:-cut])
    assert found == written[: len(found)]


def test_records_come_back_in_order_while_others_are_written(tmp_path: Path) -> None:
    made = spool(tmp_path, max_bytes=4096)
    made.append(records(range(1, 6)))
    assert [r.sequence for r in made.peek(2, 1 << 20)] == [1, 2]
    made.append(records(range(6, 9)))
    made.commit(2)
    seen = []
    while taken := made.peek(2, 1 << 20):
        seen += [r.sequence for r in taken]
        made.commit(len(taken))
    assert seen == [3, 4, 5, 6, 7, 8]
    assert len(made) == 0
    made.close()
    assert list(tmp_path.iterdir()) == []


def test_a_batch_is_bounded_in_bytes_and_one_larger_record_goes_alone(tmp_path: Path) -> None:
    made = spool(tmp_path)
    made.append(records(range(5), size=100))
    assert len(made.peek(10, 250)) == 2
    assert len(made.peek(10, 1)) == 1
    made.close()


def test_a_living_owner_is_not_robbed_and_a_dead_one_is_adopted_once(tmp_path: Path) -> None:
    made = spool(tmp_path)
    made.append(records(range(3)))
    made.save_losses({"spool_full": 4})
    assert list(adopt(tmp_path, "lab/x", "http://x", 1 << 20, 1e9)) == []
    made.close()
    assert list(adopt(tmp_path, "lab/other", "http://x", 1 << 20, 1e9)) == []
    assert list(adopt(tmp_path, "lab/x", "http://elsewhere", 1 << 20, 1e9)) == []
    (heir,) = adopt(tmp_path, "lab/x", "http://x", 1 << 20, 1e9)
    assert list(adopt(tmp_path, "lab/x", "http://x", 1 << 20, 1e9)) == []
    assert [r.sequence for r in heir.peek(10, 1 << 20)] == [0, 1, 2]
    assert heir.losses.counts() == {"spool_full": 4}
    heir.commit(3)
    heir.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(SpoolError) as caught:
        spool(tmp_path / "link")
    assert caught.value.reason == "spool_unwritable"


def test_a_foreign_file_in_a_spool_is_not_deleted(tmp_path: Path) -> None:
    made = spool(tmp_path)
    (made.folder / "thesis.tex").write_text("years of work")
    made.close()
    assert (made.folder / "thesis.tex").exists()


def test_memory_follows_the_disk_in_one_order(tmp_path: Path) -> None:
    losses = Losses()
    backlog = Backlog(lambda: spool(tmp_path, losses=losses), losses, 100, 1 << 20)
    for record in records(range(1, 4)):
        backlog.push(record)
    assert not list(tmp_path.iterdir()), "nothing touches the disk before it must"
    backlog.shelve()
    for record in records(range(4, 7)):
        backlog.push(record)
    seen = []
    while taken := backlog.peek(2, 1 << 20):
        seen += [r.sequence for r in taken]
        backlog.commit(len(taken))
    assert seen == [1, 2, 3, 4, 5, 6]
    backlog.close()
    assert losses.counts() == {}


def test_memory_that_overflows_goes_to_the_disk(tmp_path: Path) -> None:
    losses = Losses()
    backlog = Backlog(lambda: spool(tmp_path, losses=losses), losses, 5, 1 << 20)
    for record in records(range(20)):
        backlog.push(record)
    assert (len(backlog), losses.counts()) == (20, {})
    backlog.close()


def test_descriptors_are_not_inherited_by_other_programs(tmp_path: Path) -> None:
    made = spool(tmp_path)
    made.append(records(range(1)))
    assert not os.get_inheritable(made._lock)
    assert made._file is not None
    assert not os.get_inheritable(made._file)
    made.close()
