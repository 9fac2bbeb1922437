"""What all boards share: uid, tags, variables, the link between them."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from dashboards.sources import POSTGRES

TAG: Final = "foreshock"
LABEL_VALUES: Final = {"qryType": 1, "refId": "PrometheusVariableQueryEditor-VariableQuery"}
"""What Grafana's own editor writes beside a `label_values(…)` query."""
RUNS: Final = "SELECT run FROM grafana_runs ORDER BY last_seen DESC"
ATTEMPTS: Final = "SELECT DISTINCT attempt FROM grafana_steps WHERE run IN (${run:sqlstring}) ORDER BY attempt DESC"
ROLES: Final = "SELECT DISTINCT role FROM grafana_clients WHERE run IN (${run:sqlstring}) ORDER BY role"
RANKS: Final = (
    "SELECT DISTINCT rank FROM grafana_clients WHERE run IN (${run:sqlstring}) AND role IN (${role:sqlstring}) "
    "ORDER BY rank"
)


def new(uid: str, title: str, sentence: str, *, since: str = "now-24h", refresh: str = "30s") -> dashboard.Dashboard:
    """An empty board `foreshock-<uid>`, linked to the others."""
    link = dashboard.DashboardLink("Foreshock").type(DashboardLinkType.DASHBOARDS).tags([TAG]).as_dropdown(True)
    board = dashboard.Dashboard(title).uid(f"foreshock-{uid}").description(sentence).tags([TAG])
    return board.time(since, "now").refresh(refresh).link(link).tooltip(DashboardCursorSync.CROSSHAIR).editable()


def choice(
    name: str, label: str, query: str, *, many: bool = False, source: DataSourceRef = POSTGRES
) -> dashboard.QueryVariable:
    """A variable whose values a query lists, in the query's order; `many` may be several or all of them."""
    variable = dashboard.QueryVariable(name).label(label).datasource(source)
    variable = variable.query(query if source is POSTGRES else {"query": query, **LABEL_VALUES})
    variable = variable.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).sort(VariableSort.DISABLED).multi(many)
    return variable.include_all(many).current(VariableOption(text="All", value="$__all")) if many else variable


def run_choice() -> dashboard.QueryVariable:
    """The run: the one heard last first."""
    return choice("run", "Run", RUNS)


def bound(name: str, label: str, value: str) -> dashboard.TextBoxVariable:
    """A number that a person may type."""
    return dashboard.TextBoxVariable(name).label(label).default_value(value)
