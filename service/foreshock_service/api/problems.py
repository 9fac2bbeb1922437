"""RFC 9457: every error leaves as `application/problem+json`, whoever raised it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from foreshock_service.api.encoding import finite, to_json
from foreshock_service.commands import protocol
from foreshock_service.errors import Conflict, Gone, NotFound, Problem, Unavailable, Unprocessable
from foreshock_service.incidents import book

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"


class ProblemBody(BaseModel):
    """RFC 9457 problem details. Members beyond these may follow."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(examples=["urn:foreshock:problem:not_found"])
    title: str = Field(examples=["Not found"])
    status: int = Field(examples=[404])
    detail: str = Field("", examples=["No run of that name."])


def problem_response(problem: Problem) -> Response:
    return Response(to_json(problem.body()), problem.status, problem.headers, MEDIA_TYPE)


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that may answer with these problems (and with those that any route may)."""
    schema = {"$ref": "#/components/schemas/ProblemBody"}
    every = {400, 401, 403, 413, 422, 429, 503, *statuses}
    return {
        status: {
            "description": HTTPStatus(status).phrase,
            "content": {MEDIA_TYPE: {"schema": schema}},
        }
        for status in sorted(every)
    }


async def _on_problem(_: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    return problem_response(error)


async def _on_http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    title = HTTPStatus(error.status_code).phrase
    slug = title.lower().replace(" ", "_").replace("-", "_")
    body = {"type": f"urn:foreshock:problem:{slug}", "title": title, "status": error.status_code}
    detail = "" if error.detail == title else str(error.detail)
    return Response(to_json({**body, "detail": detail}), error.status_code, error.headers, MEDIA_TYPE)


async def _on_invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    errors = [{"where": ".".join(map(str, e["loc"])), "what": e["msg"]} for e in error.errors()[:20]]
    detail = "; ".join(f"{e['where']}: {e['what']}" for e in errors[:3])
    return problem_response(Unprocessable(detail, errors=errors))


async def _on_refusal(_: Request, error: Exception) -> Response:
    if isinstance(error, protocol.NotFound | book.NotFound):
        return problem_response(NotFound(str(error)))
    if isinstance(error, protocol.Expired):
        return problem_response(Gone(str(error)))
    # Not the controller, another attempt, the mode: a state that this cannot start from, whoever asks.
    numbers = finite(error.detail) if isinstance(error, protocol.Refused) else {}
    return problem_response(Conflict(str(error), why=type(error).__name__, numbers=numbers))


async def _on_store(request: Request, error: Exception) -> Response:
    log.warning("store not available: %s %s: %s", request.method, request.url.path, type(error).__name__)
    return problem_response(Unavailable("The database does not answer.", retry_after_s=2))


async def _on_bug(_: Request, error: Exception) -> Response:
    # Starlette raises it again after the answer, so the server logs it with its traceback.
    return problem_response(Problem("The service has logged it."))


_HANDLERS: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
    Problem: _on_problem,
    HTTPException: _on_http,
    RequestValidationError: _on_invalid,
    protocol.CommandError: _on_refusal,
    book.IncidentError: _on_refusal,
    OperationalError: _on_store,
    PoolTimeout: _on_store,
}


def install(app: FastAPI) -> None:
    """Gives `app` its error handlers."""
    for kind, handler in _HANDLERS.items():
        app.add_exception_handler(kind, handler)
    app.add_exception_handler(Exception, _on_bug)


async def answer_to(request: Request, error: Exception) -> Response:
    """What `install`'s handlers make of an error, for a handler that Starlette does not call. Raises what is a bug."""
    for kind in type(error).__mro__:
        if kind in _HANDLERS:
            return await _HANDLERS[kind](request, error)
    raise error
