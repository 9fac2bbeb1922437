"""`foreshock doctor`: 0 nothing wrong, 1 findings, 2 unreadable; JSON by contract."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foreshock_service.cli import main

HERE = Path(__file__).parent


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *arguments])
    return int(ended.value.code or 0)


@pytest.fixture(autouse=True)
def _no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROLL_HOME", raising=False)


def test_the_consistent_configuration_ends_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(HERE / "consistent.yaml"), "--roll-version", "v0.2.0") == 0
    assert "0 to change" in capsys.readouterr().out


def test_findings_end_with_1_and_name_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(HERE / "onpolicy.yaml"), "--roll-commit-date", "2025-11-28") == 1
    out = capsys.readouterr().out
    line = next(n for n, text in enumerate((HERE / "onpolicy.yaml").read_text().splitlines(), 1) if "top_k" in text)
    assert f"onpolicy.yaml:{line}  line {line}: actor_infer.generating_args.top_k: 100" in out


def test_json_has_the_fields_of_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(HERE / "onpolicy.yaml"), "--json") == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert findings
    for finding in findings:
        assert finding.keys() >= {"id", "severity", "title", "path", "line", "evidence", "remedy"}


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("a: [", [], "no valid YAML"), ("a: 1", [], "no configuration that is known"),
        ("{actor_train: 1, actor_infer: 1}", ["--roll-version", "v9"], "is not known"),
        ("{actor_train: 1, actor_infer: 1}", ["--roll-commit-date", "soon"], "must be as 2025-11-28"),
        ("{actor_train: 1, actor_infer: 1}", ["--roll-home", "/nowhere"], "no ROLL checkout"),
        ("{actor_train: 1, actor_infer: 1}", ["--roll-version", "v0.2.0", "--roll-home", "/"], "one of"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_ends_with_2_and_says_why(
    text: str, options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert run(str(path), *options) == 2
    assert message in capsys.readouterr().err


def test_an_odd_but_readable_roll_file_is_examined(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("{actor_train: 1, actor_infer: [2], rollout_batch_size: many, device_mapping: 3}")
    assert run(str(path)) == 1
