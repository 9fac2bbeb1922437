"""A run on either database, and small words for asking and answering."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from foreshock.wire.commands import COMMAND_KINDS
from foreshock_service.store.engine import Store
from foreshock_service.store.models import Attempt, Run

NOW = 1_000.0
CONTROLLER = "c" * 32


@pytest.fixture
def make_run(store: Store) -> Callable[..., int]:
    """Writes a run in its first attempt, led by CONTROLLER, and returns its id."""

    def make(name: str = "lab/run", mode: str = "auto", capabilities: tuple[str, ...] = COMMAND_KINDS) -> int:
        with store.write() as session:
            run = Run(
                name=name,
                project=name.partition("/")[0],
                created_at=NOW,
                last_seen_at=NOW,
                status="running",
                mode=mode,
                capabilities=list(capabilities),
                attempt=1,
                controller_client=CONTROLLER,
                controller_until=NOW + 60,
            )
            session.add(run)
            session.flush()
            session.add(Attempt(run_id=run.id, ordinal=1, launch="one", generation=0, started_at=NOW, first_step=1))
            return run.id

    return make
