"""The page: every run by its health at `/`, one run, one step. Server-rendered; scripts only make it quicker to use."""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from starlette.requests import Request

from foreshock.frames.catalogue import valid_name
from foreshock_service.api import diagnosis, series
from foreshock_service.api.rooms import NAME_PATTERN, InRooms, Rooms, find_run
from foreshock_service.errors import NotFound
from foreshock_service.web import buttons, login
from foreshock_service.web.charts import MAX_EXTRA
from foreshock_service.web.fleet import SORTS, VERDICTS, Wanted, read_fleet
from foreshock_service.web.login import Visitor
from foreshock_service.web.rendering import FILES, POLICY, TYPES, as_pages, html
from foreshock_service.web.run_view import RunView, read_view

router = APIRouter(include_in_schema=False)
FOR_GOOD = "public, max-age=31536000, immutable"


@router.get("/")
@as_pages
def show_fleet(request: Request, rooms: InRooms, visitor: Visitor) -> Response:
    """The overview."""
    assert visitor is not None
    wanted = Wanted.of(request.query_params)
    with rooms.store.read() as session:
        fleet = read_fleet(session, rooms.store.dialect, visitor, wanted)
        values: dict[str, Any] = {"wanted": wanted, "sorts": SORTS, "verdicts": VERDICTS, "url": rooms.settings.url}
        return html("fleet.html", visitor, fleet=fleet, back=wanted.address(page=wanted.page), **values)


@router.get("/runs/{project}/{name}")
@as_pages
def show_run(
    rooms: InRooms,
    visitor: Visitor,
    project: str,
    name: str,
    signal: Annotated[list[str] | None, Query(max_length=64)] = None,
) -> Response:
    """One run."""
    assert visitor is not None
    _check(project, name)
    visitor.check_project(project)
    with rooms.store.read() as session:
        run = find_run(session, project, name)
        wished = [name for name in dict.fromkeys(signal or ()) if valid_name(name)][:MAX_EXTRA]
        view = read_view(session, rooms.store.dialect, run, visitor, wished)
        why = _why(rooms, view, project, name)
        return html("run.html", visitor, view=view, run=run, why=why, wished=wished, back=f"/runs/{run.name}")


@router.get("/runs/{project}/{name}/steps/{step}")
@as_pages
def show_step(
    rooms: InRooms, visitor: Visitor, project: str, name: str, step: str, attempt: Annotated[str, Query()] = ""
) -> Response:
    """One completed step with everything that was measured at it."""
    assert visitor is not None
    _check(project, name)
    visitor.check_project(project)
    if not re.fullmatch(r"\d{1,18}", step) or not re.fullmatch(r"\d{0,9}", attempt):
        raise NotFound("No such step.")
    found = series.read_step(rooms, visitor, project, name, int(step), int(attempt) if attempt else None)
    return html("step.html", visitor, step=found, back="/")


def _check(project: str, name: str) -> None:
    if not (re.fullmatch(NAME_PATTERN, project) and re.fullmatch(NAME_PATTERN, name)):
        raise NotFound("No run has such a name.")


def _why(rooms: Rooms, view: RunView, project: str, name: str) -> diagnosis.DiagnosisAnswer | None:
    """The diagnosis where the run is ill now: of the last step that the gravest open incident saw."""
    ill = next(iter(view.open), None)
    step, attempt = (ill.last_step, ill.attempt) if ill else (None, None)
    try:
        return diagnosis.read_diagnosis(rooms, None, project, name, step=step, attempt=attempt)  # type: ignore[arg-type]
    except NotFound:
        return None


@router.get("/static/{name:path}")
async def static(request: Request, name: str) -> Response:
    """The page's own files, read at start: nothing else can be named."""
    if name not in FILES:
        raise NotFound("No such file.")
    body, digest = FILES[name]
    cache = FOR_GOOD if request.query_params.get("v") == digest else "no-cache"
    # A shared worker obeys the policy of its own file, not of the page that began it.
    headers = {"Cache-Control": cache, "ETag": f'"{digest}"', "Content-Security-Policy": POLICY}
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(body, media_type=TYPES["." + name.rpartition(".")[2]], headers=headers)


router.include_router(login.router)
router.include_router(buttons.router)
