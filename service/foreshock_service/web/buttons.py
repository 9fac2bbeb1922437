"""What can be pressed on the page: decide a command, take an incident, silence. All work without a script."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Response
from fastapi import Path as PathParameter
from fastapi.responses import RedirectResponse
from pydantic import ValidationError
from starlette.requests import Request

from foreshock_service.api import commands, incidents, upkeep
from foreshock_service.api.access import form_of
from foreshock_service.api.rooms import ID_PATTERN, InRooms
from foreshock_service.commands.protocol import CommandError
from foreshock_service.errors import NotFound, Problem
from foreshock_service.incidents.book import IncidentError
from foreshock_service.web.login import Operator
from foreshock_service.web.rendering import html

router = APIRouter(include_in_schema=False)

RowId = Annotated[str, PathParameter(pattern=ID_PATTERN)]
OWN_PAGE: Final = re.compile(r"/(runs/[A-Za-z0-9._-]{1,128}/[A-Za-z0-9._-]{1,128})?(\?[A-Za-z0-9._~%&=+/@:-]{0,1000})?")
_COMMANDS: Final = {
    "approve": commands.approve_command, "reject": commands.reject_command, "cancel": commands.cancel_command,
}  # fmt: skip
_INCIDENTS: Final = {"acknowledge": incidents.acknowledge_incident, "resolve": incidents.resolve_incident}


async def _form(request: Request) -> dict[str, str]:
    return await form_of(request)


Form = Annotated[dict[str, str], Depends(_form)]


@router.post("/commands/{row_id}/{verb}")
def decide_command(rooms: InRooms, operator: Operator, form: Form, row_id: RowId, verb: str) -> Response:
    """A button beside a command."""
    return _pressed(operator, form, lambda: _verb(_COMMANDS, verb)(rooms, operator, row_id))


@router.post("/incidents/{row_id}/{verb}")
def handle_incident(rooms: InRooms, operator: Operator, form: Form, row_id: RowId, verb: str) -> Response:
    """A button beside an incident."""
    return _pressed(operator, form, lambda: _verb(_INCIDENTS, verb)(rooms, operator, row_id))


@router.post("/silences")
def silence(rooms: InRooms, operator: Operator, form: Form) -> Response:
    """No alerts of one rule on one run, for a while; the incidents still open."""

    def do() -> object:
        fields = {name: form[name] for name in ("run", "rule", "for_s") if form.get(name)}
        asked = upkeep.SilenceAsked.model_validate({**fields, "reason": form.get("reason", "")})
        return upkeep.create_silence(rooms, operator, asked)

    return _pressed(operator, form, do)


@router.post("/silences/{row_id}/end")
def end_silence(rooms: InRooms, operator: Operator, form: Form, row_id: RowId) -> Response:
    """Alerts again from now on."""
    return _pressed(operator, form, lambda: upkeep.end_silence(rooms, operator, row_id))


def _verb(verbs: dict[str, Any], verb: str) -> Callable[..., object]:
    found: Callable[..., object] | None = verbs.get(verb)
    if found is None:
        raise NotFound("No such button.")
    return found


def _pressed(operator: Operator, form: dict[str, str], do: Callable[[], object]) -> Response:
    """Does it, and goes back to the page that had the button; a refusal is a page of its own."""
    back = form.get("back", "/")
    back = back if OWN_PAGE.fullmatch(back) else "/"
    try:
        do()
    except (CommandError, IncidentError) as error:
        return html("refused.html", operator, 409, reason=str(error), back=back)
    except ValidationError as error:
        reason = "; ".join(f"{e['loc'][0] if e['loc'] else 'form'}: {e['msg']}" for e in error.errors()[:3])
        return html("refused.html", operator, 422, reason=reason, back=back)
    except Problem as problem:
        return html("refused.html", operator, problem.status, reason=problem.detail or problem.title, back=back)
    return RedirectResponse(back, 303)
