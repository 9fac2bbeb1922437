"""Fenced leases by conditional update: N replicas, one does the work, and a late one cannot commit over its successor.

A lease runs by the replicas' own clocks. Skewed clocks may let two believe that they hold it; the fence, which rises at
each change of owner and is checked in the transaction that writes, lets only the last of them commit.
"""

from __future__ import annotations

import os
import socket
import uuid
from typing import Protocol

from sqlalchemy import CursorResult, case, or_, select, update
from sqlalchemy.orm import Session
from sqlalchemy.orm.attributes import set_committed_value

from foreshock_service.store.models import Client, EvaluationState, Lease, Run
from foreshock_service.store.upsert import insert_new

CONTROLLER_S = 60.0
"""How long a controller that says nothing keeps its run to itself."""


def owner_name() -> str:
    """A name for this process in leases: host, process id and a random part, at most 64 characters."""
    return f"{socket.gethostname()[:40]}:{os.getpid()}:{uuid.uuid4().hex[:8]}"


def claim(session: Session, name: str, owner: str, now: float, seconds: float) -> int | None:
    """Claims or renews the named lease until `now + seconds`; returns the fence, or None while another holds it."""
    taken = session.execute(
        update(Lease)
        .where(Lease.name == name, or_(Lease.owner == owner, Lease.owner.is_(None), Lease.until_at < now))
        .values(
            owner=owner,
            until_at=now + seconds,
            fence=Lease.fence + case((Lease.owner == owner, 0), else_=1),
        )
        .execution_options(synchronize_session=False)
    )
    assert isinstance(taken, CursorResult)
    if taken.rowcount == 0:
        row = {"name": name, "owner": owner, "until_at": now + seconds, "fence": 1}
        if insert_new(session, Lease, [row]) == 0:
            return None
    return session.scalar(select(Lease.fence).where(Lease.name == name))


def release(session: Session, name: str, owner: str) -> None:
    """Gives the named lease back, if `owner` still holds it."""
    session.execute(
        update(Lease)
        .where(Lease.name == name, Lease.owner == owner)
        .values(owner=None, until_at=0.0)
        .execution_options(synchronize_session=False)
    )


def hold_controller(session: Session, run_id: int, client_id: str, now: float) -> bool:
    """Claims or renews the run's controller lease for a client that says it controls the run; True where it holds it.

    Taken over from a controller that went silent, said goodbye, or belongs to an earlier attempt; a client of an
    earlier attempt than the run's never gets it. Call on every envelope and poll of a controller.
    """
    run = session.execute(
        select(Run.attempt, Run.controller_client, Run.controller_until).where(Run.id == run_id)
    ).first()
    me = session.get(Client, (run_id, client_id), populate_existing=True)
    if run is None or me is None or me.last_attempt < run.attempt or me.finished_at is not None:
        return False
    holder = run.controller_client
    if holder is not None and holder != client_id and (run.controller_until or 0.0) >= now:
        other = session.get(Client, (run_id, holder), populate_existing=True)
        if other is not None and other.last_attempt >= me.last_attempt and other.finished_at is None:
            return False
    condition = Run.controller_client.is_(None) if holder is None else Run.controller_client == holder
    changed = session.execute(
        update(Run)
        .where(Run.id == run_id, condition)
        .values(controller_client=client_id, controller_until=now + CONTROLLER_S)
        .execution_options(synchronize_session=False)
    )
    assert isinstance(changed, CursorResult)
    return changed.rowcount == 1


class Controller(Protocol):
    """What a controller's lease depends on, of a client's row."""

    id: str
    last_attempt: int
    finished_at: float | None


def keep_controller(session: Session, run: Run, client: Controller, now: float) -> bool:
    """`hold_controller` for a run and a client that this transaction holds and has written.

    Free of charge while the lease has long to go.
    """
    sure = run.controller_client == client.id and (run.controller_until or 0.0) - now > CONTROLLER_S / 2
    if sure and client.last_attempt >= run.attempt and client.finished_at is None:
        return True
    held = hold_controller(session, run.id, client.id, now)
    if held:
        set_committed_value(run, "controller_client", client.id)
        set_committed_value(run, "controller_until", now + CONTROLLER_S)
    return held


def release_evaluations(session: Session, owner: str) -> None:
    """Gives back every run that `owner` evaluates, so that another replica need not wait for the leases to end."""
    session.execute(
        update(EvaluationState)
        .where(EvaluationState.owner == owner)
        .values(owner=None, lease_until=0.0)
        .execution_options(synchronize_session=False)
    )
