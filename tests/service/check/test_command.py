"""`foreshock check` from outside: exit codes, JSON, plot, rules, follow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.service.check import logs


def foreshock(*arguments: object, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "foreshock_service.cli", "check", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, input=stdin)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ill.jsonl, well.jsonl and empty.jsonl."""
    path = tmp_path_factory.mktemp("logs")
    (path / "ill.jsonl").write_text("\n".join(json.dumps(logs.trl(r)) for r in logs.steps(break_at=40)))
    (path / "well.jsonl").write_text("\n".join(json.dumps(logs.trl(r)) for r in logs.steps()))
    (path / "empty.jsonl").touch()
    return path


def test_exit_code_and_json_agree(folder):
    for name, code, verdict in (("well", 0, "healthy"), ("ill", 1, "critical"), ("empty", 2, "unreadable")):
        done = foreshock(folder / f"{name}.jsonl", "--json")
        said = json.loads(done.stdout)
        assert (done.returncode, said["verdict"]) == (code, verdict), done.stderr
        assert list(said) == ["verdict", "format", "steps", "incidents"]
    assert "empty" in done.stderr


def test_several_logs_give_a_list_and_the_gravest_exit_code(folder):
    done = foreshock(folder / "well.jsonl", folder / "ill.jsonl", "--json")
    assert [said["verdict"] for said in json.loads(done.stdout)] == ["healthy", "critical"]
    assert done.returncode == 1
    assert foreshock(folder / "empty.jsonl", folder / "ill.jsonl").returncode == 2


def test_people_read_the_story_its_meaning_and_what_to_do(folder):
    done = foreshock(folder / "ill.jsonl")
    assert "CRITICAL" in done.stdout
    assert "Entropy up from step 4" in done.stdout
    assert ", reward broke at 4" in done.stdout
    assert "What it means:" in done.stdout
    assert "What to do:" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_picture_is_drawn(folder, tmp_path):
    done = foreshock(folder / "ill.jsonl", "--plot", tmp_path / "out.png")
    assert done.returncode == 1, done.stderr
    data = (tmp_path / "out.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 20_000
    done = foreshock(folder / "ill.jsonl", "--plot", tmp_path / "no" / "such" / "folder.png")
    assert done.returncode == 2
    assert "folder.png" in done.stderr


def test_a_pack_of_ones_own_is_laid_over_the_shipped_one(folder, tmp_path):
    pack = tmp_path / "mine.yaml"
    pack.write_text("version: 1\nrules:\n  reward_collapse: {enabled: false}\n  entropy_blowup: {enabled: false}\n")
    said = json.loads(foreshock(folder / "ill.jsonl", "--json", "--rules", pack).stdout)
    assert not {i["rule"] for i in said["incidents"]} & {"reward_collapse", "entropy_blowup"}
    pack.write_text("version: 1\nrules:\n  reward_colapse: {}\n")
    done = foreshock(folder / "ill.jsonl", "--rules", pack)
    assert done.returncode == 2
    assert "did you mean `reward_collapse`" in done.stderr


def test_a_followed_log_tells_what_happens_and_ends_when_idle(folder):
    done = foreshock(folder / "ill.jsonl", "--follow", "--idle-s", "0.5")
    assert done.returncode == 1, done.stderr
    assert "entropy_blowup  Entropy is" in done.stdout
    assert done.stdout.index("entropy_blowup") < done.stdout.index("CRITICAL")


def test_standard_input_is_a_log(folder):
    done = foreshock("-", "--json", stdin=(folder / "ill.jsonl").read_text())
    assert json.loads(done.stdout)["steps"] == 60


def test_verbose_shows_where_each_signal_was_read_from(folder):
    done = foreshock(folder / "well.jsonl", "--verbose")
    assert "completions/mean_length" in done.stdout
    assert "length.mean" in done.stdout
