"""A fake Slack: a real HTTP server with the Web API methods that the channel calls, shaped as docs.slack.dev has them.

It keeps messages, edits, whispers and files, refuses what Slack's published limits forbid, and can be told to
rate-limit, refuse, stall or reset. It is not Slack: what Slack does beyond its documentation is not in it.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from email import message_from_bytes
from email.policy import HTTP
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs

from benchmarks.alerts.sink import Server

TOKEN = "xoxb-1-s3cret"
CHANNEL = "C0123456789"


def block_errors(blocks: list[dict[str, Any]]) -> list[str]:
    """What the published Block Kit reference forbids in these blocks (docs.slack.dev/reference/block-kit)."""
    wrong = ["too many blocks"] if len(blocks) > 50 else []
    for block in blocks:
        kind, text = block.get("type"), block.get("text", {})
        if kind == "header":
            wrong += ["header"] if text.get("type") != "plain_text" or not 1 <= len(text["text"]) <= 150 else []
        elif kind == "section":
            wrong += ["section"] if not 1 <= len(text.get("text", "")) <= 3000 else []
        elif kind == "context":
            wrong += ["context"] if not 1 <= len(block["elements"]) <= 10 else []
        elif kind == "actions":
            wrong += ["actions"] if not 1 <= len(block["elements"]) <= 25 else []
            for element in block["elements"]:
                good = element["type"] == "button" and element["text"]["type"] == "plain_text"
                good &= len(element["text"]["text"]) <= 75 and len(element.get("value", "")) <= 2000
                good &= len(element["action_id"]) <= 255 and element.get("style") in (None, "primary", "danger")
                confirm = element.get("confirm")
                if confirm:
                    good &= len(confirm["title"]["text"]) <= 100 and len(confirm["text"]["text"]) <= 300
                    good &= len(confirm["confirm"]["text"]) <= 30 and len(confirm["deny"]["text"]) <= 30
                wrong += [] if good else ["button"]
            ids = [e["action_id"] for e in block["elements"]]
            wrong += ["action ids"] if len(set(ids)) != len(ids) else []
        else:
            wrong.append(f"unknown block {kind}")
        wrong += ["block_id"] if len(block.get("block_id", "")) > 255 else []
    ids = [b["block_id"] for b in blocks if "block_id" in b]
    return wrong + (["block ids"] if len(set(ids)) != len(ids) else [])


def all_text(value: Any) -> str:
    """Every text in some blocks."""
    if isinstance(value, dict):
        own = [value["text"]] if isinstance(value.get("text"), str) else []
        return "\n".join([*own, *(t for v in value.values() if (t := all_text(v)))])
    return "\n".join(t for v in value if (t := all_text(v))) if isinstance(value, list) else ""


@dataclass
class Post:
    """A message as it stands now."""

    ts: str
    channel: str
    text: str
    blocks: list[dict[str, Any]]
    thread_ts: str | None = None
    edits: int = 0

    @property
    def words(self) -> str:
        return all_text(self.blocks)

    @property
    def buttons(self) -> list[dict[str, Any]]:
        return [e for b in self.blocks if b["type"] == "actions" for e in b["elements"]]


@dataclass
class FakeSlack:
    """`url` is its Web API. `trouble` is what the next calls meet: a word of Slack's, or a callable on the handler."""

    posts: list[Post] = field(default_factory=list)
    whispers: list[dict[str, Any]] = field(default_factory=list)
    files: list[dict[str, Any]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    """The words of every message as it was when it was posted, in order."""
    trouble: deque[Any] = field(default_factory=deque)
    refuse: dict[str, Any] = field(default_factory=dict)
    """Method, or `*` for all → the same, for as long as it stands there."""
    _uploads: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        slack = self
        self._lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with slack._lock:
                    trouble = slack._met(self.path)
                if callable(trouble):
                    trouble(self)
                    return
                with slack._lock:
                    slack._serve(self, body, trouble)

            def log_message(self, *_: Any) -> None: ...

        self.server = Server(("127.0.0.1", 0), Handler)
        self.root = f"http://127.0.0.1:{self.server.server_port}"
        self.url = f"{self.root}/api/"
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    @property
    def heads(self) -> list[Post]:
        """What stands in the channel itself."""
        return [p for p in self.posts if p.thread_ts is None]

    def thread(self, ts: str) -> list[Post]:
        return [p for p in self.posts if p.thread_ts == ts]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()

    def _met(self, path: str) -> Any:
        if path.startswith("/upload/"):
            return None
        method = path.removeprefix("/api/")
        self.calls.append(method)
        return self.refuse.get("*") or self.refuse.get(method) or (self.trouble.popleft() if self.trouble else None)

    def _serve(self, handler: Any, body: bytes, trouble: str | None) -> None:
        if handler.path.startswith("/upload/"):
            self._uploads[handler.path.rsplit("/", 1)[1]]["data"] = body
            handler.send_response(200)
            handler.send_header("Content-Length", "2")
            handler.end_headers()
            handler.wfile.write(b"OK")
            return
        method = handler.path.removeprefix("/api/")
        if isinstance(trouble, str):
            answer: dict[str, Any] = {"ok": False, "error": trouble}
        elif handler.headers.get("Authorization") != f"Bearer {TOKEN}":
            answer = {"ok": False, "error": "invalid_auth"}
        else:
            answer = getattr(self, "_" + method.replace(".", "_"))(_arguments(handler, body))
        _answer(handler, 200, answer)

    def _chat_postMessage(self, asked: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        if error := self._refusal(asked):
            return {"ok": False, "error": error}
        thread = asked.get("thread_ts")
        if thread and not any(p.ts == thread for p in self.heads):
            return {"ok": False, "error": "thread_not_found"}
        ts = f"{1_700_000_000 + len(self.posts)}.{len(self.posts):06d}"
        self.told.append(all_text(asked["blocks"]))
        self.posts.append(Post(ts, asked["channel"], asked["text"], asked["blocks"], thread))
        return {"ok": True, "channel": asked["channel"], "ts": ts, "message": {"text": asked["text"]}}

    def _chat_update(self, asked: dict[str, Any]) -> dict[str, Any]:
        if error := self._refusal(asked):
            return {"ok": False, "error": error}
        found = [p for p in self.posts if (p.channel, p.ts) == (asked["channel"], asked["ts"])]
        if not found:
            return {"ok": False, "error": "message_not_found"}
        found[0].text, found[0].blocks, found[0].edits = asked["text"], asked["blocks"], found[0].edits + 1
        return {"ok": True, "channel": asked["channel"], "ts": asked["ts"], "text": asked["text"]}

    def _chat_postEphemeral(self, asked: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        self.whispers.append(asked)
        return {"ok": True, "message_ts": "1.0"}

    def _files_getUploadURLExternal(self, asked: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        file_id = f"F{len(self._uploads)}"
        self._uploads[file_id] = {**asked, "id": file_id}
        return {"ok": True, "upload_url": f"{self.root}/upload/{file_id}", "file_id": file_id}

    def _files_completeUploadExternal(self, asked: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        files = asked["files"] if isinstance(asked["files"], list) else json.loads(asked["files"])
        for file in files:
            kept = self._uploads[file["id"]]
            if "data" not in kept or int(kept["length"]) != len(kept["data"]):
                return {"ok": False, "error": "file_not_found"}
            self.files.append({**kept, "channel": asked.get("channel_id"), "thread_ts": asked.get("thread_ts")})
        return {"ok": True, "files": [{"id": f["id"], "title": f.get("title", "")} for f in files]}

    def _refusal(self, asked: dict[str, Any]) -> str | None:
        if isinstance(asked.get("blocks"), str):
            asked["blocks"] = json.loads(asked["blocks"])
        if asked["channel"] != CHANNEL:
            return "channel_not_found"
        if block_errors(asked["blocks"]):
            return "invalid_blocks"
        return "msg_blocks_too_long" if len(all_text(asked["blocks"])) > 12_000 else None


def rate_limited(seconds: int) -> Any:
    """Slack's own way of asking for patience."""
    return lambda handler: _answer(handler, 429, {"ok": False, "error": "ratelimited"}, {"Retry-After": str(seconds)})


def status(code: int) -> Any:
    """An answer that is no JSON, as a gateway gives it."""

    def answer(handler: Any) -> None:
        handler.send_response(code)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return answer


def stall(seconds: float) -> Any:
    """No answer for longer than anybody waits."""
    return lambda handler: time.sleep(seconds)


def reset(handler: Any) -> None:
    """The connection goes away in the middle."""
    handler.connection.close()


def lost(handler: Any) -> None:
    """It cuts off while the answer is on its way."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"ok": tr')
    handler.wfile.flush()
    handler.connection.close()


def _answer(handler: Any, code: int, answer: dict[str, Any], headers: dict[str, str] | None = None) -> None:
    body = json.dumps(answer).encode()
    handler.send_response(code)
    for name, value in {"Content-Type": "application/json; charset=utf-8", **(headers or {})}.items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def _arguments(handler: Any, body: bytes) -> dict[str, Any]:
    kind = handler.headers.get("Content-Type", "")
    if kind.startswith("application/json"):
        found: dict[str, Any] = json.loads(body)
        return found
    if kind.startswith("multipart/"):
        parts = message_from_bytes(b"Content-Type: " + kind.encode() + b"\r\n\r\n" + body, policy=HTTP)
        return {
            str(p.get_param("name", header="content-disposition")): p.get_payload(decode=True).decode()  # type: ignore[union-attr]
            for p in parts.iter_parts()
        }
    return {name: values[0] for name, values in parse_qs(body.decode()).items()}
