"""The incident book: one illness, one incident; linked to what led there; shared by rules, verdicts and people."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import func, select

from foreshock_service.incidents import book
from foreshock_service.incidents.book import IncidentChange, WrongState
from foreshock_service.rules.interface import Evidence, Finding, Outcome, StepView, Tick
from foreshock_service.store import migrate
from foreshock_service.store.engine import Store
from foreshock_service.store.models import Audit, Incident, Run

NOW = 1_000.0
MakeRun = Callable[..., int]


def view(step: int, attempt: int = 1) -> StepView:
    return StepView(run="lab/run", attempt=attempt, step=step, values={})


def finding(rule: str, transition: str, step: int, severity: str = "critical", **more: object) -> Finding:
    return Finding(rule=rule, transition=transition, severity=severity, step=step, **more)  # type: ignore[arg-type]


def apply(
    store: Store, run_id: int, step: int, *findings: Finding, firing: tuple[str, ...] | None = None,
    attempt: int = 1, now: float | None = None,
) -> list[tuple[str, str]]:  # fmt: skip
    """One evaluation; `firing` defaults to the rules that the findings leave open."""
    held = firing if firing is not None else tuple(f.rule for f in findings if f.transition != "close")
    with store.write() as session:
        run = session.get_one(Run, run_id)
        outcome = Outcome(findings=findings, firing=held)
        changes = book.apply(session, run, view(step, attempt), outcome, NOW + step if now is None else now)
        return [(c.incident.rule, c.kind) for c in changes]


def the(store: Store, rule: str) -> Incident:
    with store.read() as session:
        return session.scalars(select(Incident).where(Incident.rule == rule)).one()


def test_one_illness_is_one_incident_from_opening_to_closing(store: Store, make_run: MakeRun) -> None:
    run_id = make_run()
    number = Evidence(signal="policy.kl_k2", value=0.02, expected=1e-5, bound=1e-4)
    opened = finding(
        "onpolicy_disagreement", "open", 27, "warning", onset_step=25, evidence=(number,), edge="training_pass"
    )
    assert apply(store, run_id, 27, opened) == [("onpolicy_disagreement", "opened")]
    assert apply(store, run_id, 28, firing=("onpolicy_disagreement",)) == []
    worse = finding("onpolicy_disagreement", "escalate", 29, message="worse")
    assert apply(store, run_id, 29, worse) == [("onpolicy_disagreement", "escalated")]
    assert apply(store, run_id, 40, finding("onpolicy_disagreement", "close", 40)) == [
        ("onpolicy_disagreement", "resolved")
    ]
    incident = the(store, "onpolicy_disagreement")
    assert (incident.opened_step, incident.onset_step, incident.last_step, incident.resolved_step) == (27, 25, 29, 40)
    assert (incident.severity, incident.status, incident.edge) == ("critical", "resolved", "training_pass")
    assert (incident.message, incident.times_opened) == ("worse", 1)


def test_the_same_illness_within_the_cool_down_reopens_its_incident(store: Store, make_run: MakeRun) -> None:
    run_id = make_run()
    apply(store, run_id, 10, finding("gradient_spike", "open", 10))
    apply(store, run_id, 20, finding("gradient_spike", "close", 20))
    again = finding("gradient_spike", "open", 25, reopens=True)
    assert apply(store, run_id, 25, again) == [("gradient_spike", "reopened")]
    assert the(store, "gradient_spike").times_opened == 2
    apply(store, run_id, 30, finding("gradient_spike", "close", 30))
    assert apply(store, run_id, 90, finding("gradient_spike", "open", 90)) == [("gradient_spike", "opened")]
    with store.read() as session:
        assert session.scalar(select(func.count()).select_from(Incident)) == 2


def test_what_came_first_and_can_lead_here_is_named_as_precursor(store: Store, make_run: MakeRun) -> None:
    run_id = make_run()
    apply(store, run_id, 26, finding("onpolicy_disagreement", "open", 26), finding("missing_ranks", "open", 26))
    apply(store, run_id, 34, finding("reward_collapse", "open", 34), firing=("onpolicy_disagreement", "missing_ranks"))
    assert the(store, "reward_collapse").precursor_id == the(store, "onpolicy_disagreement").id
    assert the(store, "missing_ranks").precursor_id is None


def test_a_consequence_that_came_first_is_no_precursor(store: Store, make_run: MakeRun) -> None:
    run_id = make_run()
    apply(store, run_id, 10, finding("reward_collapse", "open", 10))
    apply(store, run_id, 12, finding("rollout_mismatch", "open", 12), firing=("reward_collapse",))
    assert the(store, "rollout_mismatch").precursor_id is None


def test_of_two_that_open_together_the_cause_is_linked_to_the_consequence(store: Store, make_run: MakeRun) -> None:
    run_id = make_run()
    apply(store, run_id, 30, finding("reward_collapse", "open", 30), finding("rollout_mismatch", "open", 30))
    assert the(store, "reward_collapse").precursor_id == the(store, "rollout_mismatch").id


@pytest.mark.parametrize(("later", "linked"), [(60, True), (200, False)])
def test_a_resolved_incident_is_a_precursor_for_a_while(
    store: Store, make_run: MakeRun, later: int, linked: bool
) -> None:
    run_id = make_run()
    apply(store, run_id, 26, finding("onpolicy_disagreement", "open", 26))
    apply(store, run_id, 35, finding("onpolicy_disagreement", "close", 35))
    apply(store, run_id, later, finding("reward_collapse", "open", later))
    assert (the(store, "reward_collapse").precursor_id is not None) == linked


def test_open_incidents_outlive_a_new_attempt_and_their_evidence_says_so(store: Store, make_run: MakeRun) -> None:
    run_id = make_run()
    apply(store, run_id, 26, finding("rollout_mismatch", "open", 26))
    apply(store, run_id, 21, firing=("rollout_mismatch",), attempt=2)
    incident = the(store, "rollout_mismatch")
    assert incident.status == "open"
    assert [e for e in incident.evidence if e.get("event") == "attempt"] == [
        {"event": "attempt", "attempt": 2, "step": 21, "sentence": "attempt 2 began"}
    ]
    apply(store, run_id, 22, firing=("rollout_mismatch",), attempt=2)
    assert len(the(store, "rollout_mismatch").evidence) == 1
    number = Evidence(signal="mismatch.kl_k3", value=0.5)
    apply(store, run_id, 23, finding("rollout_mismatch", "update", 23, evidence=(number,)), attempt=2)
    assert [e.get("event", e.get("signal")) for e in the(store, "rollout_mismatch").evidence] == [
        "mismatch.kl_k3",
        "attempt",
    ]


def test_an_incident_that_no_rule_holds_open_is_closed_by_the_next_step_and_not_by_a_tick(
    store: Store, make_run: MakeRun
) -> None:
    run_id = make_run()
    apply(store, run_id, 26, finding("rollout_mismatch", "open", 26))
    with store.write() as session:
        tick = Tick(run="lab/run", attempt=1, step=26, silent_s=1.0, median_step_s=1.0)
        assert book.apply(session, session.get_one(Run, run_id), tick, Outcome(), NOW) == []
    assert apply(store, run_id, 27, firing=()) == [("rollout_mismatch", "resolved")]


def test_a_person_acknowledges_once_and_the_incident_stays_open(store: Store, make_run: MakeRun) -> None:
    run_id = make_run()
    apply(store, run_id, 26, finding("rollout_mismatch", "open", 26))
    incident = the(store, "rollout_mismatch").id
    with store.write() as session:
        assert book.acknowledge(session, incident, "ada", NOW).kind == "acknowledged"
    with store.write() as session, pytest.raises(WrongState):
        book.acknowledge(session, incident, "bob", NOW)
    assert (the(store, "rollout_mismatch").status, the(store, "rollout_mismatch").acknowledged_by) == (
        "acknowledged", "ada",
    )  # fmt: skip
    with store.read() as session:
        assert book.verdict(session, run_id, calibrated=True) == "critical"


def test_what_a_person_resolved_stays_so_until_it_worsens_or_comes_anew(store: Store, make_run: MakeRun) -> None:
    run_id = make_run()
    apply(store, run_id, 26, finding("rollout_mismatch", "open", 26, "warning"))
    with store.write() as session:
        book.resolve(session, the(store, "rollout_mismatch").id, "ada", NOW)
    assert apply(store, run_id, 30, finding("rollout_mismatch", "update", 30, "warning")) == []
    assert apply(store, run_id, 31, finding("rollout_mismatch", "escalate", 31)) == [("rollout_mismatch", "reopened")]
    with store.write() as session, pytest.raises(book.NotFound):
        book.resolve(session, "nothing", "ada", NOW)


def test_a_mitigated_incident_opens_again_when_it_escalates_and_resolves_when_it_closes(
    store: Store, make_run: MakeRun
) -> None:
    run_id = make_run()
    apply(store, run_id, 26, finding("rollout_mismatch", "open", 26, "warning"))
    with store.write() as session:
        assert book.mitigate(session, book.find(session, the(store, "rollout_mismatch").id), "command", NOW)
    with store.read() as session:
        assert book.verdict(session, run_id, calibrated=True) == "warning"
    apply(store, run_id, 27, finding("rollout_mismatch", "update", 27, "warning"))
    assert the(store, "rollout_mismatch").status == "mitigated"
    apply(store, run_id, 28, finding("rollout_mismatch", "escalate", 28))
    assert the(store, "rollout_mismatch").status == "open"
    apply(store, run_id, 30, finding("rollout_mismatch", "close", 30))
    assert the(store, "rollout_mismatch").status == "resolved"


def test_the_verdict_is_the_worst_open_incident_and_unknown_before_calibration(store: Store, make_run: MakeRun) -> None:
    run_id = make_run()

    def verdict(calibrated: bool = True) -> str:
        with store.read() as session:
            return book.verdict(session, run_id, calibrated=calibrated)

    assert (verdict(False), verdict()) == ("unknown", "healthy")
    apply(store, run_id, 5, finding("entropy_collapse", "open", 5, "warning"))
    assert verdict(False) == "warning"
    apply(store, run_id, 6, finding("non_finite", "open", 6), firing=("entropy_collapse",))
    assert verdict(False) == "critical"


def test_every_change_of_status_is_audited_with_who_made_it(store: Store, make_run: MakeRun) -> None:
    run_id = make_run()
    apply(store, run_id, 26, finding("rollout_mismatch", "open", 26))
    with store.write() as session:
        book.acknowledge(session, the(store, "rollout_mismatch").id, "ada", NOW)
    apply(store, run_id, 30, finding("rollout_mismatch", "close", 30))
    with store.read() as session:
        audit = session.execute(select(Audit.was, Audit.became, Audit.actor).order_by(Audit.id)).all()
        assert [tuple(a) for a in audit] == [
            (None, "open", "rules"),
            ("open", "acknowledged", "ada"),
            ("acknowledged", "resolved", "rules"),
        ]


@pytest.fixture
def replicas(postgres_url: str) -> Iterator[tuple[Store, Store]]:
    first, second = Store(postgres_url), Store(postgres_url)
    migrate.upgrade(first)
    with first.write() as session:
        session.add(Run(id=1, name="p/r", project="p", created_at=NOW, last_seen_at=NOW, attempt=1))
    yield first, second
    first.close()
    second.close()


@pytest.mark.postgres
def test_two_replicas_that_see_the_same_opening_write_one_incident(replicas: tuple[Store, Store]) -> None:
    barrier = threading.Barrier(2)
    results: list[list[IncidentChange]] = []

    def evaluate(store: Store) -> None:
        barrier.wait()
        with store.write() as session:
            outcome = Outcome(findings=[finding("non_finite", "open", 3)], firing=["non_finite"])
            results.append(book.apply(session, session.get_one(Run, 1), view(3), outcome, NOW))
            threading.Event().wait(0.15)

    threads = [threading.Thread(target=evaluate, args=(store,)) for store in replicas]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert sorted(len(changes) for changes in results) == [0, 1]
    with replicas[0].read() as session:
        assert session.scalar(select(func.count()).select_from(Incident)) == 1
