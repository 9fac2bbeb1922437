"""What an older version wrote is read, continued and answered by this one: every migration, every wire version."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import MetaData, create_engine, func, make_url, select, text

from foreshock.wire import SUPPORTED
from foreshock_service.app import create_app
from foreshock_service.store import migrate
from foreshock_service.store.engine import Store
from foreshock_service.store.models import Delivery, FrameRow, Incident, Notice
from tests.service.api.conftest import CLIENT, House, settings_for
from tests.service.conftest import _database

GOLDEN = Path(__file__).resolve().parents[2] / "contract" / "golden"
WATCHED = {"webhook_url": "http://127.0.0.1:1/"}
"""A receiver that is not there: deliveries stay in the outbox."""


def older() -> list[str]:
    """Every revision before head, the oldest first."""
    scripts = ScriptDirectory.from_config(migrate._config(None))
    return [script.revision for script in scripts.walk_revisions()][:0:-1]


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def new_database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], str]]:
    """Makes empty databases of one kind."""
    opened: list[Iterator[str]] = []
    server = request.getfixturevalue("postgres_server") if request.param == "postgresql" else ""

    def make() -> str:
        if not server:
            opened.append(iter(()))
            return f"sqlite:///{tmp_path / f'{len(opened)}.db'}"
        opened.append(_database(server))
        return next(opened[-1])

    yield make
    for generator in opened:
        next(generator, None)


def live(url: str) -> None:
    """A run that trained, fell ill and waits for a decision."""
    house = House(create_app(settings_for(url, **WATCHED))).open()
    house.started(mode="approve")
    house.steps({step: {"loss": 1.0, "reward.mean": 0.5} for step in range(1, 31)})
    house.step(31, {"loss": "nan", "reward.mean": 0.5})
    house.wait_for(lambda: house.near.get("/v1/incidents").json()["incidents"])
    house.wait_for(lambda: house.near.get("/v1/runs/math/q").json()["last_step"] == 31)
    body = {"actions": [{"kind": "scale_lr", "arguments": {"factor": 0.5}}], "reason": "before"}
    assert house.near.post("/v1/runs/math/q/commands", json=body).status_code == 201
    house.near.post("/v1/silences", json={"rule": "silent_run", "for_s": 86_400})
    house.token("read")
    house.close()


def as_written_by(revision: str, lived: str, target: str) -> None:
    """Copies what was lived into a database at `revision`: the columns that this revision had, nothing else."""
    store = Store(target)
    migrate.upgrade(store, revision)
    store.close()
    drivers = {"postgresql": "postgresql+psycopg", "sqlite": "sqlite"}
    source, aim = (create_engine(make_url(u).set(drivername=drivers[make_url(u).drivername])) for u in (lived, target))
    old, new = MetaData(), MetaData()
    keep = lambda name, _: not re.match(r"(frames_|grafana_|alembic_)", name)  # noqa: E731
    old.reflect(aim, only=keep)
    new.reflect(source, only=keep)
    with source.connect() as reading, aim.begin() as writing:
        for table in old.sorted_tables:
            columns = [c.name for c in table.columns if c.name in new.tables[table.name].columns]
            rows = reading.execute(select(*(new.tables[table.name].c[name] for name in columns))).mappings().all()
            if rows and table.name != "leases":
                writing.execute(table.insert(), [dict(row) for row in rows])
            if aim.dialect.name == "postgresql" and rows and "id" in columns and isinstance(rows[0]["id"], int):
                last = f"(SELECT max(id) FROM {table.name})"
                writing.execute(text(f"SELECT setval(pg_get_serial_sequence('{table.name}', 'id'), {last})"))
    for engine in (source, aim):
        engine.dispose()


@pytest.mark.parametrize("revision", older())
def test_data_of_an_older_revision_is_read_continued_and_answered(
    new_database: Callable[[], str], revision: str
) -> None:
    lived, target = new_database(), new_database()
    live(lived)
    as_written_by(revision, lived, target)
    house = House(create_app(settings_for(target, **WATCHED))).open()
    near: Any = house.near
    try:
        store = house.rooms.store
        assert migrate.current(store) == max(migrate.accepted())
        assert migrate.differences(store) == []
        with store.read() as session:
            assert session.scalar(select(func.count()).select_from(FrameRow)) == 31
            assert session.scalar(select(func.count()).select_from(Notice)) == 1
            deliveries = session.scalars(select(Delivery)).all()
            assert {d.line for d in deliveries} >= set(session.scalars(select(Incident.id)))
            assert len({d.ordinal for d in deliveries}) == len(deliveries) >= 2
        (incident,) = near.get("/v1/incidents").json()["incidents"]
        assert (incident["rule"], incident["status"]) == ("non_finite", "open")
        assert near.post(f"/v1/incidents/{incident['id']}/acknowledge").status_code == 200
        points = near.get("/v1/runs/math/q/series?signal=loss").json()["series"][0]["points"]
        assert len(points) == 31
        (command,) = near.get("/v1/runs/math/q/commands").json()["commands"]
        assert near.post(f"/v1/commands/{command['id']}/approve").status_code == 200
        offered = near.get(f"/v1/runs/math/q/health?client={CLIENT}").json()["commands"]
        assert [c["id"] for c in offered] == [command["id"]]
        for state in ("accepted", "done"):
            body = {"state": state, "client": CLIENT, "attempt": 1, "step": 31}
            assert near.post(f"/v1/commands/{command['id']}/ack", json=body).json() == {"state": state}
        repeated = {"sequence": 32, "step": 31, "role": "trainer", "rank": 0, "sealed_s": 1.0, "scalars": {"loss": 7.0}}
        house._sequences["math/q"] = 31
        near.post("/v1/ingest", json={**house.envelope(), "frames": [repeated]})
        house.step(32, {"loss": 1.0})
        house.wait_for(lambda: near.get("/v1/runs/math/q").json()["last_step"] == 32)
        with store.read() as session:
            assert session.scalar(select(func.count()).select_from(FrameRow)) == 32, "a repeated item was stored again"
        assert len(near.get("/v1/deliveries").json()["deliveries"]) >= len(deliveries)
    finally:
        house.close()


@pytest.mark.parametrize("version", sorted(SUPPORTED))
@pytest.mark.parametrize(("suffix", "kind"), [("msgpack", "application/msgpack"), ("json", "application/json")])
def test_recorded_envelopes_of_every_wire_version_are_stored_evaluated_and_stored_once(
    house_of: House, version: int, suffix: str, kind: str
) -> None:
    body = (GOLDEN / f"v{version}" / f"envelope.{suffix}").read_bytes()
    for _ in range(2):
        answer = house_of.near.post("/v1/ingest", content=body, headers={"Content-Type": kind})
        assert answer.status_code == 200, answer.text
    run = house_of.near.get("/v1/runs/lab/golden").json()
    assert run["config"] == {"lr": 1e-6}
    with house_of.rooms.store.read() as session:
        assert session.scalar(select(func.count()).select_from(FrameRow)) == 1
    house_of.wait_for(lambda: house_of.near.get("/v1/runs/lab/golden/steps/41").status_code == 200, 20)


@pytest.fixture
def house_of(database_url: str) -> Iterator[House]:
    opened = House(create_app(settings_for(database_url))).open()
    yield opened
    opened.close()
