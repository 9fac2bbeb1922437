from __future__ import annotations

import math
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.exc import DBAPIError

from foreshock_service.store.bulk import insert_rows, update_rows
from foreshock_service.store.engine import Store
from foreshock_service.store.models import Client, Step

KEY = ("run_id", "attempt", "step")


def steps(run_id: int, count: int) -> list[dict[str, Any]]:
    rest = {"first_at": 1.0, "event_at": 1.0, "due_at": 1.0, "reported": 0, "expected": 0, "flags": 0}
    return [
        {"run_id": run_id, "attempt": 1, "step": step, **rest, "evaluated_at": None} for step in range(1, count + 1)
    ]


def test_rows_are_updated_each_by_its_key_and_the_others_left_alone(store: Store, make_run: Any) -> None:
    first, second = make_run("lab/a"), make_run("lab/b")
    with store.write() as session:
        insert_rows(session, Step, [*steps(first, 3), *steps(second, 3)])
        changes = [
            {"run_id": first, "attempt": 1, "step": 2, "reported": 5, "evaluated_at": 7.5},
            {"run_id": second, "attempt": 1, "step": 3, "reported": 6, "evaluated_at": None},
            {"run_id": second, "attempt": 2, "step": 3, "reported": 9, "evaluated_at": 9.0},
        ]
        assert update_rows(session, Step, KEY, ("reported", "evaluated_at"), changes) == 2
    with store.read() as session:
        found = session.execute(select(Step.run_id, Step.step, Step.reported, Step.evaluated_at)).all()
    assert {tuple(row) for row in found if row.reported} == {(first, 2, 5, 7.5), (second, 3, 6, None)}
    assert len(found) == 6


def test_texts_come_back_as_they_went_in(store: Store, make_run: Any) -> None:
    run_id = make_run("lab/a")
    words = {"a": "plain", "b": 'quoted "," {} \\ NULL', "c": "näyttö €"}
    with store.write() as session:
        session.add_all(
            Client(run_id=run_id, id=name, launch="l", role="trainer", rank=0, first_seen_at=1.0, last_seen_at=1.0)
            for name in words
        )
        session.flush()
        changes = [{"run_id": run_id, "id": name, "sdk": word, "last_seen_at": math.pi} for name, word in words.items()]
        assert update_rows(session, Client, ("run_id", "id"), ("sdk", "last_seen_at"), changes) == 3
    with store.read() as session:
        assert dict(session.execute(select(Client.id, Client.sdk)).all()) == words
        assert set(session.scalars(select(Client.last_seen_at))) == {math.pi}


def test_no_rows_are_no_statement(store: Store) -> None:
    with store.write() as session:
        assert update_rows(session, Step, KEY, ("reported",), []) == 0


def test_what_the_database_refuses_is_raised_as_sqlalchemy_would(store: Store, make_run: Any) -> None:
    run_id = make_run("lab/a")
    with store.write() as session:
        insert_rows(session, Step, steps(run_id, 1))
    change = {"run_id": run_id, "attempt": 1, "step": 1, "reported": None}
    with pytest.raises(DBAPIError), store.write() as session:
        update_rows(session, Step, KEY, ("reported",), [change])
