"""Every table of the service. Times are epoch seconds of the service's clock (double precision), written `*_at`.

Two levels: `frames`, one blob a frame, partitioned by day on PostgreSQL, kept for days; `points`, merged per completed
step, kept until the run is deleted. `frames`, `steps` and `points` are written with Core statements in groups; the rest
is small. The same metadata is migrated by alembic on SQLite and PostgreSQL.

JSON columns spell non-finite numbers as "nan", "inf", "-inf" (`store.types.dump_json`), since JSONB has no others.
A client is keyed by (run, client id): one process may serve two runs one after the other. A frame's key is
(run, attempt, step, role, rank, client, sequence), with `received_at` behind it because PostgreSQL wants the partition
key in every unique index.
"""

from __future__ import annotations

from typing import Any, ClassVar

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    FetchedValue,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from foreshock_service.store.types import PackedFloats

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}
Json = JSON().with_variant(JSONB(), "postgresql")
BigId = BigInteger().with_variant(Integer(), "sqlite")
"""SQLite autoincrements only INTEGER primary keys."""


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map: ClassVar[dict[Any, Any]] = {float: Float(53), dict[str, Any]: Json, list[Any]: Json}


class Run(Base):
    """One training job, `project/name`."""

    __tablename__ = "runs"
    __table_args__ = ({"sqlite_autoincrement": True},)
    # Without AUTOINCREMENT SQLite hands a deleted run's id to the next one, which would inherit its frames.

    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    name: Mapped[str] = mapped_column(String(257), unique=True)
    project: Mapped[str] = mapped_column(String(128), index=True)
    created_at: Mapped[float]
    last_seen_at: Mapped[float]
    status: Mapped[str] = mapped_column(String(16), default="running")
    """running · paused · finished · crashed · silent"""
    finished_at: Mapped[float | None]
    verdict: Mapped[str] = mapped_column(String(16), default="unknown")
    """healthy · warning · critical · unknown: derived from open incidents at each evaluation."""
    mode: Mapped[str | None] = mapped_column(String(16))
    """observe · approve · auto; None until the first envelope or an operator says."""
    mode_by: Mapped[str | None] = mapped_column(String(128))
    """Who said so: `client` (the host's own configuration, which a later launch may change) or a person, who stays."""
    capabilities: Mapped[list[Any]] = mapped_column(default=list)
    settings: Mapped[dict[str, Any]] = mapped_column(default=dict)
    config: Mapped[dict[str, Any]] = mapped_column(default=dict)
    labels: Mapped[dict[str, Any]] = mapped_column(default=dict)
    rules: Mapped[dict[str, Any]] = mapped_column(default=dict)
    """Per-run overrides of the rule pack."""
    attempt: Mapped[int] = mapped_column(default=0)
    """Ordinal of the current attempt; 0 before the first frame."""
    last_step: Mapped[int | None] = mapped_column(BigInteger)
    median_step_s: Mapped[float | None]
    """Median seconds between the last evaluated steps, by event time; sets the watermark of the next ones."""
    controller_client: Mapped[str | None] = mapped_column(String(32))
    controller_until: Mapped[float | None]
    budget: Mapped[dict[str, Any]] = mapped_column(default=dict)
    """What was spent of the command budget: {kind: count}."""


class Attempt(Base):
    """Begins at each launch and each completed rollback: (launch, generation), numbered from 1 as first seen."""

    __tablename__ = "attempts"
    __table_args__ = (UniqueConstraint("run_id", "ordinal"), UniqueConstraint("run_id", "launch", "generation"))

    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    ordinal: Mapped[int]
    launch: Mapped[str] = mapped_column(String(128))
    generation: Mapped[int] = mapped_column(default=0)
    started_at: Mapped[float]
    ended_at: Mapped[float | None]
    reason: Mapped[str] = mapped_column(String(64), default="launch")
    first_step: Mapped[int | None] = mapped_column(BigInteger)
    expected_ranks: Mapped[dict[str, Any]] = mapped_column(default=dict)
    """role → world size, as the envelopes of this attempt last said; empty: the ranks seen in the last three steps."""


class Client(Base):
    """One process that posts. `last_sequence` advances in the transaction that stores the items, and only upwards."""

    __tablename__ = "clients"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    launch: Mapped[str] = mapped_column(String(128))
    role: Mapped[str] = mapped_column(String(16))
    rank: Mapped[int]
    last_sequence: Mapped[int] = mapped_column(BigInteger, default=0)
    losses: Mapped[dict[str, Any]] = mapped_column(default=dict)
    sdk: Mapped[str] = mapped_column(String(64), default="")
    first_seen_at: Mapped[float]
    last_seen_at: Mapped[float]
    last_step: Mapped[int | None] = mapped_column(BigInteger)
    last_attempt: Mapped[int] = mapped_column(default=0)
    finished_at: Mapped[float | None]
    """When it said goodbye: a finished client is not a silent one."""


