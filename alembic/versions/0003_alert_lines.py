"""Alerts in order: the line and the ordinal of a delivery, what holds it, how it left; the Slack thread of a line.

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

import sqlalchemy as sa

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None
needed = True
"""This version's outbox writes the new columns. The version before works on: all of them have a default."""

SEQUENCE = "deliveries_ordinal"


def upgrade() -> None:
    postgres = op.get_bind().dialect.name == "postgresql"
    if postgres:
        op.execute(f"CREATE SEQUENCE {SEQUENCE}")
    default = sa.text(f"nextval('{SEQUENCE}')") if postgres else sa.text("0")
    op.add_column("deliveries", sa.Column("ordinal", sa.BigInteger(), nullable=False, server_default=default))
    op.add_column("deliveries", sa.Column("line", sa.String(32), nullable=True))
    op.add_column("deliveries", sa.Column("held_at", sa.Float(53), nullable=True))
    op.add_column("deliveries", sa.Column("left_in", sa.String(32), nullable=True))
    if not postgres:
        op.execute("UPDATE deliveries SET ordinal = rowid")
    op.execute("UPDATE deliveries SET line = incident_id")
    op.create_index("ix_deliveries_line", "deliveries", ["channel", "line", "ordinal"])
    op.create_table(
        "alert_threads",
        sa.Column("channel", sa.String(64), nullable=False),
        sa.Column("line", sa.String(32), nullable=False),
        sa.Column("run_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True),
        sa.Column("conversation", sa.String(64), nullable=False),
        sa.Column("ts", sa.String(32), nullable=False),
        sa.Column("last_delivery", sa.String(32), nullable=False),
        sa.Column("at", sa.Float(53), nullable=False),
        sa.PrimaryKeyConstraint("channel", "line", name=op.f("pk_alert_threads")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_alert_threads_run_id_runs"), ondelete="CASCADE"),
    )


def downgrade() -> None:
    op.drop_table("alert_threads")
    op.drop_index("ix_deliveries_line", "deliveries")
    for column in ("left_in", "held_at", "line", "ordinal"):
        op.drop_column("deliveries", column)
    if op.get_bind().dialect.name == "postgresql":
        op.execute(f"DROP SEQUENCE {SEQUENCE}")
