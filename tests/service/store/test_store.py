from __future__ import annotations

import math
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, text

from foreshock_service.store import leases, retention
from foreshock_service.store.columns import Window, read_columns
from foreshock_service.store.engine import DatabaseUrlError, Store, StoreInUseError, normalise_url
from foreshock_service.store.models import Delivery, FrameRow, Run, SignalName
from foreshock_service.store.points import Positions
from foreshock_service.store.retention import (
    DAY_S,
    drop_old_deliveries,
    drop_old_frames,
    ensure_partitions,
    partition_name,
    span_s,
)
from foreshock_service.store.types import Packed, dump_json, pack, read_value, unpack, value_at

NOW = 1_800_000_000.0


def new_run(store: Store, name: str = "math/run") -> int:
    with store.write() as session:
        run = Run(name=name, project="math", created_at=NOW, last_seen_at=NOW)
        session.add(run)
        session.flush()
        return run.id


def frame(run_id: int, sequence: int, received_at: float) -> FrameRow:
    return FrameRow(
        run_id=run_id, attempt=1, step=sequence, role="trainer", rank=0, client_id="c", sequence=sequence,
        received_at=received_at, event_at=received_at, flags=0, body=b"x",
    )  # fmt: skip


@pytest.mark.parametrize(
    "url", ["mysql://x/y", "sqlite://", "sqlite:///:memory:", "nonsense", "sqlite:///a.db?mode=memory"]
)
def test_urls_that_cannot_serve_are_refused_in_words(url: str) -> None:
    with pytest.raises(DatabaseUrlError, match=r"expected|needs a file"):
        Store(url)


@pytest.mark.parametrize("url", ["postgres://u@h/d", "postgresql://u@h/d", "postgresql+psycopg://u@h/d"])
def test_every_spelling_of_postgresql_is_psycopg(url: str) -> None:
    assert normalise_url(url).drivername == "postgresql+psycopg"


def test_sqlite_belongs_to_one_process(sqlite_url: str) -> None:
    store = Store(sqlite_url)
    with pytest.raises(StoreInUseError, match="in use by process"):
        Store(sqlite_url)
    code = f"from foreshock_service.store.engine import Store; Store({sqlite_url!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "StoreInUseError" in done.stderr
    store.close()
    Store(sqlite_url).close()


def test_sqlite_is_durable_and_checked(store: Store) -> None:
    if store.dialect != "sqlite":
        pytest.skip("SQLite's own settings")
    with store.read() as session:
        connection = session.connection()
        found = {p: connection.exec_driver_sql(f"PRAGMA {p}").scalar() for p in ("journal_mode", "synchronous")}
        assert found == {"journal_mode": "wal", "synchronous": 2}
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1


def test_only_what_can_be_repeated_does_not_wait_for_the_disk(store: Store) -> None:
    asked = {"sqlite": "PRAGMA synchronous", "postgresql": "SHOW synchronous_commit"}[store.dialect]
    found = []
    for durable in (True, False, True):
        with store.write(durable=durable) as session:
            found.append(session.connection().exec_driver_sql(asked).scalar())
    assert found == {"sqlite": [2, 1, 2], "postgresql": ["on", "off", "on"]}[store.dialect]


def test_a_write_that_fails_leaves_nothing(store: Store) -> None:
    def fail() -> None:
        with store.write() as session:
            session.add(Run(name="math/run", project="math", created_at=NOW, last_seen_at=NOW))
            session.flush()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with store.read() as session:
        assert session.scalars(select(Run)).all() == []


