"""The two data sources by uid, and the PostgreSQL query that the SDK has no model for."""

from __future__ import annotations

from typing import Any, Final, Self

from grafana_foundation_sdk.builders import prometheus
from grafana_foundation_sdk.cog import builder, runtime, variants
from grafana_foundation_sdk.models.dashboard import DataSourceRef

POSTGRES_TYPE: Final = "grafana-postgresql-datasource"
POSTGRES: Final = DataSourceRef(type_val=POSTGRES_TYPE, uid="foreshock-postgres")
PROMETHEUS: Final = DataSourceRef(type_val="prometheus", uid="foreshock-prometheus")


class PostgresQuery(variants.Dataquery):
    """One SQL query as Grafana's PostgreSQL plugin stores it. `format` is `table` or `time_series`."""

    def __init__(self, raw_sql: str = "", format_val: str = "table", ref_id: str = "A") -> None:
        self.raw_sql, self.format_val, self.ref_id = raw_sql, format_val, ref_id

    def to_json(self) -> dict[str, object]:
        """What stands in the dashboard."""
        return {
            "datasource": POSTGRES,
            "editorMode": "code",
            "format": self.format_val,
            "rawQuery": True,
            "rawSql": self.raw_sql,
            "refId": self.ref_id,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The inverse of `to_json`."""
        return cls(data["rawSql"], data["format"], data["refId"])


class Sql(builder.Builder[variants.Dataquery]):
    """Builder of a PostgresQuery; white space is folded, so that the code may be laid out for eyes."""

    def __init__(self, sql: str, *, over_time: bool = False, ref_id: str = "A") -> None:
        self._query = PostgresQuery(" ".join(sql.split()), "time_series" if over_time else "table", ref_id)

    def build(self) -> variants.Dataquery:
        """The query."""
        return self._query


def promql(expr: str, legend: str, ref_id: str = "A", *, instant: bool = False) -> prometheus.Dataquery:
    """One Prometheus query; `legend` names labels as `{{run}}`."""
    query = prometheus.Dataquery().expr(expr).legend_format(legend).ref_id(ref_id).datasource(PROMETHEUS)
    return query.instant() if instant else query.range()


def register() -> None:
    """Teaches the SDK's JSON reader the PostgreSQL query. Idempotent."""
    runtime.register_dataquery_variant(runtime.DataqueryConfig(POSTGRES_TYPE, PostgresQuery.from_json))
