"""More `grafana_*` views, for the shipped boards: steps, clients, worst ranks, evidence, checkpoints. PostgreSQL alone.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

VIEWS = {
    "grafana_steps": """
        SELECT r.name AS run, r.project, p.attempt, p.step, to_timestamp(p.at) AS time, p.reported, p.expected,
            p.segment, p.flag
        FROM points p JOIN runs r ON r.id = p.run_id""",
    "grafana_clients": """
        SELECT r.name AS run, r.project, c.role, c.rank, c.last_attempt AS attempt, c.last_step, c.sdk,
            to_timestamp(c.last_seen_at) AS last_seen, to_timestamp(c.finished_at) AS finished,
            (SELECT coalesce(sum(l.value::numeric), 0)::bigint FROM jsonb_each_text(c.losses) AS l) AS lost
        FROM clients c JOIN runs r ON r.id = c.run_id""",
    "grafana_worst": """
        SELECT r.name AS run, r.project, p.attempt, p.step, to_timestamp(p.at) AS time, w.key AS signal,
            (w.value ->> 0)::float8 AS value, (w.value ->> 1)::int AS rank
        FROM points p JOIN runs r ON r.id = p.run_id CROSS JOIN LATERAL jsonb_each(p.worst) AS w""",
    "grafana_tokens": """
        SELECT r.name AS run, r.project, p.attempt, p.step, to_timestamp(p.at) AS time, e.key AS pair,
            (t.value ->> 'seq')::bigint AS sequence, (t.value ->> 'position')::bigint AS position,
            (t.value ->> 'token')::bigint AS token, (t.value ->> 'a')::float8 AS a, (t.value ->> 'b')::float8 AS b,
            (t.value ->> 'a')::float8 - (t.value ->> 'b')::float8 AS delta
        FROM points p JOIN runs r ON r.id = p.run_id
            CROSS JOIN LATERAL jsonb_each(p.evidence) AS e
            CROSS JOIN LATERAL jsonb_array_elements(e.value) AS t""",
    "grafana_evidence": """
        SELECT i.id AS incident, r.name AS run, r.project, (e.value ->> 'attempt')::int AS attempt,
            (e.value ->> 'step')::bigint AS step, e.value ->> 'signal' AS signal,
            (e.value ->> 'value')::float8 AS value, (e.value ->> 'expected')::float8 AS expected,
            (e.value ->> 'bound')::float8 AS bound, (e.value ->> 'rank')::int AS rank,
            e.value ->> 'sentence' AS sentence, e.ordinality AS place
        FROM incidents i JOIN runs r ON r.id = i.run_id
            CROSS JOIN LATERAL jsonb_array_elements(i.evidence) WITH ORDINALITY AS e""",
    "grafana_causes": """
        SELECT i.id AS incident, r.name AS run, r.project, c.value ->> 'name' AS cause, c.value ->> 'title' AS title,
            (c.value ->> 'score')::float8 AS score, i.diagnosis ->> 'sentence' AS sentence, c.ordinality AS place
        FROM incidents i JOIN runs r ON r.id = i.run_id
            CROSS JOIN LATERAL jsonb_array_elements(i.diagnosis -> 'causes') WITH ORDINALITY AS c
        WHERE jsonb_typeof(i.diagnosis -> 'causes') = 'array'""",
    "grafana_checkpoints": """
        SELECT r.name AS run, r.project, c.attempt, c.step, c.path, c.status, c.reason,
            to_timestamp(c.registered_at) AS registered
        FROM checkpoints c JOIN runs r ON r.id = c.run_id""",
}

GRANT = f"""
DO $$
BEGIN
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'foreshock_grafana') THEN
        GRANT SELECT ON {", ".join(VIEWS)} TO foreshock_grafana;
    END IF;
END
$$
"""  # constants # nosec B608


def upgrade() -> None:
    if op.get_bind().dialect.name != "postgresql":
        return
    for name, query in VIEWS.items():
        op.execute(f"CREATE VIEW {name} AS {query}")
    op.execute(GRANT)


def downgrade() -> None:
    if op.get_bind().dialect.name != "postgresql":
        return
    for name in VIEWS:
        op.execute(f"DROP VIEW {name}")
