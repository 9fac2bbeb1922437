"""The command line. `main` imports a sub-command's module only when that sub-command is asked for.

To add one: a module here with a function (or a `typer.Typer` for a group), and its line in `COMMANDS`.
"""

from __future__ import annotations

from foreshock_service.cli.table import COMMANDS, main

__all__ = ["COMMANDS", "main"]
