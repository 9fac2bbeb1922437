"""What the sub-commands print goes through here: words of clients, files and services cannot act on the terminal."""

from __future__ import annotations

import typer

from foreshock_service.terminal import safe


def say(text: object = "", err: bool = False) -> None:
    """Prints a line, with control characters written out."""
    typer.echo(safe(str(text)), err=err)
