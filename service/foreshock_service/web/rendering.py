"""Templates to answers: Jinja2 that escapes everything, a strict Content-Security-Policy, static files by hash."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Final

import jinja2
from fastapi import Response
from fastapi.responses import HTMLResponse, RedirectResponse

from foreshock_service.api.encoding import iso
from foreshock_service.api.principal import LOOPBACK, Principal
from foreshock_service.errors import Problem, Unauthenticated
from foreshock_service.web import figures

HERE: Final = Path(__file__).parent
POLICY: Final = (
    "default-src 'none'; style-src 'self'; script-src 'self'; worker-src 'self'; connect-src 'self'; "
    "img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
TYPES: Final = {
    ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml",
    ".LICENSE": "text/plain; charset=utf-8",
}  # fmt: skip


def _read() -> dict[str, tuple[bytes, str]]:
    found = {}
    for path in sorted((HERE / "static").rglob("*")):
        if path.is_file() and path.suffix in TYPES:
            body = path.read_bytes()
            found[path.relative_to(HERE / "static").as_posix()] = (body, hashlib.sha256(body).hexdigest()[:16])
    return found


FILES: Final = _read()
"""name → (body, hash): all that is served, read once."""


def asset(name: str) -> str:
    """Where a page finds a static file; the hash lets a browser keep it for good."""
    return f"/static/{name}?v={FILES[name][1]}"


_templates = jinja2.Environment(
    loader=jinja2.FileSystemLoader(HERE / "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_templates.filters |= {"iso": iso, "number": figures.number, "span": figures.span}
_templates.globals |= {"asset": asset}


def html(template: str, visitor: Principal | None, status: int = 200, **values: Any) -> HTMLResponse:
    """The rendered template. `visitor` None: nobody is logged in."""
    # Under `no-referrer`, the rule elsewhere, a browser sends its forms with `Origin: null`, which no check can tell
    # from another site's.
    headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-store", "Referrer-Policy": "same-origin"}
    local = visitor is LOOPBACK
    given = {"visitor": visitor, "csrf": visitor.csrf if visitor else "", "local": local, "now": time.time()}
    return HTMLResponse(_templates.get_template(template).render(**(given | values)), status, headers)


def as_pages(handler: Callable[..., Response]) -> Callable[..., Response]:
    """Turns the handler's problems into pages. It must take `visitor` by keyword; strangers go to the log-in."""

    @wraps(handler)
    def answering(*args: Any, **kwargs: Any) -> Response:
        visitor: Any = kwargs.get("visitor")
        try:
            if visitor is None:
                raise Unauthenticated
            return handler(*args, **kwargs)
        except Unauthenticated:
            return RedirectResponse("/login", 303)
        except Problem as problem:
            return html("problem.html", visitor, problem.status, title=problem.title, detail=problem.detail)

    return answering
