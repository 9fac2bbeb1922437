"""Run over time: the same curves by the clock, all attempts in a row, incidents and commands as annotations."""

from __future__ import annotations

from typing import Any, Final

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog import builder
from grafana_foundation_sdk.models.dashboard import AnnotationQuery, AnnotationTarget, DataSourceRef

from dashboards import board
from dashboards.panels import over_time, quoted, unit_of
from dashboards.sources import POSTGRES, Sql

INCIDENTS: Final = """
    SELECT opened AS time, coalesce(resolved, now()) AS timeend,
        rule || ': ' || message AS text, severity || ',' || status AS tags
    FROM grafana_incidents WHERE run IN (${run:sqlstring}) AND opened <= $__timeTo()
        AND coalesce(resolved, now()) >= $__timeFrom() ORDER BY opened"""
COMMANDS: Final = """
    SELECT created AS time, finished AS timeend, kind || ' ' || state || ': ' || reason AS text,
        state || ',' || coalesce(verdict, 'not judged') AS tags
    FROM grafana_commands WHERE run IN (${run:sqlstring}) AND $__timeFilter(created) ORDER BY created"""
ATTEMPTS: Final = """
    SELECT min(time) AS time, 'attempt ' || attempt || ' begins' AS text, 'attempt' AS tags
    FROM grafana_steps WHERE run IN (${run:sqlstring}) GROUP BY attempt HAVING min(time) BETWEEN $__timeFrom()
        AND $__timeTo() ORDER BY 1"""


class SqlTarget(AnnotationTarget):
    """What Grafana keeps of an annotation query in SQL; the SDK models that of its own annotations alone."""

    def __init__(self, sql: str) -> None:
        super().__init__()
        self.sql = " ".join(sql.split())

    def to_json(self) -> dict[str, object]:
        """What stands in the dashboard."""
        query: dict[str, Any] = {"rawSql": self.sql, "rawQuery": True, "format": "table", "editorMode": "code"}
        return {**query, "refId": "Anno"}


class Annotation(builder.Builder[AnnotationQuery]):
    """An annotation query: SQL, or tags where `target` is Grafana's own."""

    def __init__(self, name: str, colour: str, target: AnnotationTarget, source: DataSourceRef, on: bool) -> None:
        self._query = AnnotationQuery(
            name=name, icon_color=colour, target=target, datasource=source, enable=on, hide=False, built_in=0
        )

    def build(self) -> AnnotationQuery:
        """The query."""
        return self._query


def _signals(title: str, names: list[str]) -> Any:
    sql = f"""
        SELECT time, signal AS metric, value FROM grafana_points
        WHERE run IN (${{run:sqlstring}}) AND signal IN ({quoted(names)}) AND $__timeFilter(time) ORDER BY time"""  # nosec B608
    sentence = "All attempts, by the service's clock."
    return over_time(title, sentence, [Sql(sql, over_time=True)], unit_of(names)).span(12)


def build() -> dashboard.Dashboard:
    """The board."""
    made = board.new("run-over-time", "Foreshock: run over time", "One run by the clock, with annotations.")
    made = made.with_variable(board.run_choice())
    for name, colour, sql in (
        ("Incidents", "red", INCIDENTS), ("Commands", "blue", COMMANDS), ("Attempts", "gray", ATTEMPTS),
    ):  # fmt: skip
        made = made.annotation(Annotation(name, colour, SqlTarget(sql), POSTGRES, on=True))
    pushed = AnnotationTarget(limit=200, match_any=False, tags=["foreshock", "run:$run"], type_val="tags")
    own = DataSourceRef(type_val="grafana", uid="-- Grafana --")
    made = made.annotation(Annotation("Pushed by `foreshock dashboards push`", "purple", pushed, own, on=False))
    for title, names in (
        ("Pairs, kl_k2", ["policy.kl_k2", "update.kl_k2", "mismatch.kl_k2"]),
        ("Pairs, kl_k3", ["policy.kl_k3", "mismatch.kl_k3"]),
        ("Reward", ["reward.mean", "reward.validation"]),
        ("Entropy", ["entropy.mean"]),
        ("Gradient norm", ["grad.norm"]),
        ("Response length", ["length.mean", "length.max"]),
        ("Effective sample share, truncation", ["policy.ess_token", "mismatch.ess_token", "length.truncated"]),
        ("Step time", ["time.step_s"]),
    ):
        made = made.with_panel(_signals(title, names))
    return made
