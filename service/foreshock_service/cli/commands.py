"""`foreshock commands`."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from foreshock_service.cli.client import JsonFlag, call, show, split_run
from foreshock_service.cli.out import say

app = typer.Typer(help="List, approve and reject commands.", no_args_is_help=True, add_completion=False)

CommandId = Annotated[str, typer.Argument(help="Its id.")]
Reason = Annotated[str, typer.Option(help="Why, for the audit log.")]


@app.command("list")
def list_commands(
    run: Annotated[str, typer.Argument(help="project/name", callback=split_run)],
    state: Annotated[str | None, typer.Option(help="Only this state.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=500)] = 100,
    as_json: JsonFlag = False,
) -> None:
    """A run's commands, newest first."""
    page = call("GET", f"/v1/runs/{run}/commands", params={"state": state, "limit": limit})
    columns = ("id", "state", "kind", "attempt", "issued_step", "done_step", "verdict", "requested_by", "reason")
    show(page["commands"], columns, as_json, "no commands")


@app.command()
def propose(
    run: Annotated[str, typer.Argument(help="project/name", callback=split_run)],
    kind: Annotated[str, typer.Argument(help="The action, as scale_lr.")],
    arguments: Annotated[str, typer.Option(help="Its arguments as JSON.")] = "{}",
    reason: Reason = "",
    approve: Annotated[bool, typer.Option(help="Approve it at once.")] = False,
) -> None:
    """Ask something of a trainer."""
    try:
        given: dict[str, Any] = json.loads(arguments)
    except ValueError as error:
        raise typer.BadParameter(f"--arguments is not JSON: {error}") from None
    body = {"actions": [{"kind": kind, "arguments": given}], "reason": reason, "approve": approve}
    command = call("POST", f"/v1/runs/{run}/commands", json=body)
    say(f"{command['id']}: {command['kind']} {command['state']}")


@app.command()
def approve(command: CommandId) -> None:
    """Agree: the trainer gets it at its next question."""
    body = call("POST", f"/v1/commands/{command}/approve")
    say(f"{body['id']}: {body['kind']} {body['state']}")


@app.command()
def reject(command: CommandId, reason: Reason = "") -> None:
    """Decline a proposal."""
    body = call("POST", f"/v1/commands/{command}/reject", json={"reason": reason})
    say(f"{body['id']}: {body['kind']} {body['state']}")


@app.command()
def cancel(command: CommandId, reason: Reason = "") -> None:
    """Take back what no trainer has accepted yet."""
    body = call("POST", f"/v1/commands/{command}/cancel", json={"reason": reason})
    say(f"{body['id']}: {body['kind']} {body['state']}")
