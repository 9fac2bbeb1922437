"""The index of steps that wait, in the order in which they are asked for; frames stored as they come.

With the index by due date, finding a run's next steps cost more the more steps it had behind it.

Revision ID: 0004
Revises: 0003
"""

from __future__ import annotations

import sqlalchemy as sa

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

WAITS = sa.text("evaluated_at IS NULL")


def _partitions() -> list[str]:
    asked = sa.text("SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'frames'::regclass")
    return list(op.get_bind().scalars(asked))


def upgrade() -> None:
    op.create_index(
        "ix_steps_waiting", "steps", ["run_id", "attempt", "step"], postgresql_where=WAITS, sqlite_where=WAITS
    )
    op.drop_index("ix_steps_due", "steps")
    if op.get_bind().dialect.name == "postgresql":
        # A frame's body is float64s and counts: compressing it costs more than writing it, and saves a sixth.
        op.execute("ALTER TABLE frames ALTER COLUMN body SET STORAGE EXTERNAL")
        for name in _partitions():
            op.execute(f"ALTER TABLE {name} SET (toast_tuple_target = 8160)")


def downgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER TABLE frames ALTER COLUMN body SET STORAGE EXTENDED")
        for name in _partitions():
            op.execute(f"ALTER TABLE {name} RESET (toast_tuple_target)")
    op.create_index("ix_steps_due", "steps", ["due_at", "run_id"], postgresql_where=WAITS, sqlite_where=WAITS)
    op.drop_index("ix_steps_waiting", "steps")
