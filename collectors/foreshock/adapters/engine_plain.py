"""The least HTTP client there is: for scripts and tests, and for what a watch asks an engine by itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

import urllib3

from foreshock.adapters.engine_answers import Json
from foreshock.adapters.engine_weights import Digests

ASK_TIMEOUT_S: Final = 120.0
"""Longest wait for an engine's checksums."""
Questions = Callable[[Callable[[str], Any], Callable[[str, Json], Any], bool], Any]
"""(get, post, with digests) → (digests, label)."""


class PlainClient:
    """The least client there is, for scripts and tests: `post("/generate", {…})` → (status, decoded JSON)."""

    def __init__(self, url: str, timeout_s: float = 600.0, headers: Mapping[str, str] | None = None) -> None:
        self.url = url.rstrip("/")
        self._pool = urllib3.PoolManager(retries=False, timeout=timeout_s, headers=dict(headers or {}))

    def request(self, method: str, url: str, **kwargs: Any) -> urllib3.BaseHTTPResponse:
        """One request; `json` is its body."""
        return self._pool.request(method, url, **kwargs)

    def post(self, path: str, body: Json | None = None) -> tuple[int, Any]:
        """Status, and the decoded answer (its text where it is no JSON)."""
        return _read(self.request("POST", self.url + path, json=dict(body or {})))

    def get(self, path: str) -> tuple[int, Any]:
        """As `post`."""
        return _read(self.request("GET", self.url + path))


def _read(response: urllib3.BaseHTTPResponse) -> tuple[int, Any]:
    text = response.data.decode("utf-8", "replace")
    try:
        return response.status, json.loads(text)
    except ValueError:
        return response.status, text


class Asker:
    """Asks the engine at `origin` for its digests and label, with the host's own credentials."""

    def __init__(self, origin: str, headers: Mapping[str, str], ask: Questions) -> None:
        self._client = PlainClient(origin, ASK_TIMEOUT_S, headers)
        self._questions = ask
        self._absent: set[str] = set()

    def __call__(self, digests: bool) -> tuple[Digests | None, str | None]:
        found: tuple[Digests | None, str | None] = self._questions(self._get, self._post, digests)
        return found

    def _get(self, path: str) -> Any:
        return self._once(path, lambda: self._client.get(path))

    def _post(self, path: str, body: Json) -> Any:
        return self._once(path, lambda: self._client.post(path, body))

    def _once(self, path: str, ask: Callable[[], tuple[int, Any]]) -> Any:
        """The answer, or None; a route that is not there is not asked for again."""
        if path in self._absent:
            return None
        try:
            status, answer = ask()
        except urllib3.exceptions.HTTPError:
            return None
        if status in (404, 405, 501):
            self._absent.add(path)
        return answer if status == 200 else None
