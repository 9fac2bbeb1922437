"""Incident: what was seen, the tokens that show it, the likely causes, what was done, what it led to."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.builders import dashboard

from dashboards import board
from dashboards.panels import listing, over_steps

THIS: Final = "${incident:sqlstring}"
CHOICES: Final = """
    SELECT id AS __value, rule || ' @ ' || coalesce(opened_step::text, 'no step') || ' (' || status || ')' AS __text
    FROM grafana_incidents WHERE run IN (${run:sqlstring}) ORDER BY opened DESC"""
WHAT: Final = f"""
    SELECT run, rule, severity, status, edge, attempt, onset_step, opened_step, last_step, resolved_step, times_opened,
        opened, resolved, message FROM grafana_incidents WHERE id IN ({THIS})"""  # constants of this room # nosec B608
EVIDENCE: Final = f"""
    SELECT signal, value, expected, bound, value / nullif(expected, 0) AS "times the usual", rank, step, sentence
    FROM grafana_evidence WHERE incident IN ({THIS}) ORDER BY place"""  # constants of this room # nosec B608
CAUSES: Final = f"""
    SELECT title, score, cause, sentence FROM grafana_causes WHERE incident IN ({THIS}) ORDER BY place"""  # nosec B608
TOKENS: Final = f"""
    SELECT t.step, t.pair, t.sequence, t.position, t.token, t.a, t.b, t.delta
    FROM grafana_tokens t JOIN grafana_incidents i ON i.run = t.run AND i.attempt = t.attempt
        AND t.step BETWEEN i.onset_step AND coalesce(i.resolved_step, i.last_step)
    WHERE i.id IN ({THIS}) ORDER BY abs(t.delta) DESC NULLS LAST LIMIT 200"""  # constants of this room # nosec B608
COMMANDS: Final = f"""
    SELECT kind, state, verdict, issued_step, done_step, reason, requested_by, created, finished, id AS command
    FROM grafana_commands WHERE incident_id IN ({THIS}) ORDER BY created DESC"""  # constants of this room # nosec B608
LINKED: Final = f"""
    SELECT CASE WHEN o.id = i.precursor_id THEN 'led here' ELSE 'followed' END AS link, o.rule, o.severity, o.status,
        o.onset_step, o.opened_step, o.message, o.id AS incident
    FROM grafana_incidents i JOIN grafana_incidents o ON o.id = i.precursor_id OR o.precursor_id = i.id
    WHERE i.id IN ({THIS}) ORDER BY o.opened"""  # constants of this room # nosec B608
AROUND: Final = f"""
    (run, attempt) IN (SELECT run, attempt FROM grafana_incidents WHERE id IN ({THIS})) AND step BETWEEN
    (SELECT coalesce(min(onset_step), 0) - 60 FROM grafana_incidents WHERE id IN ({THIS})) AND
    (SELECT coalesce(max(coalesce(resolved_step, last_step)), 0) + 60 FROM grafana_incidents WHERE id IN ({THIS}))"""  # nosec B608


def build() -> dashboard.Dashboard:
    """The board."""
    made = board.new("incident", "Foreshock: incident", "What was seen, and on what evidence.")
    made = made.with_variable(board.run_choice()).with_variable(board.choice("incident", "Incident", CHOICES))
    made = (
        made.with_panel(listing("What", "The finding, first seen at its onset.", WHAT, height=4))
        .with_panel(listing("Evidence", "The numbers that spoke, against the run's own usual.", EVIDENCE, width=12))
        .with_panel(listing("Likely causes", "Ranked by how much of what is known speaks for them.", CAUSES, width=12))
        .with_panel(listing("Evidence tokens", "The worst tokens of its steps: ids and positions, never text.", TOKENS))
        .with_panel(listing("Commands", "What Foreshock did or proposes.", COMMANDS, width=12))
        .with_panel(listing("Precursors and consequences", "Incidents linked to this one.", LINKED, width=12))
    )
    for signal, log in (
        ("policy.kl_k2", True), ("mismatch.kl_k3", True), ("reward.mean", False), ("entropy.mean", False),
        ("grad.norm", True), ("length.mean", False),
    ):  # fmt: skip
        made = made.with_panel(over_steps(signal, [signal], band=signal, log=log, where=" ".join(AROUND.split())))
    return made
