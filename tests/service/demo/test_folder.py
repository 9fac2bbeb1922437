"""A demo in a folder that held one before: its runs have the same names, so the old ones must be gone."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from foreshock_service.cli import main
from foreshock_service.demo.processes import DemoError, clear


def test_what_an_earlier_demo_left_is_gone_and_nothing_else(tmp_path: Path) -> None:
    for name in ("foreshock.db", "foreshock.db-wal", "service.log", "healthy.json", "treated.log", "mine.txt"):
        (tmp_path / name).write_text("old")
    (tmp_path / "checkpoints" / "healthy").mkdir(parents=True)
    (tmp_path / "spool").mkdir()
    clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_folder_whose_service_still_runs_is_refused(tmp_path: Path) -> None:
    database = tmp_path / "foreshock.db"
    database.write_text("in use")
    with (tmp_path / "foreshock.db.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DemoError, match="choose another --out"):
            clear(tmp_path)
    assert database.exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--illness", "flu"], "unknown illness"),
        (["--mode", "bold"], "unknown mode"),
        (["--steps", "30", "--onset", "25"], "fewer than ten ill steps"),
    ],
)
def test_what_cannot_be_shown_is_refused_before_anything_starts(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--out", str(tmp_path / "out"), *arguments])
    assert ended.value.code == 2
    assert says in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert not (tmp_path / "out").exists()
