"""`foreshock doctor`."""

from __future__ import annotations

import datetime as dt
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foreshock_service.cli.out import say

if TYPE_CHECKING:
    from foreshock_service.doctor.finding import Finding
    from foreshock_service.doctor.roll_version import RollVersion


def doctor(
    config: Annotated[Path, typer.Argument(help="A configuration (YAML, JSON), a start script, or GRPOConfig's .py.")],
    host: Annotated[str | None, typer.Option(help="roll, verl, slime, trl or openrlhf. Default: recognised.")] = None,
    host_version: Annotated[str | None, typer.Option(help="The host's version, as 1.16.0 (verl, trl).")] = None,
    roll_version: Annotated[str | None, typer.Option(help="ROLL's release, as v0.2.0.")] = None,
    roll_commit_date: Annotated[str | None, typer.Option(help="Day of ROLL's commit, as 2025-11-28.")] = None,
    roll_home: Annotated[Path | None, typer.Option(help="ROLL's source tree. Default: ROLL_HOME.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What a training configuration implies. Exit 0 nothing wrong, 1 findings, 2 unreadable."""
    from foreshock_service.doctor import hosts
    from foreshock_service.doctor import roll_version as versions
    from foreshock_service.doctor.document import UnreadableError
    from foreshock_service.doctor.finding import as_json as to_json
    from foreshock_service.doctor.finding import wrong

    try:
        document = hosts.read(config)
        found = hosts.find(document, config, host)
        given = (roll_version, roll_commit_date, roll_home)
        if found.name != "roll" and any(option is not None for option in given):
            raise ValueError(f"--roll-… is for ROLL; {config} is read as {found.name}'s")
        if found.name == "roll" and host_version is not None:
            raise ValueError("--host-version is not for ROLL: give --roll-version")
        version = _version(*given) if found.name == "roll" else versions.UNKNOWN_VERSION
        findings = hosts.examine(found, document, host_version, version)
    except (UnreadableError, ValueError) as error:
        say(f"foreshock doctor: {error}", err=True)
        raise typer.Exit(2) from None
    name = version.name if found.name == "roll" else " ".join(filter(None, (found.name, host_version)))
    if as_json:
        say(json.dumps(to_json(findings), indent=2, ensure_ascii=False))
    else:
        say(_text(config, name, findings))
    raise typer.Exit(1 if wrong(findings) else 0)


def _version(tag: str | None, day: str | None, home: Path | None) -> RollVersion:
    """What was given; else the source at ROLL_HOME; else unknown. Raises ValueError for what is malformed."""
    from foreshock_service.doctor import roll_version as versions

    if sum(given is not None for given in (tag, day, home)) > 1:
        raise ValueError("give one of --roll-version, --roll-commit-date and --roll-home")
    if tag is not None:
        return versions.by_tag(tag)
    if day is not None:
        try:
            return versions.by_date(dt.date.fromisoformat(day), f"ROLL of {day}")
        except ValueError:
            raise ValueError(f"--roll-commit-date must be as 2025-11-28, not {day!r}") from None
    if home is not None:
        return versions.by_source(home)
    if os.environ.get("ROLL_HOME"):
        return versions.by_source(Path(os.environ["ROLL_HOME"]))
    return versions.UNKNOWN_VERSION


def _text(config: Path, read_as: str, findings: list[Finding]) -> str:
    lines = [f"{config} ({read_as})"]
    for f in findings:
        where = f"{config.name}:{f.line}" if f.line else f"{config.name} (default)"
        lines += ["", f"{f.severity.upper():8} {f.title}  [{f.id}]", f"         {where}  {f.evidence}"]
        lines += [f"         Why: {f.why}", f"         Change: {f.remedy}"]
        if f.versions:
            lines.append(f"         Holds for: {f.versions}")
    bad = sum(f.severity != "info" for f in findings)
    lines += ["", f"{bad} to change, {len(findings) - bad} to know"]
    return "\n".join(lines)
