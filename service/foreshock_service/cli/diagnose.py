"""`foreshock diagnose`."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foreshock_service.cli.out import say

if TYPE_CHECKING:
    from foreshock_service.diagnosis.tokens.report import DumpDiagnosis, Place

RUN = re.compile(r"[A-Za-z0-9._-]{1,128}/[A-Za-z0-9._-]{1,128}")


def diagnose(
    what: Annotated[
        list[str],
        typer.Argument(metavar="RUN|DUMP…", help="A run (project/name), or token dumps: files, folders, globs."),
    ],
    healthy: Annotated[
        list[str] | None, typer.Option(help="Dump of healthy steps to hold them against; repeat for several.")
    ] = None,
    since: Annotated[int | None, typer.Option(min=0, help="First ill step; default: found in the dump.")] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Read the dump with Ray Data; same result.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Why log-probs disagree, from a run's statistics or single tokens. Exit 0 nothing wrong, 1 ill, 2 unreadable."""
    if len(what) == 1 and RUN.fullmatch(what[0]) and not Path(what[0]).exists():
        if healthy or since is not None or ray:
            raise _refused("--healthy, --since and --ray go with a dump, not with a run")
        raise typer.Exit(_run(what[0], as_json))
    from foreshock_service.diagnosis.tokens.batches import DumpError
    from foreshock_service.diagnosis.tokens.distributed import on_ray
    from foreshock_service.diagnosis.tokens.report import diagnose_dump, here

    try:
        found = diagnose_dump(what, healthy=healthy or (), since=since, run=on_ray if ray else here)
    except DumpError as error:
        raise _refused(str(error)) from None
    say(_json(found) if as_json else _text(found))
    raise typer.Exit(1 if found.verdict == "ill" else 0)


def _refused(why: str) -> typer.Exit:
    say(f"foreshock: {why}", err=True)
    return typer.Exit(2)


def _json(found: DumpDiagnosis) -> str:
    import msgspec

    return json.dumps(_finite(msgspec.to_builtins(found)), indent=2, ensure_ascii=False)


def _finite(value: Any) -> Any:
    """Non-finite numbers as the wire spells them."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _text(found: DumpDiagnosis) -> str:
    steps = f"{len(found.steps)} steps {found.steps[0]}–{found.steps[-1]}"
    lines = [f"{found.run or 'dump'}: {found.tokens} tokens of {steps} in {found.files} files"]
    if found.other_attempts:
        lines.append(f"{found.other_attempts} other attempts in these files were left out")
    seen = f"ill from step {found.onset}" if found.onset is not None else "no rise within the dump"
    lines += [f"{found.verdict.upper()}: {found.sentence}", f"{seen}; looked at steps {_span(found.window)}"]
    lines += [f"{name}: {int(count)} tokens" for name, count in found.nonfinite.items()]
    for cause in found.diagnosis.causes:
        lines += ["", f"{cause.score:.2f}  {cause.title}  [{cause.name}]  by {cause.pair}"]
        lines += [f"      + {_number(fact.value)}{fact.sentence}" for fact in cause.speaks_for]
        lines += [f"      − {_number(fact.value)}{fact.sentence}" for fact in cause.speaks_against]
        if cause.decided_by:
            lines.append(f"      what decides: {'; '.join(cause.decided_by)}")
    for title, places in (
        ("position", found.positions), ("response length", found.lengths), ("token id", found.token_ids),
        ("rank", found.ranks), ("version lag", found.lags),
    ):  # fmt: skip
        lines += _table(f"{found.pair}: mean |δ| by {title}", places)
    return "\n".join(lines)


def _span(steps: list[int]) -> str:
    return str(steps[0]) if len(steps) == 1 else f"{steps[0]}–{steps[-1]} ({len(steps)})"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}  "


def _table(title: str, places: list[Place]) -> list[str]:
    if len(places) < 2:
        return []
    return ["", title, *(f"  {place.what:<22}{place.abs_mean:>12.4g}  {place.tokens:>10} tokens" for place in places)]


def _run(run: str, as_json: bool) -> int:
    """Asks the service."""
    from foreshock_service.cli.client import call

    answer = call("GET", f"/v1/runs/{run}/diagnosis")
    ill = answer["edge"] is not None
    if as_json:
        say(json.dumps(answer, indent=2, ensure_ascii=False))
        return int(ill)
    say(f"{run}, attempt {answer['attempt']}, steps {answer['from_step']}–{answer['to_step']}: {answer['sentence']}")
    for cause in answer["causes"]:
        say(f"\n{cause['score']:.2f}  {cause['title']}  [{cause['name']}]  by {cause['pair']}")
        for sign, facts in (("+", cause["speaks_for"]), ("−", cause["speaks_against"])):
            for fact in facts:
                say(f"      {sign} {_number(fact['value'])}{fact['sentence']}")
        if cause["decided_by"]:
            say(f"      what decides: {'; '.join(cause['decided_by'])}")
    for probe in answer["probes"]:
        say(f"\nprobe at step {probe['step']}: {probe['sentence']}")
    return int(ill)
