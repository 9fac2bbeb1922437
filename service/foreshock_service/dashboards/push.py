"""Pushes to Grafana through `grafana-api`: every write is by uid, so a push may be repeated as often as one likes.

Data sources go by the routes `/api/datasources/uid/…`, which the library has no method for; its `api` object reaches
them. (The routes by numeric id that it does have are switched off in current Grafana.)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

FOLDER_UID: Final = "foreshock"
FOLDER_TITLE: Final = "Foreshock"
TAG: Final = "foreshock"
MAX_ANNOTATIONS: Final = 10_000
"""Looked through for what was pushed before; Grafana answers at most so many."""


class PushError(Exception):
    """Grafana refused or did not answer; the message is fit for a person and holds no secret."""


def connect(url: str, token: str = "", user: str = "", password: str = "", timeout_s: float = 30.0) -> Any:
    """The library's client for `url` (with any path Grafana is served under). A token wins over a user."""
    from grafana_api.grafana_face import GrafanaFace

    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise PushError(f"{url!r} is not a URL of Grafana, as http://127.0.0.1:3000")
    if not token and not user:
        raise PushError("neither GRAFANA_TOKEN nor GRAFANA_USER and GRAFANA_PASSWORD is set")
    prefix = parts.path.strip("/")
    return GrafanaFace(
        auth=token or (user, password),
        host=f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname,
        port=parts.port,
        url_path_prefix=f"{prefix}/" if prefix else "",
        protocol=parts.scheme,
        timeout=timeout_s,
    )


def guarded(call: Callable[[], Any], what: str) -> Any:
    """What `call` returns; raises PushError in words for everything the library and its transport raise."""
    import requests
    from grafana_api.grafana_api import GrafanaClientError, GrafanaException

    try:
        return call()
    except GrafanaException as error:
        hint = " (an editor's token is needed)" if isinstance(error, GrafanaClientError) and _denied(error) else ""
        raise PushError(f"{what}: Grafana answered {error.status_code}: {_told(error)}{hint}") from error
    except requests.RequestException as error:
        raise PushError(f"{what}: no answer from Grafana ({type(error).__name__})") from error


def push_folder(grafana: Any) -> str:
    """Makes the folder where it is missing; returns its uid."""
    if _found(lambda: grafana.folder.get_folder(FOLDER_UID), "folder") is None:
        guarded(lambda: grafana.folder.create_folder(FOLDER_TITLE, uid=FOLDER_UID), "folder")
    return FOLDER_UID


def push_source(grafana: Any, source: Mapping[str, Any]) -> str:
    """Makes or updates one data source by its uid; returns "created" or "updated"."""
    path, name = f"/datasources/uid/{source['uid']}", f"data source {source['name']}"
    if _found(lambda: grafana.api.GET(path), name) is None:
        guarded(lambda: grafana.api.POST("/datasources", json=dict(source)), name)
        return "created"
    guarded(lambda: grafana.api.PUT(path, json=dict(source)), name)
    return "updated"


def push_board(grafana: Any, board: Mapping[str, Any], folder_uid: str) -> str:
    """Makes or overwrites one board by its uid; returns its path on Grafana."""
    body = {
        "dashboard": {**board, "id": None},
        "folderUid": folder_uid,
        "overwrite": True,
        "message": "foreshock dashboards push",
    }
    answer = guarded(lambda: grafana.dashboard.update_dashboard(body), f"board {board['title']}")
    return str(answer.get("url", ""))


