"""The spine: every table, the day partitions' parent, and the `grafana_*` views with their read-only role.

Revision ID: 0001
Revises:
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
NUMBER = sa.Float(53)
FLOATS = sa.LargeBinary().with_variant(postgresql.ARRAY(sa.Float(53)), "postgresql")


def create_runs() -> None:
    op.create_table(
        "runs",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("name", sa.String(length=257), nullable=False),
        sa.Column("project", sa.String(length=128), nullable=False),
        sa.Column("created_at", NUMBER, nullable=False),
        sa.Column("last_seen_at", NUMBER, nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("finished_at", NUMBER, nullable=True),
        sa.Column("verdict", sa.String(length=16), nullable=False),
        sa.Column("mode", sa.String(length=16), nullable=True),
        sa.Column("mode_by", sa.String(length=128), nullable=True),
        sa.Column("capabilities", JSON, nullable=False),
        sa.Column("settings", JSON, nullable=False),
        sa.Column("config", JSON, nullable=False),
        sa.Column("labels", JSON, nullable=False),
        sa.Column("rules", JSON, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("last_step", sa.BigInteger(), nullable=True),
        sa.Column("median_step_s", NUMBER, nullable=True),
        sa.Column("controller_client", sa.String(length=32), nullable=True),
        sa.Column("controller_until", NUMBER, nullable=True),
        sa.Column("budget", JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
        sa.UniqueConstraint("name", name=op.f("uq_runs_name")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_runs_project"), "runs", ["project"], unique=False)

    op.create_table(
        "attempts",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("run_id", BIG_ID, nullable=False),
        sa.Column("ordinal", sa.Integer(), nullable=False),
        sa.Column("launch", sa.String(length=128), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("started_at", NUMBER, nullable=False),
        sa.Column("ended_at", NUMBER, nullable=True),
        sa.Column("reason", sa.String(length=64), nullable=False),
        sa.Column("first_step", sa.BigInteger(), nullable=True),
        sa.Column("expected_ranks", JSON, nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_attempts_run_id_runs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_attempts")),
        sa.UniqueConstraint("run_id", "launch", "generation", name=op.f("uq_attempts_run_id_launch_generation")),
        sa.UniqueConstraint("run_id", "ordinal", name=op.f("uq_attempts_run_id_ordinal")),
    )

    op.create_table(
        "clients",
        sa.Column("run_id", BIG_ID, nullable=False),
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("launch", sa.String(length=128), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("last_sequence", sa.BigInteger(), nullable=False),
        sa.Column("losses", JSON, nullable=False),
        sa.Column("sdk", sa.String(length=64), nullable=False),
        sa.Column("first_seen_at", NUMBER, nullable=False),
        sa.Column("last_seen_at", NUMBER, nullable=False),
        sa.Column("last_step", sa.BigInteger(), nullable=True),
        sa.Column("last_attempt", sa.Integer(), nullable=False),
        sa.Column("finished_at", NUMBER, nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_clients_run_id_runs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "id", name=op.f("pk_clients")),
    )

    op.create_table(
        "notices",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("run_id", BIG_ID, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=True),
        sa.Column("at", NUMBER, nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("client_id", sa.String(length=32), nullable=False),
        sa.Column("data", JSON, nullable=False),
        sa.Column("consumed", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_notices_run_id_runs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_notices")),
    )
    op.create_index(
        "ix_notices_fresh",
        "notices",
        ["run_id"],
        unique=False,
        postgresql_where=sa.text("NOT consumed"),
        sqlite_where=sa.text("NOT consumed"),
    )
    op.create_index("ix_notices_run_id_id", "notices", ["run_id", "id"], unique=False)


def create_measurements() -> None:
    op.create_table(
        "frames",
        sa.Column("run_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("rank", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("client_id", sa.String(length=32), nullable=False),
        sa.Column("sequence", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("received_at", NUMBER, nullable=False),
        sa.Column("event_at", NUMBER, nullable=False),
        sa.Column("flags", sa.Integer(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint(
            "run_id", "attempt", "step", "role", "rank", "client_id", "sequence", "received_at", name=op.f("pk_frames")
        ),
        postgresql_partition_by="RANGE (received_at)",
    )

    op.create_table(
        "steps",
        sa.Column("run_id", BIG_ID, nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("first_at", NUMBER, nullable=False),
        sa.Column("event_at", NUMBER, nullable=False),
        sa.Column("due_at", NUMBER, nullable=False),
        sa.Column("reported", sa.Integer(), nullable=False),
        sa.Column("expected", sa.Integer(), nullable=False),
        sa.Column("flags", sa.Integer(), nullable=False),
        sa.Column("evaluated_at", NUMBER, nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_steps_run_id_runs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "attempt", "step", name=op.f("pk_steps")),
    )
    op.create_index(
        "ix_steps_due",
        "steps",
        ["due_at", "run_id"],
        unique=False,
        postgresql_where=sa.text("evaluated_at IS NULL"),
        sqlite_where=sa.text("evaluated_at IS NULL"),
    )

    op.create_table(
        "signals",
        sa.Column("run_id", BIG_ID, nullable=False),
        sa.Column("position", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_signals_run_id_runs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "position", name=op.f("pk_signals")),
        sa.UniqueConstraint("run_id", "name", name=op.f("uq_signals_run_id_name")),
    )

    op.create_table(
        "points",
        sa.Column("run_id", BIG_ID, nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at", NUMBER, nullable=False),
        sa.Column("values", FLOATS, nullable=False),
        sa.Column("missing", JSON, nullable=False),
        sa.Column("worst", JSON, nullable=False),
        sa.Column("evidence", JSON, nullable=False),
        sa.Column("reported", sa.Integer(), nullable=False),
        sa.Column("expected", sa.Integer(), nullable=False),
        sa.Column("segment", sa.Integer(), nullable=False),
        sa.Column("bands", JSON, nullable=False),
        sa.Column("flag", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_points_run_id_runs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "attempt", "step", name=op.f("pk_points")),
    )

    op.create_table(
        "evaluations",
        sa.Column("run_id", BIG_ID, nullable=False),
        sa.Column("owner", sa.String(length=64), nullable=True),
        sa.Column("lease_until", NUMBER, nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("pack_hash", sa.String(length=64), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=True),
        sa.Column("segment", sa.Integer(), nullable=False),
        sa.Column("settings", JSON, nullable=False),
        sa.Column("evaluated_at", NUMBER, nullable=True),
        sa.Column("ticked_at", NUMBER, nullable=True),
        sa.Column("state", sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_evaluations_run_id_runs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_evaluations")),
    )


def create_findings() -> None:
    op.create_table(
        "incidents",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("run_id", BIG_ID, nullable=False),
        sa.Column("rule", sa.String(length=64), nullable=False),
        sa.Column("severity", sa.String(length=16), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("opened_at", NUMBER, nullable=False),
        sa.Column("opened_step", sa.BigInteger(), nullable=True),
        sa.Column("onset_step", sa.BigInteger(), nullable=True),
        sa.Column("last_step", sa.BigInteger(), nullable=True),
        sa.Column("resolved_at", NUMBER, nullable=True),
        sa.Column("resolved_step", sa.BigInteger(), nullable=True),
        sa.Column("acknowledged_by", sa.String(length=128), nullable=True),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("edge", sa.String(length=16), nullable=True),
        sa.Column("evidence", JSON, nullable=False),
        sa.Column("diagnosis", JSON, nullable=False),
        sa.Column("precursor_id", sa.String(length=32), nullable=True),
        sa.Column("times_opened", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_incidents_run_id_runs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_incidents")),
    )
    op.create_index("ix_incidents_run_id_status", "incidents", ["run_id", "status"], unique=False)

    op.create_table(
        "checkpoints",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("run_id", BIG_ID, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("path_hash", sa.String(length=64), nullable=False),
        sa.Column("scope", JSON, nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("registered_at", NUMBER, nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_checkpoints_run_id_runs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_checkpoints")),
        sa.UniqueConstraint(
            "run_id", "attempt", "step", "path_hash", name=op.f("uq_checkpoints_run_id_attempt_step_path_hash")
        ),
    )
    op.create_index("ix_checkpoints_run_id_status", "checkpoints", ["run_id", "status"], unique=False)

    op.create_table(
        "commands",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("run_id", BIG_ID, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("actions", JSON, nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("incident_id", sa.String(length=32), nullable=True),
        sa.Column("evidence_key", sa.String(length=128), nullable=True),
        sa.Column("requested_by", sa.String(length=128), nullable=False),
        sa.Column("decided_by", sa.String(length=128), nullable=True),
        sa.Column("created_at", NUMBER, nullable=False),
        sa.Column("expires_at", NUMBER, nullable=False),
        sa.Column("issued_step", sa.BigInteger(), nullable=True),
        sa.Column("at_step", sa.BigInteger(), nullable=True),
        sa.Column("delivered_at", NUMBER, nullable=True),
        sa.Column("accepted_at", NUMBER, nullable=True),
        sa.Column("accepted_by", sa.String(length=32), nullable=True),
        sa.Column("finished_at", NUMBER, nullable=True),
        sa.Column("done_step", sa.BigInteger(), nullable=True),
        sa.Column("detail", JSON, nullable=False),
        sa.Column("verdict", sa.String(length=16), nullable=True),
        sa.Column("verdict_step", sa.BigInteger(), nullable=True),
        sa.Column("verdict_detail", JSON, nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_commands_run_id_runs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_commands")),
        sa.UniqueConstraint("run_id", "evidence_key", name=op.f("uq_commands_run_id_evidence_key")),
    )
    op.create_index("ix_commands_run_id_state", "commands", ["run_id", "state"], unique=False)

    op.create_table(
        "audit",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("at", NUMBER, nullable=False),
        sa.Column("run_id", sa.BigInteger(), nullable=True),
        sa.Column("subject", sa.String(length=32), nullable=False),
        sa.Column("subject_id", sa.String(length=64), nullable=False),
        sa.Column("was", sa.String(length=64), nullable=True),
        sa.Column("became", sa.String(length=64), nullable=False),
        sa.Column("actor", sa.String(length=128), nullable=False),
        sa.Column("detail", JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit")),
    )
    op.create_index("ix_audit_subject", "audit", ["subject", "subject_id"], unique=False)


def create_upkeep() -> None:
    op.create_table(
        "deliveries",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("run_id", BIG_ID, nullable=True),
        sa.Column("incident_id", sa.String(length=32), nullable=True),
        sa.Column("channel", sa.String(length=64), nullable=False),
        sa.Column("event", sa.String(length=32), nullable=False),
        sa.Column("dedupe_key", sa.String(length=160), nullable=False),
        sa.Column("payload", JSON, nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("next_at", NUMBER, nullable=False),
        sa.Column("lease_until", NUMBER, nullable=False),
        sa.Column("created_at", NUMBER, nullable=False),
        sa.Column("sent_at", NUMBER, nullable=True),
        sa.Column("last_error", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_deliveries_run_id_runs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_deliveries")),
        sa.UniqueConstraint("channel", "dedupe_key", name=op.f("uq_deliveries_channel_dedupe_key")),
    )
    op.create_index("ix_deliveries_due", "deliveries", ["state", "next_at"], unique=False)

    op.create_table(
        "silences",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("project", sa.String(length=128), nullable=True),
        sa.Column("run", sa.String(length=257), nullable=True),
        sa.Column("rule", sa.String(length=64), nullable=True),
        sa.Column("until_at", NUMBER, nullable=False),
        sa.Column("created_at", NUMBER, nullable=False),
        sa.Column("created_by", sa.String(length=128), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_silences")),
    )

    op.create_table(
        "tokens",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.Column("project", sa.String(length=128), nullable=True),
        sa.Column("scopes", JSON, nullable=False),
        sa.Column("created_at", NUMBER, nullable=False),
        sa.Column("expires_at", NUMBER, nullable=True),
        sa.Column("revoked_at", NUMBER, nullable=True),
        sa.Column("last_used_at", NUMBER, nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tokens")),
        sa.UniqueConstraint("hash", name=op.f("uq_tokens_hash")),
    )

    op.create_table(
        "leases",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("owner", sa.String(length=64), nullable=True),
        sa.Column("until_at", NUMBER, nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_leases")),
    )


def views(dialect: str) -> dict[str, str]:
    """The contract with Grafana. `grafana_points` is PostgreSQL's alone: SQLite keeps a step's values packed."""
    pg = dialect == "postgresql"

    def time(column: str) -> str:
        return f"to_timestamp({column})" if pg else column

    found = {
        "grafana_runs": f"""
            SELECT name AS run, project, status, verdict, mode, attempt, last_step, median_step_s,
                {time("created_at")} AS created, {time("last_seen_at")} AS last_seen, {time("finished_at")} AS finished
            FROM runs""",  # constants # nosec B608
        "grafana_incidents": f"""
            SELECT i.id, r.name AS run, r.project, i.rule, i.severity, i.status, i.attempt, i.onset_step, i.opened_step,
                i.last_step, i.resolved_step, i.edge, i.message, i.times_opened, i.precursor_id,
                {time("i.opened_at")} AS opened, {time("i.resolved_at")} AS resolved
            FROM incidents i JOIN runs r ON r.id = i.run_id""",  # constants # nosec B608
        "grafana_commands": f"""
            SELECT c.id, r.name AS run, r.project, c.attempt, c.kind, c.state, c.reason, c.incident_id, c.requested_by,
                c.issued_step, c.at_step, c.done_step, c.verdict, {time("c.created_at")} AS created,
                {time("c.delivered_at")} AS delivered, {time("c.accepted_at")} AS accepted,
                {time("c.finished_at")} AS finished
            FROM commands c JOIN runs r ON r.id = c.run_id""",  # constants # nosec B608
    }
    if not pg:
        found["grafana_bands"] = """
            SELECT r.name AS run, r.project, p.attempt, p.step, p.at AS time, b.key AS signal,
                json_extract(b.value, '$[0]') AS low, json_extract(b.value, '$[1]') AS centre,
                json_extract(b.value, '$[2]') AS high
            FROM points p JOIN runs r ON r.id = p.run_id, json_each(p.bands) b"""
        return found
    found["grafana_bands"] = """
        SELECT r.name AS run, r.project, p.attempt, p.step, to_timestamp(p.at) AS time, b.key AS signal,
            (b.value ->> 0)::float8 AS low, (b.value ->> 1)::float8 AS centre, (b.value ->> 2)::float8 AS high
        FROM points p JOIN runs r ON r.id = p.run_id CROSS JOIN LATERAL jsonb_each(p.bands) AS b"""
    found["grafana_points"] = """
        SELECT r.name AS run, r.project, p.attempt, p.step, to_timestamp(p.at) AS time, s.name AS signal,
            p.values[s.position] AS value, p.reported, p.expected, p.segment, p.flag
        FROM points p JOIN runs r ON r.id = p.run_id JOIN signals s ON s.run_id = p.run_id
        WHERE p.values[s.position] IS NOT NULL"""
    return found


# Roles belong to the whole server and creating one needs CREATEROLE: where that is not permitted, and no administrator
# made `foreshock_grafana` beforehand, the views stay the owner's alone.
GRANT = """
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'foreshock_grafana') THEN
        BEGIN
            CREATE ROLE foreshock_grafana NOLOGIN;
        EXCEPTION WHEN insufficient_privilege OR duplicate_object OR unique_violation THEN NULL;
        END;
    END IF;
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'foreshock_grafana') THEN
        GRANT SELECT ON grafana_runs, grafana_points, grafana_incidents, grafana_commands, grafana_bands
            TO foreshock_grafana;
    END IF;
END
$$
"""


def upgrade() -> None:
    create_runs()
    create_measurements()
    create_findings()
    create_upkeep()
    dialect = op.get_bind().dialect.name
    if dialect == "postgresql":
        op.execute("CREATE TABLE frames_default PARTITION OF frames DEFAULT")
    for name, query in views(dialect).items():
        op.execute(f"CREATE VIEW {name} AS {query}")
    if dialect == "postgresql":
        op.execute(GRANT)


def downgrade() -> None:
    for name in views(op.get_bind().dialect.name):
        op.execute(f"DROP VIEW {name}")
    for table in [
        "leases",
        "tokens",
        "silences",
        "deliveries",
        "audit",
        "commands",
        "checkpoints",
        "incidents",
        "evaluations",
        "points",
        "signals",
        "steps",
        "frames",
        "notices",
        "clients",
        "attempts",
        "runs",
    ]:
        op.drop_table(table)
