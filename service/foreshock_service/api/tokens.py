"""Bearer tokens: made, looked up (with a short cache), revoked. Only the SHA-256 of a token is ever stored."""

from __future__ import annotations

import hmac
import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass
from uuid import uuid4

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from foreshock_service.api.principal import Principal, digest, expand
from foreshock_service.store.engine import Store
from foreshock_service.store.models import Audit, Token

LAST_USED_S = 60.0
"""`last_used_at` is written at most this often per token and process."""
MAX_CACHED = 4096
PREFIX = "fsk_"


@dataclass(frozen=True, slots=True)
class _Cached:
    principal: Principal | None
    expires_at: float | None
    until: float


def create(
    session: Session, *, name: str, scopes: list[str], project: str | None, expires_at: float | None, actor: str
) -> tuple[Token, str]:
    """A new token's row and its secret, which is shown once and cannot be had again."""
    secret = PREFIX + secrets.token_urlsafe(32)
    now = time.time()
    row = Token(
        id=uuid4().hex,
        name=name,
        hash=digest(secret),
        project=project,
        scopes=scopes,
        created_at=now,
        expires_at=expires_at,
    )
    session.add(row)
    session.flush()
    session.add(
        Audit(
            at=now,
            subject="token",
            subject_id=row.id,
            was=None,
            became="created",
            actor=actor,
            detail={"name": name, "scopes": scopes, "project": project},
        )
    )
    return row, secret


def revoke(session: Session, token_id: str, *, actor: str) -> bool:
    """Revokes for good; False where it was revoked before. Other tokens of the same name stay: that is rotation."""
    now = time.time()
    done = session.execute(update(Token).where(Token.id == token_id, Token.revoked_at.is_(None)).values(revoked_at=now))
    if not done.rowcount:  # type: ignore[attr-defined]
        return False
    session.add(
        Audit(at=now, subject="token", subject_id=token_id, was="created", became="revoked", actor=actor, detail={})
    )
    return True


def count_live(session: Session, now: float) -> int:
    """Tokens that would be honoured now."""
    live = Token.revoked_at.is_(None) & (Token.expires_at.is_(None) | (Token.expires_at > now))
    return session.scalar(select(func.count()).select_from(Token).where(live)) or 0


class TokenBook:
    """Looks tokens up by hash. Answers, good and bad, are kept for `cache_s`; `forget` drops them at once."""

    def __init__(self, store: Store, cache_s: float) -> None:
        self._store = store
        self._cache_s = cache_s
        self._cache: OrderedDict[str, _Cached] = OrderedDict()
        self._used: dict[str, float] = {}

    def cached(self, secret: str) -> Principal | bool | None:
        """The principal, None for a bad token, False where the store must be asked. Never blocks."""
        entry = self._cache.get(digest(secret))
        if entry is None or entry.until <= time.monotonic():
            return False
        if entry.expires_at is not None and entry.expires_at <= time.time():
            return None
        return entry.principal

    def look_up(self, secret: str) -> Principal | None:
        """Asks the store. Blocking: call in a thread."""
        hashed, now = digest(secret), time.time()
        with self._store.read() as session:
            row = session.scalar(select(Token).where(Token.hash == hashed))
        principal, expires_at = None, None
        if row is not None and hmac.compare_digest(row.hash, hashed) and row.revoked_at is None:
            expires_at = row.expires_at
            if expires_at is None or expires_at > now:
                principal = Principal(f"token:{row.name}", expand(row.scopes), row.project)
                self._note_use(row.id, now)
        self._keep(hashed, _Cached(principal, expires_at, time.monotonic() + self._cache_s))
        return principal

    def forget(self) -> None:
        """Drops every cached answer, after a token was revoked in this process."""
        self._cache.clear()

    def _note_use(self, token_id: str, now: float) -> None:
        if now - self._used.get(token_id, 0.0) < LAST_USED_S:
            return
        self._used[token_id] = now
        with self._store.write() as session:
            session.execute(update(Token).where(Token.id == token_id).values(last_used_at=now))

    def _keep(self, hashed: str, entry: _Cached) -> None:
        self._cache[hashed] = entry
        self._cache.move_to_end(hashed)
        while len(self._cache) > MAX_CACHED:
            self._cache.popitem(last=False)
