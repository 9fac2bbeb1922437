"""What Grafana does to a query before it sends it, as documented: variables with their formats, and the macros.

https://grafana.com/docs/grafana/latest/dashboards/variables/variable-syntax/ (formats `sqlstring`, none) and
https://grafana.com/docs/grafana/latest/datasources/postgres/ (macros). No Grafana server can be had where this is
tested.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

Values = Mapping[str, Sequence[str]]


class Asked(NamedTuple):
    """One query of one panel."""

    board: str
    panel: str
    unit: str
    legend: str
    query: str
    kind: str
    """`table`, `time_series` or `prometheus`."""

    @property
    def id(self) -> str:
        return f"{self.board}:{self.panel}:{self.query[:24]}"


def formatted(values: Sequence[str], how: str | None) -> str:
    """The text that stands for a variable."""
    if how == "sqlstring":
        return ",".join("'" + v.replace("'", "''") + "'" for v in values)
    assert how is None, f"format {how!r} is not used here"
    return values[0] if len(values) == 1 else "{" + ",".join(values) + "}"


def interpolated(query: str, values: Values) -> str:
    """The query with its variables filled in. Raises KeyError for a variable that the board does not have."""

    def fill(match: re.Match[str]) -> str:
        return formatted(values[match[1] or match[3]], match[2])

    return re.sub(r"\$\{(\w+)(?::(\w+))?\}|\$(?!__)(\w+)", fill, query)


def for_prometheus(query: str, values: Values, rate_interval: str) -> str:
    """The PromQL with its variables: the Prometheus source escapes each value for a regular expression in a string,
    twice, and joins several with `|` (public/app/plugins: prometheusSpecialRegexEscape)."""

    def fill(match: re.Match[str]) -> str:
        escaped = [re.sub(r"[$^*{}\[\]'+?.()|]", r"\\\\\g<0>", v.replace("\\", "\\" * 4)) for v in values[match[1]]]
        return escaped[0] if len(escaped) == 1 else f"({'|'.join(escaped)})"

    return re.sub(r"\$(?!__)(\w+)", fill, query.replace("$__rate_interval", rate_interval))


def expanded(sql: str, since: float, until: float) -> str:
    """The query with its macros expanded."""
    first, last = (datetime.fromtimestamp(at, UTC).strftime("'%Y-%m-%dT%H:%M:%SZ'") for at in (since, until))
    sql = re.sub(r"\$__timeFilter\((\w+)\)", rf"\1 BETWEEN {first} AND {last}", sql)
    sql = sql.replace("$__timeFrom()", f"{first}::timestamptz").replace("$__timeTo()", f"{last}::timestamptz")
    assert "$__" not in sql, f"a macro that is not known here: {sql}"
    return sql


def asked(name: str, board: Mapping[str, Any]) -> Iterator[Asked]:
    """Every query of every panel."""
    for panel in board["panels"]:
        unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit", "")
        for target in panel.get("targets", ()):
            query, kind = target.get("rawSql"), target.get("format", "")
            if query is None:
                query, kind = target["expr"], "prometheus"
            yield Asked(name, panel["title"], unit, target.get("legendFormat", ""), query, kind)