def test_concurrent_writers_of_one_row_queue(store: Store) -> None:
    run_id = new_run(store)

    def bump() -> None:
        for _ in range(20):
            with store.write() as session:
                run = session.scalars(select(Run).where(Run.id == run_id).with_for_update()).one()
                run.attempt += 1

    threads = [threading.Thread(target=bump) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with store.read() as session:
        assert session.scalars(select(Run.attempt)).one() == 80


def test_a_nested_write_raises_instead_of_waiting_for_itself(sqlite_url: str) -> None:
    store = Store(sqlite_url)
    inner = store.write()
    with store.write(), pytest.raises(RuntimeError, match="inside"):
        inner.__enter__()
    store.close()


def test_run_ids_are_never_used_again(store: Store) -> None:
    first = new_run(store)
    with store.write() as session:
        session.execute(text("DELETE FROM runs"))
    assert new_run(store) > first


def test_packed_floats_keep_missing_apart_from_nan() -> None:
    values = [None, math.nan, math.inf, -math.inf, -0.0, 5e-324, 1.5]
    back = unpack(pack(values))
    assert [repr(v) for v in back] == [repr(v) for v in values]
    with pytest.raises(ValueError, match="multiple of 8"):
        unpack(b"123")


def test_one_value_is_read_without_its_row(store: Store) -> None:
    from foreshock_service.store.models import Point

    run_id = new_run(store)
    row = [1.0, None, math.nan, math.inf]
    with store.write() as session:
        session.add(Point(run_id=run_id, attempt=1, step=1, at=NOW, values=row))
    with store.read() as session:
        assert [repr(v) for v in session.scalars(select(Point.values)).one()] == [repr(v) for v in row]
        found = [
            read_value(session.scalar(select(value_at(Point.values.expression, p, store.dialect)))) for p in range(1, 6)
        ]
    assert [repr(v) for v in found] == [repr(v) for v in [*row, None]]


def test_json_spells_what_json_has_no_word_for() -> None:
    told = {"a": math.nan, "b": [math.inf, {"c": -math.inf}], 3: "x\x00\ud800", "d": b"1", "e": (1, None)}
    assert dump_json(told) == (
        '{"a":"nan","b":["inf",{"c":"-inf"}],"3":"x\\ufffd\\ufffd\\ufffd\\ufffd","d":"b\'1\'","e":[1,null]}'
    )


def unpacked(found: tuple[Any, list[str]]) -> tuple[list[float | None], list[str]]:
    return unpack(found[0].tobytes()), found[1]


def test_positions_of_signals_are_append_only_and_bounded(store: Store) -> None:
    run_id = new_run(store)
    with store.write() as session:
        positions = Positions(session, run_id, 3)
        assert unpacked(positions.row({"b": 2.0, "a": 1.0})) == ([1.0, 2.0], [])
        assert unpacked(positions.row({"d": 4.0, "c": 3.0, "b": 2.0})) == ([None, 2.0, 3.0], ["d"])
    with store.write() as session:
        assert unpacked(Positions(session, run_id, 3).row({"c": 9.0})) == ([None, None, 9.0], [])
        assert {s.name: s.position for s in session.scalars(select(SignalName))} == {"a": 1, "b": 2, "c": 3}


def test_a_lease_is_held_by_one_and_fenced(store: Store) -> None:
    def claim(owner: str, now: float) -> int | None:
        with store.write() as session:
            return leases.claim(session, "upkeep", owner, now, 10.0)

    assert claim("a", NOW) == 1
    assert claim("b", NOW + 9) is None
    assert claim("a", NOW + 9) == 1
    assert claim("b", NOW + 20) == 2
    assert claim("a", NOW + 21) is None
    with store.write() as session:
        leases.release(session, "upkeep", "b")
    assert claim("a", NOW + 21) == 3


def test_of_many_claimants_at_once_one_wins(store: Store) -> None:
    won: list[str] = []

    def claim(owner: str) -> None:
        with store.write() as session:
            if leases.claim(session, "upkeep", owner, NOW, 10.0) is not None:
                won.append(owner)

    threads = [threading.Thread(target=claim, args=(f"r{i}",)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1


def test_old_frames_go_and_young_ones_stay(store: Store) -> None:
    run_id = new_run(store)
    days = [int(NOW // DAY_S) + d for d in (-9, -8, -2, 0)]
    with store.write() as session:
        for day in days[:3]:
            ensure_partitions(session, day * DAY_S + 5.0, ahead=0)
        ensure_partitions(session, NOW)
    with store.write() as session:
        session.add_all([frame(run_id, i + 1, day * DAY_S + 10.0) for i, day in enumerate(days)])
    assert drop_old_frames(store, NOW, keep_days=7.0) >= 2  # the migration made partitions of its own day
    with store.read() as session:
        assert session.scalars(select(FrameRow.step).order_by(FrameRow.step)).all() == [3, 4]
    assert drop_old_frames(store, NOW, keep_days=7.0) == 0


def test_partitions_are_made_ahead_and_take_over_what_the_default_held(migrated_postgres_url: str) -> None:
    store = Store(migrated_postgres_url)
    run_id = new_run(store)
    with store.write() as session:
        session.add(frame(run_id, 1, NOW))
    with store.write() as session:
        assert session.scalar(text("SELECT count(*) FROM frames_default")) == 1
        made = ensure_partitions(session, NOW, ahead=2)
        assert made == [partition_name((NOW // DAY_S + d) * DAY_S) for d in range(3)]
        assert ensure_partitions(session, NOW, ahead=2) == []
    with store.read() as session:
        assert session.scalar(text("SELECT count(*) FROM frames_default")) == 0
        assert session.scalar(text(f"SELECT count(*) FROM {made[0]}")) == 1
    store.close()


def test_where_little_is_kept_partitions_are_small_and_go_one_by_one(migrated_postgres_url: str) -> None:
    store = Store(migrated_postgres_url)
    run_id = new_run(store)
    now, keep_days = NOW + 3.0, 36.0 / DAY_S
    span = span_s(keep_days, every_s=6.0)
    assert span == 10
    with store.write() as session:
        ensure_partitions(session, now)  # whole days: still empty, they make room
        assert ensure_partitions(session, now, span=span) == [
            partition_name(now // 10 * 10 + s) for s in (0, 10, 20, 30)
        ]
    with store.write() as session:
        session.add_all([frame(run_id, i + 1, now + 10.0 * i) for i in range(4)])
    later = now + 60.0
    assert drop_old_frames(store, later, keep_days) >= 2
    with store.read() as session:
        assert session.scalars(select(FrameRow.step).order_by(FrameRow.step)).all() == [3, 4]
    with store.write() as session:
        again = ensure_partitions(session, later)
        session.add(frame(run_id, 9, NOW // DAY_S * DAY_S + DAY_S - 1.0))
    assert len(again) > 4, "whole days again: what the small ones leave of the first day, and three more"
    with store.read() as session:
        assert session.scalar(text("SELECT count(*) FROM frames_default")) == 0
        assert session.scalar(text("SELECT count(*) FROM frames")) == 3
    store.close()


@pytest.mark.parametrize(
    ("keep_days", "every_s", "span"),
    [(7.0, 3600.0, DAY_S), (3.0, 3600.0, DAY_S), (2.0, 3600.0, 21_600), (0.1, 3600.0, 3600), (0.1, 5.0, 600)],
)
def test_a_partition_holds_a_third_of_what_is_kept_and_no_less_than_passes_between_two_looks(
    keep_days: float, every_s: float, span: int
) -> None:
    assert span_s(keep_days, every_s) == span


def test_a_partition_in_use_stays_until_the_next_look_and_nobody_waits_for_it(
    migrated_postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "TRIES", 2)
    store = Store(migrated_postgres_url)
    run_id = new_run(store)
    with store.write() as session:
        ensure_partitions(session, NOW - 9 * DAY_S, ahead=0)
        session.add(frame(run_id, 1, NOW - 9 * DAY_S))
    with store.read() as backup:
        assert backup.scalar(text("SELECT count(*) FROM frames")) == 1
        assert drop_old_frames(store, NOW, keep_days=7.0) == 0
    assert drop_old_frames(store, NOW, keep_days=7.0) >= 1
    store.close()


def test_views_show_points_in_long_form(migrated_postgres_url: str) -> None:
    from foreshock_service.store.models import Point

    store = Store(migrated_postgres_url)
    run_id = new_run(store)
    with store.write() as session:
        row, _ = Positions(session, run_id, 9).row({"loss": math.nan, "lr": 1e-6})
        bands: dict[str, Any] = {"loss": (0.0, math.nan, math.inf)}
        session.add(Point(run_id=run_id, attempt=1, step=7, at=NOW, values=row, bands=bands))
    with store.read() as session:
        points = session.execute(text("SELECT run, step, signal, value FROM grafana_points ORDER BY signal")).all()
        (band,) = session.execute(text("SELECT signal, low, centre, high FROM grafana_bands")).all()
    assert repr(list(map(tuple, points))) == "[('math/run', 7, 'loss', nan), ('math/run', 7, 'lr', 1e-06)]"
    assert repr(tuple(band)) == "('loss', 0.0, nan, inf)"
    store.close()


def test_a_database_file_may_lie_in_a_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'a' / 'b' / 'f.db'}")
    assert store.ping()
    store.close()


def test_deliveries_that_are_over_go_after_their_days_and_those_that_wait_stay(store: Store) -> None:
    def delivery(key: str, state: str, days: float) -> Delivery:
        return Delivery(
            id=key, channel="c", event="incident.opened", dedupe_key=key, payload={}, state=state,
            next_at=NOW, created_at=NOW - days * DAY_S,
        )  # fmt: skip

    with store.write() as session:
        session.add_all(
            delivery(f"{state}{days}", state, days) for state in ("sent", "dead", "pending") for days in (1, 40)
        )
    assert drop_old_deliveries(store, NOW, 30.0) == 2
    with store.read() as session:
        assert sorted(session.scalars(select(Delivery.id))) == ["dead1", "pending1", "pending40", "sent1"]


def test_a_result_left_unread_does_not_keep_later_readers_in_the_past(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path}/one.db", pool_size=1)
    with store.write() as session:
        session.connection().exec_driver_sql("CREATE TABLE t (x INTEGER)")
        session.connection().exec_driver_sql("INSERT INTO t VALUES (1), (2), (3)")
    with store.read() as session:
        left_unread = session.connection().exec_driver_sql("SELECT x FROM t").cursor
        assert left_unread is not None
        assert left_unread.fetchone() == (1,)
    with store.write() as session:
        session.connection().exec_driver_sql("INSERT INTO t VALUES (4)")
    with store.read() as session:
        assert session.connection().exec_driver_sql("SELECT count(*) FROM t").scalar() == 4
    with sqlite3.connect(tmp_path / "one.db", timeout=0.1) as another:
        (busy, _, _) = another.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    another.close()
    store.close()
    assert busy == 0


def test_columns_of_packed_rows_of_different_lengths_leave_out_what_is_missing() -> None:
    table = Packed([pack([1.0, None, math.nan]), pack([2.0]), b"", pack([None, 3.0, math.inf])])
    read = [(values.tolist(), rows.tolist()) for values, rows in map(table.column, (1, 2, 3, 9))]
    assert read[0] == ([1.0, 2.0], [0, 1])
    assert read[1] == ([3.0], [3])
    assert math.isnan(read[2][0][0])
    assert (read[2][0][1:], read[2][1]) == ([math.inf], [0, 3])
    assert read[3] == ([], [])


@pytest.mark.parametrize("count", [1, 3, 5])
def test_columns_of_a_window_tell_missing_from_not_finite_whatever_the_number_of_signals(
    store: Store, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from foreshock_service.store import columns
    from foreshock_service.store.models import Point

    monkeypatch.setattr(columns, "ROWS_AT_ONCE", 2)

    run_id, other = new_run(store), new_run(store, "math/other")
    rows: list[list[float | None]] = [[1.0, None, math.nan, math.inf, 5.0], [2.0], [None, -math.inf, 0.25]]
    with store.write() as session:
        session.add_all(
            Point(run_id=run, attempt=attempt, step=step, at=NOW + step, values=values)
            for run in (run_id, other)
            for attempt in (2, 1)
            for step, values in enumerate(rows, start=7)
        )

    def shown(window: Window, most: int = 100) -> list[Any]:
        with store.read() as session:
            found = read_columns(session, window, [3, 2, 1, 5, 4][:count], most)
        keys = list(zip(found.attempt.tolist(), found.step.tolist(), found.at.tolist(), strict=True))
        columns: list[Any] = [["-"] * len(found) for _ in range(count)]
        for column, (values, where) in zip(columns, found.values, strict=True):
            for place, value in zip(where.tolist(), values.tolist(), strict=True):
                column[place] = value
        return [(*key, *map(repr, row)) for key, row in zip(keys, zip(*columns, strict=True), strict=True)]

    def expected(attempt: int, step: int) -> Any:
        row = rows[step - 7]
        wanted = [row[p - 1] if p <= len(row) else None for p in [3, 2, 1, 5, 4][:count]]
        return (attempt, step, NOW + step, *(repr("-" if v is None else v) for v in wanted))

    assert shown(Window(run_id)) == [expected(a, s) for a in (1, 2) for s in (7, 8, 9)]
    assert shown(Window(run_id), most=4) == [expected(1, 7), expected(1, 8), expected(1, 9), expected(2, 7)]
    assert shown(Window(run_id, attempt=2, from_step=8, to_step=8)) == [expected(2, 8)]
    assert shown(Window(run_id, attempt=3)) == []
