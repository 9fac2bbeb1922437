"""Grafana's boards without Grafana: every panel's own query, answered by the databases, drawn by the page's charts.

What it shows is what the queries return. Grafana's own looks (its legends, colours, spacing) are not imitated.
"""

from __future__ import annotations

import html
import json
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from sqlalchemy import create_engine, make_url, text

from benchmarks.pictures.life import TESTS, Life
from dashboards import build

sys.path.insert(0, str(TESTS / "dashboards"))
from grafana import expanded, for_prometheus, interpolated

ROOT: Final = Path(__file__).resolve().parents[2]
STATIC: Final = ROOT / "service/foreshock_service/web/static"
RUN: Final = "demo/untreated"
MAX_ROWS: Final = 8
Row = Mapping[str, Any]


class Answers:
    """The boards' two data sources, with the variables filled in."""

    def __init__(self, life: Life) -> None:
        url = make_url(life.postgres.url).set(drivername="postgresql+psycopg")
        self._engine = create_engine(url)
        self._lately = (life.began or 0.0) - 5
        self._prometheus = life.prometheus
        runs = life.http.get("/v1/runs").json()["runs"]
        self.since = min(run["created_at"] for run in runs) - 10
        self.until = max(run["last_seen_at"] for run in runs) + 10
        found = life.http.get("/v1/incidents", params={"run": RUN, "rule": "onpolicy_disagreement"}).json()
        self.values = {
            "run": [RUN], "project": sorted({r["project"] for r in runs}), "attempt": ["1"], "from_step": ["0"],
            "to_step": ["1000000000"], "role": ["trainer", "rollout", "driver"], "rank": ["0"],
            "incident": [found["incidents"][0]["id"]], "instance": [f"127.0.0.1:{life.service.port}"],
        }  # fmt: skip

    def sql(self, query: str) -> list[Row]:
        """What Grafana's own role is answered."""
        ready = expanded(interpolated(query, self.values), self.since, self.until)
        with self._engine.connect() as connection:
            connection.execute(text("SET LOCAL ROLE foreshock_grafana"))
            return [dict(row._mapping) for row in connection.execute(text(ready.replace(":", r"\:")))]

    def promql(self, query: str, legend: str) -> list[tuple[str, list[list[float]]]]:
        """(legend, [[at, value] …]) of each series since the last jobs began."""
        ready = for_prometheus(query, self.values, rate_interval="30s")
        until = time.time()
        since = self._lately if self._lately > 0 else self.since
        window = {"start": since, "end": until, "step": max(2.0, (until - since) / 300)}
        found = self._prometheus.get("/api/v1/query_range", query=ready, **window)["data"]["result"]
        return [(_named(legend, s["metric"]), [[at, float(v)] for at, v in s["values"]]) for s in found]

    def close(self) -> None:
        """Gives the connections back."""
        self._engine.dispose()


def _named(legend: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda m: labels.get(m[1], ""), legend) or ", ".join(labels.values())


def document(name: str, answers: Answers) -> tuple[str, int]:
    """One board as a page of its own, and how many of its panels had nothing to show."""
    board = build.documents()[name]
    empty = 0
    parts = []
    for panel in board["panels"]:
        body = _DRAW[panel["type"]](panel, answers)
        empty += body == ""
        at = panel["gridPos"]
        place = f"grid-column:{at['x'] + 1}/span {at['w']};grid-row:{at['y'] + 1}/span {at['h']}"
        title = f"<h2>{html.escape(panel['title'])}</h2>" if panel["type"] != "row" else ""
        kind = "row" if panel["type"] == "row" else panel["type"]
        parts.append(
            f'<section class="panel {kind}" style="{place}">{title}{body or "<p class=quiet>no data</p>"}</section>'
        )
    css = (STATIC / "page.css").read_text() + (STATIC / "vendor/uPlot.min.css").read_text() + _beside("boards.css")
    script = (STATIC / "vendor/uPlot.iife.min.js").read_text()
    page = (
        f'<!doctype html><meta charset=utf-8><html data-theme="light"><style>{css}</style><body><main>'
        f"<h1>{html.escape(board['title'])}</h1><div class=board>{''.join(parts)}</div></main>"
        f"<script>{script}</script><script>{_beside('boards.js')}</script>"
    )
    return page, empty


