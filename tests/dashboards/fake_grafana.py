"""A FAKE Grafana: no real one can be installed where this is tested. It answers as Grafana's HTTP API documents, and
refuses what the documentation does not allow, so that the client is checked against something stricter than a mock.

Sources: https://grafana.com/docs/grafana/latest/developers/http_api/ — `folder`, `data_source`, `dashboard`,
`annotations`, `auth`, read for Grafana 11. Numeric-id routes of data sources are deprecated there and absent here.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

TOKEN = "glsa_test"
UID = re.compile(r"^[A-Za-z0-9_-]{1,40}$")


class RefusedError(Exception):
    """(status, message)."""


class FakeGrafana:
    """What it holds is public: folders, sources, boards by uid, annotations by id. `requests` are all that came."""

    def __init__(self) -> None:
        self.folders: dict[str, dict[str, Any]] = {}
        self.sources: dict[str, dict[str, Any]] = {}
        self.boards: dict[str, dict[str, Any]] = {}
        self.annotations: dict[int, dict[str, Any]] = {}
        self.requests: list[tuple[str, str]] = []
        self.read_only = False
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                raw = self.rfile.read(length)
                try:
                    status, body = fake.answer(self.command, self.path, dict(self.headers), raw)
                except RefusedError as refused:
                    status, message = refused.args
                    body = {"message": message}
                out = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(out)))
                self.end_headers()
                self.wfile.write(out)

            do_GET = do_POST = do_PUT = do_PATCH = _answer

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/grafana"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, method: str, path: str, headers: dict[str, str], raw: bytes) -> tuple[int, Any]:
        parts = urlsplit(path)
        if not parts.path.startswith("/grafana/api/"):
            raise RefusedError(404, "Not found")
        route = parts.path.removeprefix("/grafana/api")
        self.requests.append((method, route))
        basic = "Basic " + base64.b64encode(b"admin:pa ss").decode()
        if headers.get("Authorization") not in (f"Bearer {TOKEN}", basic):
            raise RefusedError(401, "Unauthorized")
        if self.read_only and method != "GET":
            raise RefusedError(403, "You'll need additional permissions to perform this action.")
        body = json.loads(raw) if raw and raw != b"null" else {}
        if method != "GET" and headers.get("Content-Type") != "application/json":
            raise RefusedError(415, "Unsupported Media Type")
        return self._route(method, route, body, parse_qs(parts.query))

    def _route(self, method: str, route: str, body: dict[str, Any], query: dict[str, list[str]]) -> tuple[int, Any]:
        if found := re.fullmatch(r"/folders(?:/([\w-]+))?", route):
            return self._folder(method, found[1], body)
        if found := re.fullmatch(r"/datasources(?:/uid/([\w-]+))?", route):
            return self._source(method, found[1], body)
        if route == "/dashboards/db" and method == "POST":
            return self._board(body)
        if found := re.fullmatch(r"/annotations(?:/(\d+))?", route):
            return self._annotation(method, found[1], body, query)
        raise RefusedError(404, "Not found")

    def _folder(self, method: str, uid: str | None, body: dict[str, Any]) -> tuple[int, Any]:
        if method == "GET" and uid:
            if uid not in self.folders:
                raise RefusedError(404, "folder not found")
            return 200, self.folders[uid]
        if method == "POST" and uid is None:
            if not body.get("title"):
                raise RefusedError(400, "folder title cannot be empty")
            if body.get("uid") in self.folders:
                raise RefusedError(412, "the folder has been changed by someone else")
            self.folders[body["uid"]] = {"id": len(self.folders) + 1, **body}
            return 200, self.folders[body["uid"]]
        raise RefusedError(404, "Not found")

    def _source(self, method: str, uid: str | None, body: dict[str, Any]) -> tuple[int, Any]:
        if method == "GET" and uid:
            if uid not in self.sources:
                raise RefusedError(404, "Data source not found")
            return 200, {k: v for k, v in self.sources[uid].items() if k != "secureJsonData"}
        if not all(body.get(k) for k in ("name", "type", "access")) or body["access"] not in ("proxy", "direct"):
            raise RefusedError(400, "bad request data")
        if method == "POST" and uid is None:
            if any(s["name"] == body["name"] for s in self.sources.values()):
                raise RefusedError(409, "data source with the same name already exists")
            self.sources[body["uid"]] = body
            return 200, {"datasource": body, "id": 1, "message": "Datasource added", "name": body["name"]}
        if method == "PUT" and uid in self.sources and body.get("uid") == uid:
            self.sources[str(uid)] = body
            return 200, {"datasource": body, "id": 1, "message": "Datasource updated", "name": body["name"]}
        raise RefusedError(404, "Data source not found")

    def _board(self, body: dict[str, Any]) -> tuple[int, Any]:
        board = body.get("dashboard")
        if not isinstance(board, dict) or not board.get("title"):
            raise RefusedError(400, "Dashboard title cannot be empty")
        if not UID.match(board.get("uid", "")):
            raise RefusedError(400, "uid too long, max 40 characters")
        if board.get("id") is not None:
            raise RefusedError(404, "Dashboard not found")
        if body.get("folderUid") not in self.folders:
            raise RefusedError(400, "folder not found")
        if board["uid"] in self.boards and not body.get("overwrite"):
            raise RefusedError(412, "A dashboard with the same uid already exists")
        if not isinstance(board.get("schemaVersion"), int):
            raise RefusedError(400, "bad request data")
        version = self.boards.get(board["uid"], {}).get("version", 0) + 1
        self.boards[board["uid"]] = {**board, "version": version, "folderUid": body["folderUid"]}
        answer = {"id": len(self.boards), "uid": board["uid"], "status": "success", "version": version}
        return 200, {**answer, "url": f"/grafana/d/{board['uid']}/x"}

    def _annotation(
        self, method: str, number: str | None, body: dict[str, Any], query: dict[str, list[str]]
    ) -> tuple[int, Any]:
        if method == "GET" and number is None:
            if int(query.get("limit", ["100"])[0]) > 100_000:
                raise RefusedError(400, "limit")
            tags = set(query.get("tags", []))
            limit = int(query.get("limit", ["100"])[0])
            return 200, [a for a in self.annotations.values() if tags <= set(a["tags"])][:limit]
        if not body.get("text"):
            raise RefusedError(400, "text field should not be empty")
        if not all(isinstance(body.get(k), int) and body[k] > 1e12 for k in ("time", "timeEnd")):
            raise RefusedError(400, "times are epoch milliseconds")
        if method == "POST" and number is None:
            new = len(self.annotations) + 1
            self.annotations[new] = {"id": new, **body}
            return 200, {"message": "Annotation added", "id": new}
        if method == "PATCH" and number and int(number) in self.annotations:
            self.annotations[int(number)].update(body)
            return 200, {"message": "Annotation patched"}
        raise RefusedError(404, "annotation not found")
