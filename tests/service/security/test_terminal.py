"""Words of clients and files reach people's terminals and logs as words."""

from __future__ import annotations

import io
import logging
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.markup import escape
from rich.text import Text

import foreshock_service
from foreshock_service.cli.console import SafeConsole
from foreshock_service.cli.out import say
from foreshock_service.terminal import OneLine, one_line, safe

ACTS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
CLI = Path(foreshock_service.__file__).parent / "cli"


@given(st.text(max_size=400))
def test_nothing_acts_and_nothing_is_changed_twice(text: str) -> None:
    assert ACTS.search(safe(text)) is None
    assert safe(safe(text)) == safe(text)
    assert len(one_line(text).splitlines()) <= 1


def test_words_stay_words() -> None:
    for text in ("reward 0.5", "权重过期 δ–σ", "a\tb\nc", "é"):
        assert safe(text) == text
    assert one_line("a\nb") == "a\\nb"


def test_a_table_of_hostile_cells_paints_nothing() -> None:
    file = io.StringIO()
    console = SafeConsole(file=file, force_terminal=False, width=200)
    console.print(Text("\x1b]0;owned\x07 \u202egpj"))
    console.print(escape("\x1b[2J[red]x"))
    assert ACTS.search(file.getvalue()) is None
    assert "\\x1b]0;owned" in file.getvalue()


def test_say_writes_escapes_out(capsys: pytest.CaptureFixture[str]) -> None:
    say("a\x1b[2Jb")
    assert capsys.readouterr().out == "a\\x1b[2Jb\n"


def test_every_sub_command_prints_through_the_safe_door() -> None:
    allowed = {"out.py", "console.py", "table.py", "demo.py"}
    for path in CLI.glob("*.py"):
        if path.name not in allowed:
            assert not re.search(r"typer\.echo\(|(?<![\w.])print\(|(?<!Safe)Console\(", path.read_text()), path.name


def logged(text: str, error: Exception | None = None) -> str:
    told = (type(error), error, None) if error else None
    record = logging.LogRecord("foreshock", logging.INFO, "x.py", 1, "said %s", (text,), told)
    return OneLine("%(levelname)s %(message)s").format(record)


def test_a_record_is_one_line_and_holds_no_secret() -> None:
    assert logged("x\nINFO forged\x1b[2J").splitlines() == ["INFO said x\\nINFO forged\\x1b[2J"]
    assert "hunter2" not in logged("postgresql://u:hunter2@db/x")


def test_a_traceback_forges_no_record_and_tells_no_secret() -> None:
    text = logged("x", ValueError("bad\nINFO forged password=hunter2"))
    assert all(not line.startswith("INFO forged") for line in text.splitlines())
    assert "hunter2" not in text