class FrameRow(Base):
    """One frame as it came (msgpack of `foreshock.wire.Frame`). Day partitions by `received_at` on PostgreSQL."""

    __tablename__ = "frames"
    __table_args__ = ({"postgresql_partition_by": "RANGE (received_at)"},)

    run_id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    """No foreign key: a deleted run's frames go with it (`store.runs.delete`) or with their day."""
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    role: Mapped[str] = mapped_column(String(16), primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    client_id: Mapped[str] = mapped_column(String(32), primary_key=True)
    sequence: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    received_at: Mapped[float] = mapped_column(primary_key=True)
    event_at: Mapped[float]
    flags: Mapped[int] = mapped_column(default=0)
    """Bit set of `store.flags`."""
    body: Mapped[bytes] = mapped_column(LargeBinary)


class Step(Base):
    """How complete a step is, and whether it was evaluated. One row per (run, attempt, step)."""

    __tablename__ = "steps"
    __table_args__ = (
        Index(
            "ix_steps_waiting",
            "run_id",
            "attempt",
            "step",
            postgresql_where=text("evaluated_at IS NULL"),
            sqlite_where=text("evaluated_at IS NULL"),
        ),
    )

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    first_at: Mapped[float]
    event_at: Mapped[float]
    due_at: Mapped[float]
    """Now when all expected ranks have reported, else first_at + watermark."""
    reported: Mapped[int] = mapped_column(default=0)
    expected: Mapped[int] = mapped_column(default=0)
    flags: Mapped[int] = mapped_column(default=0)
    evaluated_at: Mapped[float | None]


class SignalName(Base):
    """Position of a signal in the `points.values` array of its run. Append-only per run."""

    __tablename__ = "signals"
    __table_args__ = (UniqueConstraint("run_id", "name"),)

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """From 1, as PostgreSQL's arrays count."""
    name: Mapped[str] = mapped_column(String(128))


class EvaluationState(Base):
    """The fold of one run: baselines and rule states, under a fenced lease."""

    __tablename__ = "evaluations"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    owner: Mapped[str | None] = mapped_column(String(64))
    lease_until: Mapped[float] = mapped_column(default=0.0)
    fence: Mapped[int] = mapped_column(BigInteger, default=0)
    """Rises at each change of owner; every commit of an evaluation is conditional on it."""
    pack_hash: Mapped[str] = mapped_column(String(64), default="")
    attempt: Mapped[int] = mapped_column(default=0)
    step: Mapped[int | None] = mapped_column(BigInteger)
    segment: Mapped[int] = mapped_column(default=0)
    settings: Mapped[dict[str, Any]] = mapped_column(default=dict)
    """The run's settings as of `step` (`runs.settings` holds the newest)."""
    evaluated_at: Mapped[float | None]
    ticked_at: Mapped[float | None]
    state: Mapped[bytes | None] = mapped_column(LargeBinary)


class Notice(Base):
    """What clients noticed: launches, checkpoints, weight syncs, flushes, ends."""

    __tablename__ = "notices"
    __table_args__ = (
        Index("ix_notices_run_id_id", "run_id", "id"),
        Index("ix_notices_fresh", "run_id", postgresql_where=text("NOT consumed"), sqlite_where=text("NOT consumed")),
    )

    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    attempt: Mapped[int]
    step: Mapped[int | None] = mapped_column(BigInteger)
    at: Mapped[float]
    kind: Mapped[str] = mapped_column(String(32))
    role: Mapped[str] = mapped_column(String(16))
    rank: Mapped[int]
    client_id: Mapped[str] = mapped_column(String(32))
    data: Mapped[dict[str, Any]]
    consumed: Mapped[bool] = mapped_column(Boolean, default=False)
    """True once the rules saw it, with the first step evaluated at or after its own."""


class Incident(Base):
    """A rule's finding on a run: one illness, one incident, however long it lasts."""

    __tablename__ = "incidents"
    __table_args__ = (Index("ix_incidents_run_id_status", "run_id", "status"),)

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    rule: Mapped[str] = mapped_column(String(64))
    severity: Mapped[str] = mapped_column(String(16))
    status: Mapped[str] = mapped_column(String(16), default="open")
    """open · acknowledged · mitigated · resolved"""
    attempt: Mapped[int]
    opened_at: Mapped[float]
    opened_step: Mapped[int | None] = mapped_column(BigInteger)
    onset_step: Mapped[int | None] = mapped_column(BigInteger)
    last_step: Mapped[int | None] = mapped_column(BigInteger)
    resolved_at: Mapped[float | None]
    resolved_step: Mapped[int | None] = mapped_column(BigInteger)
    acknowledged_by: Mapped[str | None] = mapped_column(String(128))
    message: Mapped[str] = mapped_column(Text, default="")
    edge: Mapped[str | None] = mapped_column(String(16))
    evidence: Mapped[list[Any]] = mapped_column(default=list)
    diagnosis: Mapped[dict[str, Any]] = mapped_column(default=dict)
    """Ranked causes as of the last look."""
    precursor_id: Mapped[str | None] = mapped_column(String(32))
    """The incident that came first and leads here."""
    times_opened: Mapped[int] = mapped_column(default=1)


class Checkpoint(Base):
    """candidate → healthy → quarantined."""

    __tablename__ = "checkpoints"
    __table_args__ = (
        UniqueConstraint("run_id", "attempt", "step", "path_hash"),
        Index("ix_checkpoints_run_id_status", "run_id", "status"),
    )

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    attempt: Mapped[int]
    step: Mapped[int] = mapped_column(BigInteger)
    path: Mapped[str] = mapped_column(Text)
    path_hash: Mapped[str] = mapped_column(String(64))
    scope: Mapped[list[Any]] = mapped_column(default=list)
    status: Mapped[str] = mapped_column(String(16), default="candidate")
    reason: Mapped[str] = mapped_column(Text, default="")
    registered_at: Mapped[float]


class CommandRow(Base):
    """One or more ordered actions asked of one attempt. States and their order: `foreshock.wire.commands.STATES`."""

    __tablename__ = "commands"
    __table_args__ = (Index("ix_commands_run_id_state", "run_id", "state"), UniqueConstraint("run_id", "evidence_key"))

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    attempt: Mapped[int]
    kind: Mapped[str] = mapped_column(String(32))
    actions: Mapped[list[Any]]
    state: Mapped[str] = mapped_column(String(16), default="proposed")
    reason: Mapped[str] = mapped_column(Text, default="")
    incident_id: Mapped[str | None] = mapped_column(String(32))
    evidence_key: Mapped[str | None] = mapped_column(String(128))
    """Same evidence, same key: the same command is never issued twice on it, by whichever replica. NULL: a person's."""
    requested_by: Mapped[str] = mapped_column(String(128), default="policy")
    decided_by: Mapped[str | None] = mapped_column(String(128))
    created_at: Mapped[float]
    expires_at: Mapped[float]
    issued_step: Mapped[int | None] = mapped_column(BigInteger)
    at_step: Mapped[int | None] = mapped_column(BigInteger)
    delivered_at: Mapped[float | None]
    accepted_at: Mapped[float | None]
    accepted_by: Mapped[str | None] = mapped_column(String(32))
    finished_at: Mapped[float | None]
    done_step: Mapped[int | None] = mapped_column(BigInteger)
    detail: Mapped[dict[str, Any]] = mapped_column(default=dict)
    verdict: Mapped[str | None] = mapped_column(String(16))
    """helped · no_effect · worse · undecided, judged afterwards by the kind's own criterion."""
    verdict_step: Mapped[int | None] = mapped_column(BigInteger)
    verdict_detail: Mapped[dict[str, Any]] = mapped_column(default=dict)


class Audit(Base):
    """Every change of a command's state, a token, a run's mode: who, when, from what to what."""

    __tablename__ = "audit"
    __table_args__ = (Index("ix_audit_subject", "subject", "subject_id"),)

    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    at: Mapped[float]
    run_id: Mapped[int | None] = mapped_column(BigInteger)
    subject: Mapped[str] = mapped_column(String(32))
    subject_id: Mapped[str] = mapped_column(String(64))
    was: Mapped[str | None] = mapped_column(String(64))
    became: Mapped[str] = mapped_column(String(64))
    actor: Mapped[str] = mapped_column(String(128))
    detail: Mapped[dict[str, Any]] = mapped_column(default=dict)


class Delivery(Base):
    """The transactional outbox: at least once, under a stable `delivery_id`."""

    __tablename__ = "deliveries"
    __table_args__ = (
        Index("ix_deliveries_due", "state", "next_at"),
        Index("ix_deliveries_line", "channel", "line", "ordinal"),
        UniqueConstraint("channel", "dedupe_key"),
    )

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    run_id: Mapped[int | None] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    incident_id: Mapped[str | None] = mapped_column(String(32))
    line: Mapped[str | None] = mapped_column(String(32))
    """An incident's id, or a command's that belongs to none. Of a channel and a line, one leaves after the other."""
    ordinal: Mapped[int] = mapped_column(BigInteger, server_default=FetchedValue())
    """The order of writing; of one line also the order of committing, for each change holds its incident's row."""
    channel: Mapped[str] = mapped_column(String(64))
    event: Mapped[str] = mapped_column(String(32))
    dedupe_key: Mapped[str] = mapped_column(String(160))
    payload: Mapped[dict[str, Any]]
    state: Mapped[str] = mapped_column(String(16), default="pending")
    """pending · sending · sent · suppressed · dead"""
    attempts: Mapped[int] = mapped_column(default=0)
    next_at: Mapped[float]
    lease_until: Mapped[float] = mapped_column(default=0.0)
    created_at: Mapped[float]
    sent_at: Mapped[float | None]
    last_error: Mapped[str] = mapped_column(Text, default="")
    held_at: Mapped[float | None]
    """Since when quiet hours hold it; it is due at their end."""
    left_in: Mapped[str | None] = mapped_column(String(32))
    """How it left: the id of a digest, `thread`, or None for a message of its own."""


class AlertThread(Base):
    """Where a channel shows a line: the head message that is edited, the thread below it."""

    __tablename__ = "alert_threads"

    channel: Mapped[str] = mapped_column(String(64), primary_key=True)
    line: Mapped[str] = mapped_column(String(32), primary_key=True)
    run_id: Mapped[int | None] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    conversation: Mapped[str] = mapped_column(String(64))
    ts: Mapped[str] = mapped_column(String(32))
    last_delivery: Mapped[str] = mapped_column(String(32))
    """What was told last: a try that failed half-way does not tell it again."""
    at: Mapped[float]


class Silence(Base):
    """No alerts that match, until then. Incidents still open."""

    __tablename__ = "silences"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    project: Mapped[str | None] = mapped_column(String(128))
    run: Mapped[str | None] = mapped_column(String(257))
    rule: Mapped[str | None] = mapped_column(String(64))
    until_at: Mapped[float]
    created_at: Mapped[float]
    created_by: Mapped[str] = mapped_column(String(128))
    reason: Mapped[str] = mapped_column(Text, default="")


class Token(Base):
    """A bearer token: only its SHA-256 is kept."""

    __tablename__ = "tokens"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    name: Mapped[str] = mapped_column(String(128))
    hash: Mapped[str] = mapped_column(String(64), unique=True)
    project: Mapped[str | None] = mapped_column(String(128))
    """None: every project."""
    scopes: Mapped[list[Any]]
    created_at: Mapped[float]
    expires_at: Mapped[float | None]
    revoked_at: Mapped[float | None]
    last_used_at: Mapped[float | None]


class Lease(Base):
    """Named work that one replica does at a time: expiry, retention, partitions."""

    __tablename__ = "leases"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    owner: Mapped[str | None] = mapped_column(String(64))
    until_at: Mapped[float] = mapped_column(default=0.0)
    fence: Mapped[int] = mapped_column(BigInteger, default=0)


class Point(Base):
    """A completed step, merged over ranks. `values[signals.position]`; NULL is missing, NaN and infinities are kept."""

    __tablename__ = "points"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    at: Mapped[float]
    values: Mapped[list[Any]] = mapped_column(PackedFloats)
    """float8[] on PostgreSQL, packed float64 on SQLite (`store.types`): read one signal with `store.types.value_at`."""
    missing: Mapped[dict[str, Any]] = mapped_column(default=dict)
    worst: Mapped[dict[str, Any]] = mapped_column(default=dict)
    """signal → [value, rank]"""
    evidence: Mapped[dict[str, Any]] = mapped_column(default=dict)
    reported: Mapped[int] = mapped_column(default=0)
    expected: Mapped[int] = mapped_column(default=0)
    segment: Mapped[int] = mapped_column(default=0)
    bands: Mapped[dict[str, Any]] = mapped_column(default=dict)
    """signal → [low, centre, high]: the baseline as of this step."""
    flag: Mapped[bool] = mapped_column(Boolean, default=False)
    """True where the step was incomplete, replayed or flagged."""
