"""The REST client of the sub-commands: `FORESHOCK_URL`, `FORESHOCK_TOKEN`, errors in one line, tables or JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import httpx
import typer
from rich.table import Table
from rich.text import Text

from foreshock.frames.identity import RUN_NAME
from foreshock_service.cli.console import SafeConsole
from foreshock_service.cli.out import say

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
PIPE_WIDTH = 240
DEFAULT_URL = "http://127.0.0.1:8720"


def call(method: str, path: str, **arguments: Any) -> Any:
    """The decoded answer. Exits 1 with the service's own words on a refusal, 2 when it cannot be reached."""
    base = os.environ.get("FORESHOCK_URL", DEFAULT_URL).rstrip("/")
    token = os.environ.get("FORESHOCK_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    params = {k: v for k, v in arguments.pop("params", {}).items() if v is not None}
    try:
        answer = httpx.request(method, f"{base}{path}", headers=headers, params=params, timeout=60.0, **arguments)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        _fail(f"no answer from {base}: {error}", 2)
    if answer.is_success:
        return answer.json() if answer.content else None
    try:
        problem = answer.json()
        _fail(f"{answer.status_code} {problem['title']}: {problem.get('detail', '')}".rstrip(": "), 1)
    except (ValueError, KeyError, TypeError):
        _fail(f"{answer.status_code} from {base}: not Foreshock's answer", 2)


def _fail(sentence: str, code: int) -> Any:
    say(f"foreshock: {sentence}", err=True)
    raise typer.Exit(code)


def split_run(run: str) -> str:
    """`project/name`, checked here so that a slip never asks for another path."""
    if RUN_NAME.match(run) is None:
        raise typer.BadParameter(f"{run!r}: a run is named project/name")
    return run


def show(rows: Sequence[dict[str, Any]], columns: Sequence[str], as_json: bool, empty: str) -> None:
    """A table of `columns`, or the rows as JSON."""
    if as_json:
        say(json.dumps(rows, indent=2))
        return
    if not rows:
        say(empty)
        return
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column.replace("_", " "), overflow="fold", no_wrap=column == "id")
    for row in rows:
        # Text, not a string: markup inside a run's or a person's words stays words.
        table.add_row(*(Text("–" if row.get(c) is None else str(row[c])) for c in columns))
    # Into a pipe lines are left whole: they are for grep, not for eyes.
    SafeConsole(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(table)


def show_one(body: dict[str, Any], as_json: bool, fields: Sequence[str]) -> None:
    """One object, as `name  value` lines or JSON."""
    if as_json:
        say(json.dumps(body, indent=2))
        return
    width = max(len(f) for f in fields)
    for field in fields:
        say(f"{field:<{width}}  {'–' if body.get(field) is None else body[field]}")
