"""Lines in bounded memory, from whole, growing and hostile files."""

from __future__ import annotations

import io
import json
import threading
import time
import tracemalloc

from foreshock_service.check.readers.base import Notes
from foreshock_service.check.readers.source import MAX_LINE, lines
from tests.service.check import logs


def read(data: bytes) -> tuple[list[str], list[str]]:
    notes = Notes()
    return list(lines(io.BytesIO(data), notes)), notes.sentences()


def test_line_ends_colours_and_nuls_are_taken_away():
    data = b"\x1b[1;31ma\x1b[0m\r\nb\rc\x00d\n\x1b]8;;http://x\x07e\x1b]8;;\x07"
    assert [line for line in read(data)[0] if line] == ["a", "b", "cd", "e"]


def test_bytes_that_are_no_text_do_not_end_the_reading():
    assert read(b"a\xff\xfe\n\xe4\xb8")[0] == ["a��", "�"]


def test_a_line_without_end_is_skipped_in_bounded_memory():
    size = 4 * MAX_LINE
    stream = io.BytesIO(b"x" * size + b"\nreward\n")
    notes = Notes()
    tracemalloc.start()
    try:
        assert list(lines(stream, notes)) == ["reward"]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * MAX_LINE
    assert any("longer than" in note for note in notes.sentences())


def test_memory_does_not_grow_with_the_log(tmp_path):
    """Four times the log, the same memory: a 2 GB log needs no more than one of 2 MB."""

    def peak(count: int) -> int:
        path = tmp_path / f"{count}.jsonl"
        with path.open("w") as file:
            for r in logs.steps(count):
                file.write(json.dumps(logs.trl(r) | {"note": "x" * 2000}) + "\n")
        tracemalloc.start()
        try:
            assert logs.judged(path).steps == count
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(200)
    small, large = peak(1000), peak(4000)
    assert large < 1.2 * small + 500_000


def test_a_growing_log_is_judged_as_it_grows(tmp_path):
    path = tmp_path / "live.jsonl"
    rows = [json.dumps(logs.trl(r)) + "\n" for r in logs.steps(break_at=20)]
    path.write_text("".join(rows[:5]))
    seen: list[tuple[str, str]] = []

    def write() -> None:
        with path.open("a") as file:
            for row in rows[5:]:
                file.write(row[:20])
                file.flush()
                time.sleep(0.005)
                file.write(row[20:])
                file.flush()

    writer = threading.Thread(target=write)
    writer.start()
    report = logs.judged(path, follow_idle_s=1.5, watch=lambda what, incident, step: seen.append((what, incident.rule)))
    writer.join()
    assert (report.steps, report.verdict) == (60, "critical")
    assert ("open", "entropy_blowup") in seen
    assert seen.index(("open", "entropy_blowup")) < seen.index(("open", "reward_collapse"))


def test_a_followed_log_may_begin_empty_and_with_half_a_line(tmp_path):
    path = tmp_path / "live.jsonl"
    path.touch()
    rows = [json.dumps(logs.trl(r)) + "\n" for r in logs.steps(10)]

    def write() -> None:
        for piece in (rows[0][:20], rows[0][20:] + "".join(rows[1:])):
            time.sleep(0.4)
            with path.open("a") as file:
                file.write(piece)

    writer = threading.Thread(target=write)
    writer.start()
    report = logs.judged(path, follow_idle_s=2.0)
    writer.join()
    assert (report.format, report.steps) == ("jsonl", 10)


def test_a_followed_file_that_shrinks_is_begun_anew(tmp_path):
    path = tmp_path / "live.jsonl"
    rows = [json.dumps(logs.trl(r)) + "\n" for r in logs.steps(40)]
    path.write_text("".join(rows[:30]))
    timer = threading.Timer(0.7, lambda: path.write_text("".join(rows[:12])))
    timer.start()
    report = logs.judged(path, follow_idle_s=1.5)
    timer.join()
    assert (report.steps, report.attempts) == (42, 2)
