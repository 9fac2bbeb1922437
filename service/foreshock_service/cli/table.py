"""Every sub-command: (name, module, attribute, help). The help is here, so that `foreshock --help` imports none."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

if TYPE_CHECKING:
    import click


class Entry(NamedTuple):
    """One sub-command, or a group of them."""

    name: str
    module: str
    attribute: str
    help: str


COMMANDS: Final[tuple[Entry, ...]] = (
    Entry("serve", "foreshock_service.cli.serve", "serve", "Run the service: REST, page, rules, commands."),
    Entry("demo", "foreshock_service.cli.demo", "demo", "A real small RL job that would collapse, caught and rescued."),
    Entry("check", "foreshock_service.cli.check", "check", "Judge existing logs: TensorBoard, verl, TRL, W&B …"),
    Entry("doctor", "foreshock_service.cli.doctor", "doctor", "What a training configuration implies, before it runs."),
    Entry("diagnose", "foreshock_service.cli.diagnose", "diagnose", "Why log-probs disagree, of a run or a dump."),
    Entry("launch", "foreshock_service.cli.launch", "launch", "Supervise a job: restart it at a checkpoint."),
    Entry("runs", "foreshock_service.cli.runs", "app", "List runs, look at one, change its mode."),
    Entry("incidents", "foreshock_service.cli.incidents", "app", "List, acknowledge and resolve incidents."),
    Entry("commands", "foreshock_service.cli.commands", "app", "List, approve and reject commands."),
    Entry("rules", "foreshock_service.cli.rules", "app", "What is watched; try a rule file on stored history."),
    Entry("dashboards", "foreshock_service.cli.dashboards", "app", "Build the Grafana boards, push them."),
    Entry("token", "foreshock_service.cli.token", "app", "Create, list and revoke bearer tokens."),
    Entry("db", "foreshock_service.cli.db", "app", "Migrate the database, show its revision."),
)

USAGE = """Usage: foreshock [OPTIONS] COMMAND [ARGS]...

Watches RL post-training of language models and acts before a run collapses.

Options:
  --version  Show the version and exit.
  --help     Show this message and exit.

Commands:
"""


def usage() -> str:
    """What `foreshock --help` prints."""
    width = max(len(entry.name) for entry in COMMANDS)
    return USAGE + "".join(f"  {entry.name:<{width}}  {entry.help}\n" for entry in COMMANDS)


def command(entry: Entry) -> click.Command:
    """The click command behind an entry; imports its module."""
    import typer

    target: Any = getattr(import_module(entry.module), entry.attribute)
    if not isinstance(target, typer.Typer):
        app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
        app.command(help=target.__doc__ or entry.help)(target)
        target = app
    else:
        # A plain traceback: the pretty one prints local variables, and those may hold a token.
        target.pretty_exceptions_show_locals = False
    # typer vendors its click; at run time both are the same shape.
    return cast("click.Command", typer.main.get_command(target))


def main(arguments: list[str] | None = None) -> None:
    """The entry point. Exit codes: 0 done, 1 the service said no or found something, 2 wrong usage or unreachable."""
    given = sys.argv[1:] if arguments is None else arguments
    if not given or given[0] in ("--help", "-h", "help"):
        print(usage(), end="")
        raise SystemExit(0 if given else 2)
    if given[0] == "--version":
        from importlib.metadata import version

        print(version("foreshock"))
        raise SystemExit(0)
    entry = next((e for e in COMMANDS if e.name == given[0]), None)
    if entry is None:
        import difflib

        near = difflib.get_close_matches(given[0], [e.name for e in COMMANDS], n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        print(f"foreshock: no such command {given[0]!r}.{hint}\n\n{usage()}", end="", file=sys.stderr)
        raise SystemExit(2)
    command(entry).main(args=given[1:], prog_name=f"foreshock {entry.name}")
