"""What is not there is said, and a placeholder never answers in a real module's place."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.roll_onpolicy import source
from lab.roll_onpolicy.megatron_rungs import CONDITIONS, run


def test_a_folder_that_is_no_checkout_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no ROLL checkout"):
        source.load(str(tmp_path))


def test_a_placeholder_can_be_imported_from_and_raises_when_used() -> None:
    module = source._Placeholder("absent.package")
    with pytest.raises(source.PlaceholderUsedError, match=r"absent\.package\.Thing is not installed"):
        module.Thing()


def test_a_megatron_rung_without_megatron_is_written_down_as_not_run() -> None:
    homes = {"old": "x", "december": "x", "current": "x"}
    for condition in CONDITIONS:
        assert run(condition, homes, {}, "python")["not_run"].startswith("megatron-core absent")
        assert "ROLL source" in run(condition, {}, {}, "python")["not_run"]
