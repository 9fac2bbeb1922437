"""What the service answers when it cannot: a small exception tree, each with its HTTP status (RFC 9457).

Problem
├── BadRequest            400  malformed, or names something that cannot be
├── Unauthenticated       401  no token, or one that is unknown, revoked or expired
├── Forbidden             403  a good token without the scope or the project
├── NotFound              404
├── Conflict              409  not in the state that this asks for
├── Gone                  410  was there, has expired
├── TooLarge              413  over a limit of `settings.py`, which the detail names
├── UnsupportedMedia      415  content type or encoding not known here
├── Unprocessable         422  well-formed, and wrong
├── UpgradeRequired       426  a protocol version older or newer than this service speaks
├── TooMany               429  over the rate; `Retry-After` says when
└── Unavailable           503  full, starting or stopping; `Retry-After` says when
"""

from __future__ import annotations

from typing import Any, ClassVar


class Problem(Exception):  # noqa: N818 - RFC 9457's word
    """Answered as `application/problem+json`. `detail` is shown to the caller: never a secret, never a stack trace."""

    status: ClassVar[int] = 500
    title: ClassVar[str] = "Internal error"
    slug: ClassVar[str] = "internal"

    def __init__(self, detail: str = "", *, headers: dict[str, str] | None = None, **members: Any) -> None:
        super().__init__(detail or self.title)
        self.detail = detail
        self.headers = headers or {}
        self.members = members

    def body(self) -> dict[str, Any]:
        """The problem document; extension members beside the standard ones."""
        core = {"type": f"urn:foreshock:problem:{self.slug}", "title": self.title, "status": self.status}
        return {**self.members, **core, "detail": self.detail}


class BadRequest(Problem):
    status, title, slug = 400, "Bad request", "bad_request"


class Unauthenticated(Problem):
    status, title, slug = 401, "Token needed", "unauthenticated"

    def __init__(self, detail: str = "") -> None:
        super().__init__(detail, headers={"WWW-Authenticate": 'Bearer realm="foreshock"'})


class Forbidden(Problem):
    status, title, slug = 403, "Not allowed", "forbidden"


class NotFound(Problem):
    status, title, slug = 404, "Not found", "not_found"


class Conflict(Problem):
    status, title, slug = 409, "Conflict", "conflict"


class Gone(Problem):
    status, title, slug = 410, "Expired", "gone"


class TooLarge(Problem):
    status, title, slug = 413, "Too large", "too_large"


class UnsupportedMedia(Problem):
    status, title, slug = 415, "Unsupported media type", "unsupported_media"


class Unprocessable(Problem):
    status, title, slug = 422, "Not valid", "invalid"


class UpgradeRequired(Problem):
    status, title, slug = 426, "Protocol version not spoken here", "upgrade_required"


class TooMany(Problem):
    status, title, slug = 429, "Too many requests", "too_many"

    def __init__(self, detail: str = "", *, retry_after_s: float = 1.0) -> None:
        super().__init__(detail, headers={"Retry-After": str(max(1, round(retry_after_s)))})


class Unavailable(Problem):
    status, title, slug = 503, "Not available now", "unavailable"

    def __init__(self, detail: str = "", *, retry_after_s: float = 1.0) -> None:
        super().__init__(detail, headers={"Retry-After": str(max(1, round(retry_after_s)))})
