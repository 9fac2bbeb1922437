"""Debian's Chromium through Playwright, quiet and offline: whatever a page asks of another host is refused."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1")


def chromium() -> str | None:
    """The program's path."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@contextmanager
def browser() -> Iterator[Browser]:
    """Raises RuntimeError where no Chromium is installed."""
    program = chromium()
    if program is None:
        raise RuntimeError("needs Chromium (Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=program, args=list(ARGUMENTS))
        try:
            yield launched
        finally:
            launched.close()
