"""The page at `/`: runs with their verdict, open incidents, commands that wait for a person. Server-rendered, offline.

The log-in puts the bearer token itself into an HttpOnly, SameSite=Strict cookie: nothing to forge for whoever reads the
database, which holds only hashes, and revoking the token ends every log-in made with it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import jinja2
from fastapi import APIRouter, Depends, Response
from fastapi import Path as PathParameter
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, HTMLResponse, RedirectResponse
from sqlalchemy import select
from sqlalchemy.orm import Session
from starlette.requests import Request

from foreshock.wire import TERMINAL_STATES
from foreshock_service.api import commands, incidents
from foreshock_service.api.access import form_of, recognise
from foreshock_service.api.bodies import command_body, incident_body
from foreshock_service.api.encoding import iso
from foreshock_service.api.principal import COOKIE, LOOPBACK, Principal, same_origin
from foreshock_service.api.rooms import ID_PATTERN, InRooms, Name, Project, Rooms, find_run, rooms_of
from foreshock_service.commands.protocol import CommandError
from foreshock_service.diagnosis.window import recent_steps
from foreshock_service.errors import Forbidden, NotFound, Unauthenticated
from foreshock_service.incidents.book import IncidentError
from foreshock_service.store.models import Checkpoint, CommandRow, Incident, Run

router = APIRouter(include_in_schema=False)

HERE = Path(__file__).parent
STATIC = {"page.css": "text/css", "live.js": "text/javascript"}
MAX_ROWS = 100
SHOWN = frozenset(
    f"{pair}.{statistic}"
    for pair in ("policy", "mismatch", "mismatch_current")
    for statistic in ("kl_k2", "kl_k3", "abs_mean", "ess_token", "nonfinite")
) | {"reward.mean", "reward.validation", "entropy.mean", "grad.norm", "length.mean", "loss", "lr", "time.step_s"}
"""What the page shows of the last step; the rest is for `/v1/runs/…/series`."""
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_templates = jinja2.Environment(
    loader=jinja2.FileSystemLoader(HERE / "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_templates.filters["iso"] = iso

RowId = Annotated[str, PathParameter(pattern=ID_PATTERN)]


def _html(template: str, status: int = 200, **values: Any) -> HTMLResponse:
    headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-store"}
    return HTMLResponse(_templates.get_template(template).render(**values), status, headers)


async def _visitor(request: Request, rooms: Annotated[Rooms, Depends(rooms_of)]) -> Principal | None:
    """Who looks at the page: by cookie, or on loopback. None: must log in. A bearer does not open pages."""
    principal = await recognise(request, rooms, None)
    return principal if principal is not None and principal.may("read") else None


async def _operator(visitor: Annotated[Principal | None, Depends(_visitor)]) -> Principal:
    if visitor is None:
        raise Unauthenticated("Log in first.")
    if not visitor.may("operate"):
        raise Forbidden("Needs the scope operate.")
    return visitor


Visitor = Annotated[Principal | None, Depends(_visitor)]
Operator = Annotated[Principal, Depends(_operator)]


@router.get("/")
def show_page(rooms: InRooms, visitor: Visitor) -> Response:
    """The overview."""
    if visitor is None:
        return RedirectResponse("/login", 303)
    with rooms.store.read() as session:
        found = _overview(session, visitor)
    return _html(
        "overview.html", visitor=visitor, csrf=visitor.csrf, local=visitor is LOOPBACK, now=time.time(), **found
    )


def _overview(session: Session, visitor: Principal) -> dict[str, Any]:
    covered = select(Run) if visitor.project is None else select(Run).where(Run.project == visitor.project)
    runs = list(session.scalars(covered.order_by(Run.last_seen_at.desc()).limit(MAX_ROWS)))
    names = {run.id: run.name for run in runs}
    opened = session.scalars(
        select(Incident)
        .where(Incident.run_id.in_(names), Incident.status != "resolved")
        .order_by(Incident.opened_at.desc())
        .limit(MAX_ROWS)
    )
    waiting = session.scalars(
        select(CommandRow)
        .where(CommandRow.run_id.in_(names), CommandRow.state.not_in(TERMINAL_STATES))
        .order_by(CommandRow.created_at.desc())
        .limit(MAX_ROWS)
    )
    return {
        "runs": runs,
        "incidents": [incident_body(i, names[i.run_id]) for i in opened],
        "commands": [command_body(c, names[c.run_id]) for c in waiting],
    }


@router.get("/runs/{project}/{name}")
def show_run(rooms: InRooms, visitor: Visitor, project: Project, name: Name) -> Response:
    """One run: what it announced, its last step, incidents, commands, checkpoints."""
    if visitor is None:
        return RedirectResponse("/login", 303)
    visitor.check_project(project)
    with rooms.store.read() as session:
        run = find_run(session, project, name)
        found: dict[str, Any] = {
            "run": run,
            "last": _last_values(session, run),
            "incidents": [
                incident_body(i, run.name) for i in session.scalars(_newest(Incident, run, Incident.opened_at))
            ],
            "commands": [
                command_body(c, run.name) for c in session.scalars(_newest(CommandRow, run, CommandRow.created_at))
            ],
            "checkpoints": list(session.scalars(_newest(Checkpoint, run, Checkpoint.registered_at))),
        }
        return _html(
            "run.html", visitor=visitor, csrf=visitor.csrf, local=visitor is LOOPBACK, now=time.time(), **found
        )


def _newest(table: Any, run: Run, at: Any) -> Any:
    return select(table).where(table.run_id == run.id).order_by(at.desc()).limit(MAX_ROWS)


def _last_values(session: Session, run: Run) -> dict[str, float]:
    steps = recent_steps(session, run.id, run.attempt, steps=1)
    return {k: v for k, v in sorted(steps[0].values.items()) if k in SHOWN} if steps else {}


@router.get("/login")
async def show_login(rooms: InRooms) -> Response:
    """The form."""
    return _html("login.html", wrong=False)


@router.post("/login")
async def log_in(request: Request, rooms: InRooms) -> Response:
    """Takes a token of scope `read` or more and sets the cookie."""
    if not same_origin(request):
        raise Forbidden("Sent by another site's page.")
    secret = (await form_of(request)).get("token", "").strip()
    principal = await run_in_threadpool(rooms.tokens.look_up, secret) if secret else None
    if principal is None or not principal.may("read"):
        return _html("login.html", 401, wrong=True)
    answer = RedirectResponse("/", 303)
    answer.set_cookie(
        COOKIE,
        secret,
        max_age=round(rooms.settings.login_hours * 3600),
        path="/",
        secure=request.url.scheme == "https" or rooms.settings.public_url.startswith("https:"),
        httponly=True,
        samesite="strict",
    )
    return answer


@router.post("/logout")
async def log_out(request: Request, visitor: Visitor) -> Response:
    """Forgets the cookie. `visitor` has checked its CSRF value."""
    answer = RedirectResponse("/login", 303)
    answer.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict")
    return answer


_COMMANDS = {"approve": commands.approve_command, "reject": commands.reject_command, "cancel": commands.cancel_command}
_INCIDENTS = {"acknowledge": incidents.acknowledge_incident, "resolve": incidents.resolve_incident}


@router.post("/commands/{row_id}/{verb}")
def decide_command(rooms: InRooms, operator: Operator, row_id: RowId, verb: str) -> Response:
    """A button beside a command."""
    return _press(_COMMANDS, rooms, operator, row_id, verb)


@router.post("/incidents/{row_id}/{verb}")
def handle_incident(rooms: InRooms, operator: Operator, row_id: RowId, verb: str) -> Response:
    """A button beside an incident."""
    return _press(_INCIDENTS, rooms, operator, row_id, verb)


def _press(verbs: dict[str, Any], rooms: Rooms, operator: Principal, row_id: str, verb: str) -> Response:
    if verb not in verbs:
        raise NotFound("No such button.")
    try:
        verbs[verb](rooms, operator, row_id)
    except (CommandError, IncidentError) as error:
        return _html("refused.html", 409, reason=str(error))
    return RedirectResponse("/", 303)


@router.get("/static/{name}")
async def static(name: str) -> Response:
    """The page's own style and script; nothing else is served from disk."""
    if name not in STATIC:
        raise NotFound("No such file.")
    return FileResponse(HERE / "static" / name, media_type=STATIC[name], headers={"Cache-Control": "max-age=300"})
