"""`foreshock incidents`."""

from __future__ import annotations

from typing import Annotated

import typer

from foreshock_service.cli.client import JsonFlag, call, show
from foreshock_service.cli.out import say

app = typer.Typer(help="List, acknowledge and resolve incidents.", no_args_is_help=True, add_completion=False)


@app.command("list")
def list_incidents(
    run: Annotated[str | None, typer.Option(help="Only this run, as project/name.")] = None,
    status: Annotated[
        str | None, typer.Option(help="open, acknowledged, mitigated, resolved or unresolved.")
    ] = "unresolved",
    every: Annotated[bool, typer.Option("--all", help="Resolved ones too.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=500)] = 100,
    as_json: JsonFlag = False,
) -> None:
    """Incidents, newest first."""
    params = {"run": run, "status": None if every else status, "limit": limit}
    columns = ("id", "severity", "status", "run", "rule", "onset_step", "last_step", "message")
    show(call("GET", "/v1/incidents", params=params)["incidents"], columns, as_json, "no incidents")


@app.command()
def acknowledge(incident: Annotated[str, typer.Argument(help="Its id.")]) -> None:
    """Say that you are looking at it."""
    body = call("POST", f"/v1/incidents/{incident}/acknowledge")
    say(f"{body['id']}: {body['status']} by {body['acknowledged_by']}")


@app.command()
def resolve(incident: Annotated[str, typer.Argument(help="Its id.")]) -> None:
    """Say that it is over."""
    body = call("POST", f"/v1/incidents/{incident}/resolve")
    say(f"{body['id']}: {body['status']}")
