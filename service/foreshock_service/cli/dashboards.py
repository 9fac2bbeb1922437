"""`foreshock dashboards`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from foreshock_service.cli.out import say

app = typer.Typer(help="Build the Grafana boards, push them.", no_args_is_help=True, add_completion=False)


@app.command()
def build(
    out: Annotated[Path | None, typer.Option(help="Folder to write to. [dashboards/built]", show_default=False)] = None,
    check: Annotated[
        bool, typer.Option(help="Write nothing; exit 1 where a file is not what the code builds.")
    ] = False,
) -> None:
    """Build every board to JSON. Needs the extra `dashboards`."""
    from foreshock_service.shipped import shipped

    # At the end of the path: the shipped folder has neighbours that must not shadow libraries.
    sys.path.append(str(shipped("dashboards").parent))
    try:
        from dashboards import build as building
    except ImportError as error:
        _fail(f"{error.name} is missing: pip install 'foreshock[dashboards]'", 2)
    folder = out or building.BUILT
    if not check:
        for path in building.write(folder):
            say(str(path))
        return
    stale = [n for n, d in building.documents().items() if _read(folder / f"{n}.json") != building.text(d)]
    for name in stale:
        say(f"{folder / name}.json is not what the code builds", err=True)
    raise typer.Exit(1 if stale else 0)


@app.command()
def push(
    grafana_url: Annotated[
        str, typer.Option(envvar="GRAFANA_URL", help="With its path, if it is served under one.")
    ] = "http://127.0.0.1:3000",
    postgres_url: Annotated[
        str, typer.Option(envvar="GRAFANA_POSTGRES_URL", help="As Grafana reaches it, with a read-only role.")
    ] = "",
    prometheus_url: Annotated[str, typer.Option(envvar="GRAFANA_PROMETHEUS_URL", help="As Grafana reaches it.")] = "",
    annotations: Annotated[bool, typer.Option(help="One per incident and command, read from FORESHOCK_URL.")] = True,
    folder: Annotated[Path | None, typer.Option(help="Built boards. [the shipped ones]", show_default=False)] = None,
) -> None:
    """Push folder, data sources (where their URLs are given), boards and annotations. Repeat it as you like.

    Credentials come from the environment alone: GRAFANA_TOKEN, or GRAFANA_USER and GRAFANA_PASSWORD.
    """
    try:
        from foreshock_service.dashboards import push as pushing
        from foreshock_service.shipped import shipped

        grafana = pushing.connect(
            grafana_url,
            os.environ.get("GRAFANA_TOKEN", ""),
            os.environ.get("GRAFANA_USER", ""),
            os.environ.get("GRAFANA_PASSWORD", ""),
        )
        found = pushing.boards(folder or shipped("dashboards") / "built")
        sources = [pushing.postgres_source(postgres_url)] if postgres_url else []
        sources += [pushing.prometheus_source(prometheus_url)] if prometheus_url else []
        uid = pushing.push_folder(grafana)
        for source in sources:
            say(f"data source {source['name']}: {pushing.push_source(grafana, source)}")
        for board in found:
            say(f"board {board['title']}: {pushing.push_board(grafana, board, uid)}")
        if annotations:
            wanted = pushing.annotations_of(_all("/v1/incidents", "incidents"), _commands(), time.time())
            added, changed = pushing.push_annotations(grafana, wanted)
            say(f"annotations: {added} added, {changed} changed")
    except ImportError as error:
        _fail(f"{error.name} is missing: pip install 'foreshock[dashboards]'", 2)
    except pushing.PushError as error:
        _fail(str(error), 1)


def _all(path: str, key: str) -> list[dict[str, Any]]:
    """Every page of a list."""
    from foreshock_service.cli.client import call

    rows: list[dict[str, Any]] = []
    cursor: str | None = None
    while True:
        page = call("GET", path, params={"limit": 500, "cursor": cursor})
        rows += page[key]
        cursor = page.get("next")
        if not cursor:
            return rows


def _commands() -> list[dict[str, Any]]:
    runs = _all("/v1/runs", "runs")
    return [command for run in runs for command in _all(f"/v1/runs/{run['name']}/commands", "commands")]


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


def _fail(sentence: str, code: int) -> Any:
    say(f"foreshock: {sentence}", err=True)
    raise typer.Exit(code)
