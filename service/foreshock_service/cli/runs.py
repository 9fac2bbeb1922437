"""`foreshock runs`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from foreshock_service.cli.client import JsonFlag, call, show, show_one, split_run
from foreshock_service.cli.out import say

app = typer.Typer(help="List runs, look at one, change its mode.", no_args_is_help=True, add_completion=False)

RunName = Annotated[str, typer.Argument(help="project/name", callback=split_run)]


@app.command("list")
def list_runs(
    project: Annotated[str | None, typer.Option(help="Only this project.")] = None,
    verdict: Annotated[str | None, typer.Option(help="healthy, warning, critical or unknown.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=500)] = 100,
    as_json: JsonFlag = False,
) -> None:
    """Runs, newest first."""
    page = call("GET", "/v1/runs", params={"project": project, "verdict": verdict, "limit": limit})
    columns = ("name", "verdict", "status", "mode", "attempt", "last_step", "last_seen_at_iso")
    show(page["runs"], columns, as_json, "no runs")


@app.command("show")
def show_run(run: RunName, as_json: JsonFlag = False) -> None:
    """One run."""
    fields = ("name", "verdict", "status", "mode", "attempt", "last_step", "open_incidents", "pending_commands")
    show_one(call("GET", f"/v1/runs/{run}"), as_json, (*fields, "capabilities", "budget", "last_seen_at_iso"))


@app.command("mode")
def set_mode(run: RunName, mode: Annotated[str, typer.Argument(help="observe, approve or auto")]) -> None:
    """Set how far Foreshock may go with this run."""
    body: dict[str, Any] = call("PATCH", f"/v1/runs/{run}", json={"mode": mode})
    say(f"{body['name']}: mode {body['mode']}")


@app.command("delete")
def delete_run(run: RunName, yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False) -> None:
    """Delete a run and everything stored of it."""
    if not yes:
        typer.confirm(f"Delete {run} and everything stored of it?", abort=True)
    call("DELETE", f"/v1/runs/{run}")
    say(f"{run}: deleted")
