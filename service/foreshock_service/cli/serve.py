"""`foreshock serve`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from foreshock_service.cli.out import say


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on. [FORESHOCK_HOST, 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="[FORESHOCK_PORT, 8720]")] = None,
    database_url: Annotated[
        str | None, typer.Option(help="SQLite file or PostgreSQL. [FORESHOCK_DATABASE_URL, a file in the data folder]")
    ] = None,
    rules: Annotated[str | None, typer.Option(help="YAML rule pack. [FORESHOCK_RULES_PATH, the shipped one]")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    ray: Annotated[
        bool,
        typer.Option("--ray", help="As a Ray Serve application on the cluster at RAY_ADDRESS, or on one of its own."),
    ] = False,
    replicas: Annotated[
        int | None,
        typer.Option(min=1, max=100, help="With --ray; two and more need PostgreSQL. [FORESHOCK_REPLICAS, 1]"),
    ] = None,
) -> None:
    """Run the service until SIGINT or SIGTERM: REST, page, rules, commands. SQLite by default."""
    from pydantic import ValidationError

    from foreshock_service.settings import Settings

    given: dict[str, Any] = {
        "host": host,
        "port": port,
        "database_url": database_url,
        "rules_path": rules,
        "log_level": log_level,
        "replicas": replicas,
    }
    try:
        settings = Settings(**{k: v for k, v in given.items() if v is not None})
    except ValidationError as error:
        for problem in error.errors():
            say(f"foreshock: FORESHOCK_{'.'.join(map(str, problem['loc'])).upper()}: {problem['msg']}", err=True)
        raise typer.Exit(2) from None
    if replicas is not None and not ray:
        raise typer.BadParameter("replicas are Ray's: add --ray, or start a process each", param_hint="--replicas")
    raise typer.Exit(run(settings, ray=ray))


def run(settings: Any, *, ray: bool = False) -> int:
    """Serves until told to stop; the exit code. Says where on standard output once it listens."""
    from foreshock_service.server import StartError, listen

    if ray:
        from foreshock_service.ray_server import listen
    try:
        return listen(settings, lambda url: say(f"Foreshock listens on {url}"))
    except StartError as error:
        say(f"foreshock: {error}", err=True)
        return 2
