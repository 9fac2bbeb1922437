"""`foreshock rules`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from foreshock_service.cli.client import JsonFlag, call, show, split_run
from foreshock_service.cli.out import say

app = typer.Typer(
    help="What is watched; try a rule file on stored history.", no_args_is_help=True, add_completion=False
)


@app.command("list")
def list_rules(as_json: JsonFlag = False) -> None:
    """Every rule, with whether it is on."""
    answer = call("GET", "/v1/rules")
    show(answer["rules"], ("name", "enabled", "title"), as_json, "no rules")


@app.command()
def replay(
    run: Annotated[str, typer.Argument(help="project/name", callback=split_run)],
    pack: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="YAML rule pack; absent: the one in use.")
    ] = None,
    from_step: Annotated[int | None, typer.Option(min=0)] = None,
    to_step: Annotated[int | None, typer.Option(min=0)] = None,
    as_json: JsonFlag = False,
) -> None:
    """What a rule file would have found on a run's stored steps."""
    body = {"run": run, "pack": pack.read_text() if pack else "", "from_step": from_step, "to_step": to_step}
    answer = call("POST", "/v1/rules/replay", json=body)
    if as_json:
        say(json.dumps(answer, indent=2))
        return
    show(answer["findings"], ("attempt", "step", "transition", "severity", "rule", "message"), False, "nothing found")
    say(f"{answer['steps']} steps, {len(answer['findings'])} findings, pack {answer['pack_hash']}")
