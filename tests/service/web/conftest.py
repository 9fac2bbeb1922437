"""A real service on a port, and Debian's Chromium looking at it. Every page must keep quiet: no error on the console,
no request to another host, no dialog.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from foreshock_service.api import tokens
from foreshock_service.api.rooms import Rooms
from tests.servers import find_binary, free_port, wait_for
from tests.service.api.conftest import settings_for
from tests.service.conftest import Trainer
from tests.service.replica import Replica

PATIENCE_MS = 30_000
"""Longer than any wait on a busy machine: what a test promises is that it happens, never how soon."""
expect.set_options(timeout=PATIENCE_MS)
CAPABILITIES = ["scale_lr", "rollback", "pause"]


class Site:
    """One running service and the trainers that post to it."""

    def __init__(self, database_url: str) -> None:
        self.settings = settings_for(database_url, port=free_port(), default_mode="approve")
        self.url = f"http://127.0.0.1:{self.settings.port}"
        self.http = httpx.Client(base_url=self.url, trust_env=False, timeout=30)
        self.trainers: dict[str, Trainer] = {}
        self.start()

    def start(self) -> None:
        self.replica = Replica(self.settings)

    def stop(self) -> None:
        self.replica.stop()

    @property
    def rooms(self) -> Rooms:
        rooms: Rooms = self.replica.app.state.rooms
        return rooms

    def step(self, step: int, scalars: dict[str, Any], run: str = "math/q") -> None:
        """Posts one step and waits until it is evaluated."""
        trainer = self.trainers.get(run)
        items = []
        if trainer is None:
            trainer = self.trainers[run] = Trainer(run)
            data = {"mode": "approve", "capabilities": CAPABILITIES, "config": {}, "settings": {}}
            items.append(trainer.notice("started", data))
        items.append(trainer.frame(step, scalars))
        envelope = trainer.envelope(*items, controller=True, expected_ranks={"trainer": 1})
        body = msgspec.msgpack.encode(envelope)
        answer = self.http.post("/v1/ingest", content=body, headers={"Content-Type": "application/msgpack"})
        assert answer.status_code == 200, answer.text
        wait_for(lambda: self.run(run).get("last_step") == step)

    def run(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get(f"/v1/runs/{name}").json()
        return found

    def fall_ill(self, run: str = "math/q", step: int = 2) -> str:
        """A step with a NaN in it; the id of the incident."""
        self.step(step, {"loss": float("nan"), "reward.mean": 0.5}, run)
        found = wait_for(lambda: self.http.get("/v1/incidents", params={"run": run}).json()["incidents"])
        return str(found[0]["id"])

    def propose(self, run: str = "math/q", reason: str = "the gradient grew") -> str:
        """A command that waits for a person; its id."""
        body = {"actions": [{"kind": "scale_lr", "arguments": {"factor": 0.5}}], "reason": reason}
        answer = self.http.post(f"/v1/runs/{run}/commands", json=body)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def token(self, *scopes: str, project: str | None = None) -> str:
        with self.rooms.store.write() as session:
            made = tokens.create(session, name="t", scopes=list(scopes), project=project, expires_at=None, actor="test")
        return made[1]


@pytest.fixture
def site(migrated_sqlite_url: str) -> Iterator[Site]:
    """A service of the test's own, on SQLite."""
    opened = Site(migrated_sqlite_url)
    yield opened
    opened.http.close()
    opened.stop()


@pytest.fixture(scope="module")  # while it lives, this thread has a running event loop, and `asyncio.run` fails in it
def chromium() -> Iterator[Browser]:
    """One browser for all tests. Skips without Chromium, and fails in CI."""
    program = find_binary("chromium", "chromium")
    # Whatever is not this machine does not exist: a request to elsewhere fails, and shows.
    arguments = ["--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=arguments)
        yield browser
        browser.close()


class Watch:
    """What pages did that they should not."""

    def __init__(self, own: str) -> None:
        self.own = own
        self.complaints: list[str] = []
        self.expected: list[str] = []
        """Parts of complaints that the test provokes."""

    def over(self, page: Page) -> None:
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on("request", self._request)
        page.on("dialog", self._dialog)

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.type}: {message.text}")

    def _request(self, request: Any) -> None:
        if not request.url.startswith(self.own):
            self.complaints.append(f"request: {request.url}")

    def _dialog(self, dialog: Any) -> None:
        self.complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def check(self) -> None:
        left = [c for c in self.complaints if not any(e in c for e in self.expected)]
        assert left == []


NewContext = Callable[..., BrowserContext]


@pytest.fixture
def watch(site: Site) -> Watch:
    return Watch(site.url)


@pytest.fixture
def new_context(chromium: Browser, site: Site, watch: Watch) -> Iterator[NewContext]:
    """Makes a visitor with cookies and a window of his own; his pages are watched."""
    made: list[BrowserContext] = []

    def make(width: int = 1280, height: int = 800, **options: Any) -> BrowserContext:
        viewport = {"width": width, "height": height}
        context = chromium.new_context(base_url=site.url, viewport=viewport, **options)  # type: ignore[arg-type]
        context.set_default_timeout(PATIENCE_MS)
        context.on("page", watch.over)
        made.append(context)
        return context

    yield make
    for context in made:
        context.close()
    watch.check()


@pytest.fixture
def page(new_context: NewContext) -> Page:
    """One tab of a visitor on this machine."""
    return new_context().new_page()


def drawn(page: Page) -> None:
    """Waits until the charts are there."""
    page.wait_for_selector("#charts[data-state=drawn]")


def live(page: Page) -> None:
    """Waits until news come."""
    page.wait_for_selector("#live.on")


__all__ = ["NewContext", "Site", "Watch", "drawn", "live"]
