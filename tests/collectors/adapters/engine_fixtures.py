"""Recorded answers of the real engines, replayed to HTTP clients as a server would give them.

`tests/engines/record.py` recorded those beside this file. More, where FORESHOCK_ENGINE_FIXTURES names a folder (default
a sibling folder `../shared/fixtures/engines`).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import httpx

OWN = Path(__file__).with_name("engine_answers")
OTHERS = Path(
    os.environ.get("FORESHOCK_ENGINE_FIXTURES", Path(__file__).parents[4] / "shared" / "fixtures" / "engines")
)


def recorded(name: str | Path) -> dict[str, Any]:
    """{url, status, content_type, request, body} of one recorded exchange, of ours by name, of others by path."""
    path = OWN / f"{name}.json" if isinstance(name, str) else name
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found | {"url": "/" + found["url"].lstrip("/")}


def others(engine: str) -> list[Path]:
    """Further recordings of an engine's answers with log-probs; none where the folder is absent."""
    found = sorted(OTHERS.glob(f"{engine}_*.json")) if OTHERS.is_dir() else []
    return [path for path in found if "logprob" in path.read_text(encoding="utf-8")]


class Replay:
    """A server that answers as recorded, and keeps what it was sent: path → recorded name or (status, body)."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.sent: list[tuple[str, Any]] = []
        self.transport = httpx.MockTransport(self._answer)

    def client(self) -> httpx.Client:
        return httpx.Client(transport=self.transport, base_url="http://engine:1")

    def async_client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=self.transport, base_url="http://engine:1")

    def _answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.sent.append((path, json.loads(request.content) if request.content else None))
        answer = self.answers[path]
        if callable(answer):
            answer = answer(self.sent[-1][1])
        if isinstance(answer, str | Path):
            said = recorded(answer)
            # In pieces, as a network would deliver a stream.
            body = said["body"].encode()
            pieces = [body[n : n + 700] for n in range(0, len(body), 700)]
            headers = {"Content-Type": said["content_type"]}
            return httpx.Response(said["status"], headers=headers, stream=_Pieces(pieces))
        status, body = answer
        return httpx.Response(status, json=body)


class _Pieces(httpx.SyncByteStream, httpx.AsyncByteStream):
    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def __iter__(self) -> Any:
        return iter(self.pieces)

    async def __aiter__(self) -> Any:
        for piece in self.pieces:
            yield piece