def push_annotations(grafana: Any, wanted: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """One annotation per incident and command, told apart by the tag `id:…`; returns (added, changed)."""
    known = {}
    listed = guarded(lambda: grafana.annotations.get_annotation(tags=[TAG], limit=MAX_ANNOTATIONS), "annotations")
    for annotation in listed:
        for tag in annotation.get("tags") or ():
            if tag.startswith("id:"):
                known[tag] = annotation
    added = changed = 0
    for annotation in wanted:
        key = next(tag for tag in annotation["tags"] if tag.startswith("id:"))
        before = known.get(key)
        if before is None:
            guarded(lambda a=annotation: grafana.api.POST("/annotations", json=dict(a)), "annotation")  # type: ignore[misc]
            added += 1
        elif any(before.get(k) != annotation[k] for k in ("time", "timeEnd", "text", "tags")):
            path = f"/annotations/{before['id']}"
            guarded(lambda a=annotation, p=path: grafana.api.PATCH(p, json=dict(a)), "annotation")  # type: ignore[misc]
            changed += 1
    return added, changed


def annotations_of(
    incidents: Iterable[Mapping[str, Any]], commands: Iterable[Mapping[str, Any]], now: float
) -> Iterable[dict[str, Any]]:
    """Spans in epoch milliseconds from REST's incidents and commands; what is not over ends now."""
    for incident in incidents:
        tags = [TAG, f"run:{incident['run']}", "incident", incident["rule"], incident["severity"], incident["status"]]
        text = f"{incident['rule']}: {incident['message']} (step {incident['onset_step']}, {incident['status']})"
        ended = incident["resolved_at"] or now
        yield _annotation(incident["opened_at"], ended, text, [*tags, f"id:{incident['id']}"])
    for command in commands:
        tags = [TAG, f"run:{command['run']}", "command", command["kind"], command["state"]]
        verdict = f", {command['verdict']}" if command["verdict"] else ""
        text = f"{command['kind']}: {command['state']}{verdict}. {command['reason']}"
        ended = command["finished_at"] or command["created_at"]
        yield _annotation(command["created_at"], ended, text, [*tags, f"id:{command['id']}"])


def boards(folder: Path) -> list[dict[str, Any]]:
    """The built boards in `folder`, in the order of their names. Raises PushError where there is none."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    if not found:
        raise PushError(f"no board in {folder}: run `foreshock dashboards build`")
    return found


def postgres_source(url: str) -> dict[str, Any]:
    """The data source of `postgresql://user:password@host:port/database?sslmode=…` (a read-only role's)."""
    parts = urlsplit(url)
    database = parts.path.strip("/")
    if parts.scheme not in ("postgresql", "postgres") or not parts.hostname or not parts.username or not database:
        raise PushError("the PostgreSQL URL must look like postgresql://user:password@host:5432/database")
    options = dict(pair.partition("=")[::2] for pair in parts.query.split("&") if pair)
    return {
        "uid": "foreshock-postgres",
        "name": "Foreshock PostgreSQL",
        "type": "grafana-postgresql-datasource",
        "access": "proxy",
        "url": f"{parts.hostname}:{parts.port or 5432}",
        "user": unquote(parts.username),
        "database": database,
        "jsonData": {"database": database, "sslmode": options.get("sslmode", "require"), "postgresVersion": 1500},
        "secureJsonData": {"password": unquote(parts.password or "")},
    }


def prometheus_source(url: str) -> dict[str, Any]:
    """The data source of a Prometheus at `url`."""
    if urlsplit(url).scheme not in ("http", "https"):
        raise PushError("the Prometheus URL must look like http://prometheus:9090")
    return {
        "uid": "foreshock-prometheus",
        "name": "Foreshock Prometheus",
        "type": "prometheus",
        "access": "proxy",
        "url": url,
        "jsonData": {"httpMethod": "POST", "timeInterval": "15s"},
    }


def _annotation(began: float, ended: float, text: str, tags: list[str]) -> dict[str, Any]:
    return {"time": round(began * 1000), "timeEnd": round(ended * 1000), "text": text, "tags": tags}


def _found(call: Callable[[], Any], what: str) -> Any:
    from grafana_api.grafana_api import GrafanaClientError

    def asked() -> Any:
        try:
            return call()
        except GrafanaClientError as error:
            if error.status_code == 404:
                return None
            raise

    return guarded(asked, what)


def _denied(error: Any) -> bool:
    return error.status_code in (401, 403)


def _told(error: Any) -> str:
    response = error.response
    return str(response.get("message", "") if isinstance(response, dict) else response)[:300]
