"""Logs as people really have them: other encodings, other spellings, wrapped, packed, out of order, nearly empty."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from foreshock_service.check.judge import Report
from tests.service.check import logs

ILL = list(logs.steps(break_at=40))
TRL = [logs.trl(r) for r in ILL]
JSONL = "\n".join(map(json.dumps, TRL))


def jsonl(change: Callable[[dict[str, float]], object]) -> str:
    return "\n".join(json.dumps(change(dict(row))) for row in TRL)


def table(separator: str = ",", head: str = "step,reward,entropy", cell: Callable[[float], str] = str) -> str:
    rows = (separator.join([str(r["step"]), cell(r["reward"]), cell(r["entropy"])]) for r in ILL)
    return "\n".join([head.replace(",", separator), *rows])


def verl(copies: int = 1, between: str = "") -> str:
    lines = []
    for r in ILL:
        told = " - ".join(f"{k}:{v}" for k, v in logs.verl(r).items())
        lines += [f"(TaskRunner pid={411 + i}) step:{r['step']} - {told}" for i in range(copies)] + [between]
    return "\n".join(lines)


def long_table(by_metric: bool) -> str:
    order = [(r["step"], name, r[name]) for r in ILL for name in ("reward", "entropy", "kl")]
    order.sort(key=lambda t: (t[1], t[0]) if by_metric else t[0])  # type: ignore[arg-type, return-value]
    return "wall_time,step,tag,value\n" + "\n".join(f"1.7e9,{s},{n},{v}" for s, n, v in order)


WITHOUT_STEP = [{k: v for k, v in row.items() if k != "step"} for row in TRL]
READ: dict[str, str | bytes] = {
    "Windows line ends": JSONL.replace("\n", "\r\n"),
    "blank lines": JSONL.replace("\n", "\n\n\n"),
    "Latin-1": b'{"note": "caf\xe9"}\n' + JSONL.encode(),
    "GBK between the steps": "显存不足\n".encode("gbk") + verl().encode(),
    "UTF-16 without a mark": JSONL.encode("utf-16-le"),
    "big-endian UTF-16 without a mark": table().encode("utf-16-be"),
    "UTF-32": JSONL.encode("utf-32"),
    "a hole of NULs": JSONL.replace("\n", "\n" + "\x00" * 9000, 1),
    "record separators": "".join(f"\x1e{line}\n" for line in JSONL.split("\n")),
    "keys that come twice": "\n".join('{"reward": -5, ' + line[1:] for line in JSONL.split("\n")),
    "steps as texts": jsonl(lambda r: r | {"step": str(r["step"])}),
    "steps as floats": jsonl(lambda r: r | {"step": float(r["step"])}),
    "steps in scientific notation": jsonl(lambda r: r | {"step": f"{r['step']:.3e}"}),
    "steps of another scale": jsonl(lambda r: r | {"step": 1e6 * r["step"]}),
    "steps beyond any number": jsonl(lambda r: r | {"step": 10**17 + r["step"]}),
    "steps as fractions": jsonl(lambda r: r | {"step": f"{r['step']}/60"}),
    "integers of 400 digits": jsonl(lambda r: r | {"num_tokens": 10**400, "seed": 2**80}),
    "booleans": jsonl(lambda r: r | {"done": False, "converged": True}),
    "lists of one": jsonl(lambda r: {k: [v] for k, v in r.items()}),
    "nested": jsonl(lambda r: {"step": r["step"], "metrics": {"train": {k: r[k] for k in ("reward", "entropy")}}}),
    "nested beyond reading": jsonl(lambda r: {"a": {"b": {"c": {"d": {"e": {"reward": 1.0}}}}}, **r}),
    "histograms": jsonl(lambda r: r | {"h": {"_type": "histogram", "bins": [1, 2, 3], "values": [1, 2]}}),
    "null between": JSONL.replace("\n", "\nnull\n"),
    "pretty objects in a row": "\n".join(json.dumps(row, indent=2) for row in TRL),
    "an array with a comma too many": f"[{JSONL.replace(chr(10), ',')},]",
    "JSON behind a time": "\n".join(f"2026-01-01T00:00:00Z INFO train.py:3 {line}" for line in JSONL.split("\n")),
    "a container's line": "\n".join(f"2026-01-01T00:00:00.0Z stdout F {line}" for line in JSONL.split("\n")),
    "decimal commas": table(";", cell=lambda x: str(x).replace(".", ",")),
    "a comment above the header": "# exported\n# v2\n" + table(),
    "quoted thousands": "\n".join(
        f'{line},"1,234"' if i else f"{line},n" for i, line in enumerate(table().split("\n"))
    ),
    "an index column": "\n".join(f"{i},{line}" if i else f",{line}" for i, line in enumerate(table().split("\n"))),
    "one number a record, by step": long_table(by_metric=False),
    "one number a record, by name": long_table(by_metric=True),
    "every rank's line": verl(copies=3),
    "ranks between": verl(between="\x1b[36m(WorkerDict pid=7)\x1b[0m rank 1: loss 3 [repeated 7x across cluster]"),
    "two gzip members": gzip.compress(JSONL[:4000].encode()) + gzip.compress(JSONL[4000:].encode()),
}


@pytest.mark.parametrize("name", READ)
def test_an_odd_log_is_read_like_any_other(name: str, tmp_path: Path) -> None:
    report = judged(READ[name], tmp_path)
    assert (report.steps, report.attempts, report.verdict) == (60, 1, "critical"), report.problem or report.notes
    assert {"entropy_blowup", "reward_collapse"} <= set(logs.rules(report))


def archive(kind: str) -> bytes:
    data = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(data, "w") as packed:
            packed.writestr("run/metrics.jsonl", JSONL)
    else:
        with tarfile.open(fileobj=data, mode="w") as tape:
            tape.addfile(tarfile.TarInfo("metrics.jsonl"))
    return data.getvalue()


def hash_of(line: str) -> int:
    """Some order that is the same every time."""
    return int.from_bytes(line.encode()) % 1009


SAID: dict[str, tuple[str | bytes, str]] = {
    "ZIP": (archive("zip"), "unpack it"),
    "tar": (archive("tar"), "unpack it"),
    "tar in gzip": (gzip.compress(archive("tar")), "unpack it"),
    "bzip2": (bz2.compress(JSONL.encode()), "unpack it"),
    "xz": (lzma.compress(JSONL.encode()), "unpack it"),
    "gzip twice": (gzip.compress(gzip.compress(JSONL.encode())), "gzip within gzip"),
    "Docker's JSON": (
        "\n".join(json.dumps({"log": line + "\n", "stream": "stdout", "time": "t"}) for line in JSONL.split("\n")),
        "unwrap it",
    ),
    "the newest first": ("\n".join(JSONL.split("\n")[::-1]), "sort the rows by step"),
    "in no order": ("\n".join(sorted(JSONL.split("\n"), key=hash_of)), "sort the rows by step"),
    "a step that stands still": (jsonl(lambda r: r | {"step": 5}), "the same step number"),
    "booleans only": ("step,ok\n" + "\n".join(f"{i},True" for i in range(20)), "no training step"),
    "a web page": ("<html><body>404: reward 0, step 3</body></html>", "no training step"),
    "a program": ("import os\nreward = 3\nprint('loss: 3')\n", "no training step"),
    "blank": ("\n \n\t\n", "no training step"),
}


@pytest.mark.parametrize("name", SAID)
def test_what_cannot_be_judged_says_why_and_what_would_help(name: str, tmp_path: Path) -> None:
    data, why = SAID[name]
    report = judged(data, tmp_path)
    assert report.verdict == "unreadable"
    assert why in (report.problem or "")


def test_lines_of_two_ranks_without_step_numbers_are_one_step(tmp_path: Path) -> None:
    lines = [f"[rank{rank}]: {row}" for row in WITHOUT_STEP for rank in range(2)]
    report = judged("\n".join(lines), tmp_path)
    assert report.steps in (60, 61)  # until a first line differs, two alike may be a run that stands still
    assert any("another rank" in note for note in report.notes)


def test_a_run_that_stands_still_keeps_its_lines(tmp_path: Path) -> None:
    assert judged("\n".join([str(WITHOUT_STEP[0])] * 30), tmp_path).steps == 30


def test_a_step_that_counts_within_epochs_begins_attempts(tmp_path: Path) -> None:
    well = [logs.trl(r) for r in logs.steps()]
    rows = (json.dumps(row | {"step": int(row["step"] - 1) % 20 + 1}) for row in well)
    report = judged("\n".join(rows), tmp_path)
    assert (report.steps, report.attempts, report.verdict) == (60, 3, "healthy")


def judged(data: str | bytes, folder: Path) -> Report:
    path = folder / "log"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return logs.judged(path)
