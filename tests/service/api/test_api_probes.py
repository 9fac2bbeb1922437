"""`/diagnosis` shows what the attempt's probes found."""

from __future__ import annotations

from sqlalchemy import select

from foreshock_service.store.models import CommandRow, Run

RUN = "/v1/runs/math/q"


def test_a_done_probe_is_shown_as_evidence(house) -> None:
    house.step(1, {"loss": 1.0})
    house.wait_for(lambda: house.near.get(RUN).json()["last_step"] == 1)
    detail = {"probe": {"repeat": {"kl_k2": 0.0}, "other_mode": {"kl_k2": 1e-3}}}
    with house.rooms.store.write() as session:
        run = session.scalar(select(Run))
        for name, state in (("p1", "done"), ("p2", "refused")):
            session.add(CommandRow(
                id=name, run_id=run.id, attempt=run.attempt, kind="probe", actions=[], state=state, created_at=1.0,
                expires_at=2.0, finished_at=1.5, done_step=1, detail=detail,
            ))  # fmt: skip
    (probe,) = house.near.get(f"{RUN}/diagnosis").json()["probes"]
    assert (probe["command"], probe["step"], probe["moved"]) == ("p1", 1, ["other_mode"])
    assert "dropout" in probe["sentence"]
