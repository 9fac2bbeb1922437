"""Fleet: every run by its health, what is open, what waits for a person."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from dashboards import board
from dashboards.panels import listing, number, over_time
from dashboards.sources import Sql, promql

RUNS = """
    SELECT r.run, r.verdict, r.status, r.mode, r.attempt, r.last_step,
        count(i.id) FILTER (WHERE i.status <> 'resolved') AS "open incidents",
        string_agg(DISTINCT i.rule, ', ') FILTER (WHERE i.status <> 'resolved') AS rules,
        (SELECT count(*) FROM grafana_commands c WHERE c.run = r.run AND c.state = 'proposed') AS "waiting commands",
        r.median_step_s AS "median step", r.last_seen AS "last seen"
    FROM grafana_runs r LEFT JOIN grafana_incidents i ON i.run = r.run
    WHERE r.project IN (${project:sqlstring})
    GROUP BY r.run, r.verdict, r.status, r.mode, r.attempt, r.last_step, r.median_step_s, r.last_seen
    ORDER BY array_position(ARRAY['critical', 'warning', 'unknown', 'healthy'], r.verdict::text), r.last_seen DESC"""
INCIDENTS = """
    SELECT run, rule, severity, status, edge, onset_step, opened_step, last_step, message, opened, id AS incident
    FROM grafana_incidents WHERE project IN (${project:sqlstring}) AND status <> 'resolved' ORDER BY opened DESC"""
WAITING = """
    SELECT run, kind, state, reason, requested_by, issued_step, created, id AS command
    FROM grafana_commands WHERE project IN (${project:sqlstring})
        AND state IN ('proposed', 'approved', 'delivered', 'accepted') ORDER BY created DESC"""
OPENED = """
    SELECT date_trunc('hour', opened) AS time, rule AS metric, count(*) AS value
    FROM grafana_incidents WHERE project IN (${project:sqlstring}) AND $__timeFilter(opened)
    GROUP BY 1, 2 ORDER BY 1"""


def _count(verdict: str) -> Sql:
    return Sql(
        f"SELECT count(*) AS {verdict} FROM grafana_runs WHERE project IN (${{project:sqlstring}}) "
        f"AND verdict = '{verdict}' AND status NOT IN ('finished', 'crashed')"  # constants of this room # nosec B608
    )


def build() -> dashboard.Dashboard:
    """The board."""
    made = board.new("fleet", "Foreshock: fleet", "All runs by their health.", since="now-7d")
    projects = "SELECT DISTINCT project FROM grafana_runs ORDER BY project"
    made = made.with_variable(board.choice("project", "Project", projects, many=True))
    for verdict, bad_from in (("critical", 1.0), ("warning", 1.0), ("unknown", None), ("healthy", None)):
        sentence = f"Runs under way whose verdict is {verdict}."
        made = made.with_panel(number(verdict.title(), sentence, _count(verdict), "short", bad_from=bad_from))
    waiting = Sql(
        "SELECT count(*) AS waiting FROM grafana_commands WHERE project IN (${project:sqlstring}) "
        "AND state = 'proposed'"
    )
    made = made.with_panel(number("Waiting", "Commands that wait for a person.", waiting, "short", bad_from=1))
    lost = Sql("SELECT coalesce(sum(lost), 0) AS lost FROM grafana_clients WHERE project IN (${project:sqlstring})")
    made = made.with_panel(number("Lost", "Items that collectors dropped.", lost, "short", bad_from=1))
    return (
        made.with_panel(listing("Runs", "The ill ones first. Click a run to open its board.", RUNS, height=10))
        .with_panel(listing("Open incidents", "Findings that are not resolved, the newest first.", INCIDENTS))
        .with_panel(listing("Commands under way", "Asked of trainers and not finished.", WAITING))
        .with_panel(
            over_time("Incidents opened", "An hour, by rule.", [Sql(OPENED, over_time=True)], "short").span(12)
        )
        .with_panel(
            over_time(
                "Silence", "Since each running run was heard.",
                [promql("foreshock_run_silent_seconds and on (run) foreshock_run_running == 1", "{{run}}")], "s",
            ).span(12)
        )
    )  # fmt: skip
