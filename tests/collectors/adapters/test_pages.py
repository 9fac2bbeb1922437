"""Every host has its page, and what the page says of commands is what the adapter says."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from foreshock.adapters.pages import rewritten
from foreshock.adapters.registry import HOSTS, Host
from foreshock.wire.commands import COMMAND_KINDS

PAGES = Path(__file__).parents[3] / "docs" / "hosts"
BY_NAME = pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.name)


@BY_NAME
def test_a_page_holds_the_adapters_own_table(host: Host) -> None:
    page = (PAGES / f"{host.name}.md").read_text(encoding="utf-8")
    assert rewritten(page, host.name) == page, "run python -m foreshock.adapters.pages"


@BY_NAME
def test_an_adapter_says_of_every_command_whether_it_can(host: Host) -> None:
    adapter = import_module(host.module)
    assert set(adapter.CAPABILITIES) | set(adapter.IMPOSSIBLE) == set(COMMAND_KINDS)
    assert not set(adapter.CAPABILITIES) & set(adapter.IMPOSSIBLE)


def test_there_is_no_page_without_an_adapter() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} - {"README"} == {host.name for host in HOSTS}
