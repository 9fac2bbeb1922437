"""What the demo says while it runs where nobody looks on at a terminal."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from foreshock_service.demo import screen


def health(step: int, verdict: str = "healthy") -> dict[str, Any]:
    return {"last_step": step, "verdict": verdict}


def test_without_a_terminal_a_line_is_written_when_something_changed_and_only_then() -> None:
    out = io.StringIO()
    with screen.progress(Console(file=out, width=120), ["ill"], steps=40) as show:
        show("ill", None, "")
        show("ill", health(3), "")
        show("ill", health(4), "")
        show("ill", health(5, "critical"), "rollout_mismatch since step 5")
        show("ill", health(6, "critical"), "rollout_mismatch since step 5")
        show("ill", health(21, "critical"), "rollout_mismatch since step 5")
        show("ill", health(40), "")
    lines = out.getvalue().splitlines()
    assert [line.split("step")[1].split("/")[0].strip() for line in lines] == ["3", "5", "21", "40"]
    assert "critical" in lines[1]
    assert "rollout_mismatch since step 5" in lines[1]


def test_at_a_terminal_each_run_has_a_bar_with_its_verdict() -> None:
    out = io.StringIO()
    console = Console(file=out, width=140, force_terminal=True)
    with screen.progress(console, ["healthy", "ill"], steps=40) as show:
        show("healthy", health(40), "")
        show("ill", health(20, "critical"), "frozen_update since step 12")
    text = out.getvalue()
    assert "frozen_update since step 12" in text
    assert "40/40" in text