def _beside(name: str) -> str:
    return (Path(__file__).parent / name).read_text()


def _stat(panel: Row, answers: Answers) -> str:
    if "expr" in panel["targets"][0]:
        found = answers.promql(panel["targets"][0]["expr"], panel["targets"][0].get("legendFormat", ""))
        value: Any = found[0][1][-1][1] if found and found[0][1] else None
    else:
        rows = answers.sql(panel["targets"][0]["rawSql"])
        value = next(iter(rows[0].values())) if rows else None
    return f'<p class="value {html.escape(str(value))}">{_shown(value)}</p>' if value is not None else ""


def _table(panel: Row, answers: Answers) -> str:
    rows = answers.sql(panel["targets"][0]["rawSql"])
    if not rows:
        return ""
    right = {name for name, value in rows[0].items() if isinstance(value, int | float)}
    head = "".join(f"<th class={'right' if name in right else 'left'}>{html.escape(name)}</th>" for name in rows[0])
    body = "".join("<tr>" + "".join(_cell(v) for v in row.values()) + "</tr>" for row in rows[:MAX_ROWS])
    more = f"<p class=quiet>and {len(rows) - MAX_ROWS} more</p>" if len(rows) > MAX_ROWS else ""
    return f"<table class=grid><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def _cell(value: Any) -> str:
    words = _shown(value)
    kind = f' class="badge {words}"' if words in ("healthy", "warning", "critical") else ""
    return f'<td class="{"right number" if isinstance(value, int | float) else ""}"><span{kind}>{words}</span></td>'


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, datetime):
        return value.strftime("%H:%M:%S")
    return html.escape(str(value)[:120])


def _trend(panel: Row, answers: Answers) -> str:
    rows = answers.sql(panel["targets"][0]["rawSql"])
    if not rows:
        return ""
    names = [name for name in rows[0] if name != "step"]
    curves = [[_plain(row[name]) for row in rows] for name in names]
    scale = panel["fieldConfig"]["defaults"].get("custom", {}).get("scaleDistribution", {})
    return _plot([row["step"] for row in rows], names, curves, log=scale.get("type") == "symlog", over_time=False)


def _timeseries(panel: Row, answers: Answers) -> str:
    series: dict[str, dict[float, float]] = {}
    for target in panel["targets"]:
        if "expr" in target:
            for name, values in answers.promql(target["expr"], target.get("legendFormat", "")):
                series.setdefault(name, {}).update(map(tuple, values))
        else:
            for row in answers.sql(target["rawSql"]):
                series.setdefault(str(row["metric"]), {})[row["time"].timestamp()] = row["value"]
    times = sorted({at for values in series.values() for at in values})
    if not times:
        return ""
    curves = [[_plain(values.get(at)) for at in times] for values in series.values()]
    return _plot(times, list(series), curves, log=False, over_time=True)


def _plot(xs: Sequence[float], names: Sequence[str], curves: Any, *, log: bool, over_time: bool) -> str:
    given = {"xs": xs, "names": names, "curves": curves, "log": log, "time": over_time}
    return f"<div class=drawn data-plot='{html.escape(json.dumps(given), quote=True)}'></div>"


def _plain(value: Any) -> float | None:
    return None if value is None or value != value or abs(value) == float("inf") else float(value)  # noqa: PLR0124


_DRAW: Final[Mapping[str, Callable[[Row, Answers], str]]] = {
    "row": lambda panel, _: f"<h3>{html.escape(panel['title'])}</h3>",
    "stat": _stat,
    "table": _table,
    "trend": _trend,
    "timeseries": _timeseries,
}
