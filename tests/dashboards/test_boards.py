"""Every query of every panel, run where it will be run: rows come back, under legends and units that are right."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from dashboards import build, run_over_time, sources
from dashboards.panels import unit_of
from foreshock.frames import catalogue
from tests.dashboards.conftest import RUN, Lived
from tests.dashboards.grafana import Asked, asked, expanded, for_prometheus, interpolated
from tests.servers import Server

BOARDS = build.documents()
ALL = [query for name, board in BOARDS.items() for query in asked(name, board)]
SQL = [q for q in ALL if q.kind != "prometheus"]
PROMQL = [q for q in ALL if q.kind == "prometheus"]
GRAFANA_UNITS = {
    "nats": "suffix: nats", "share": "percentunit", "tokens": "suffix: tokens", "steps": "suffix: steps",
    "seconds": "s", "count": "short", "1": "none",
}  # fmt: skip
OTHER_COLUMNS = re.compile(
    r"baseline (low|centre|high)|(warning|critical) incidents|commands (issued|done)|all ranks|worst rank|which rank|"
    r"ranks (reported|expected)|baseline segment"
)
NEED_NOT_BE = {"Precursors and consequences"}
"""Tables that may well be empty for an incident."""


def values(lived: Lived, attempt: str = "1") -> dict[str, list[str]]:
    incident = lived.rows("SELECT id FROM grafana_incidents WHERE rule = 'onpolicy_disagreement'")[0][0]
    return {
        "run": [RUN], "project": ["math"], "attempt": [attempt], "role": ["trainer", "rollout"], "rank": ["0", "1"],
        "from_step": ["0"], "to_step": ["1000000000"], "incident": [incident],
    }  # fmt: skip


def ask(lived: Lived, sql: str, given: dict[str, list[str]]) -> list[dict[str, Any]]:
    ready = expanded(interpolated(sql, given), lived.since, lived.until)
    return [dict(row._mapping) for row in lived.rows(ready.replace(":", r"\:"))]


@pytest.mark.postgres
@pytest.mark.parametrize("query", SQL, ids=lambda q: q.id)
def test_every_sql_query_returns_rows_under_names_and_units_that_are_right(lived: Lived, query: Asked) -> None:
    rows = ask(lived, query.query, values(lived))
    if query.panel in NEED_NOT_BE:
        return
    assert rows, "no rows"
    columns = list(rows[0])
    if query.kind == "time_series":
        assert columns == ["time", "metric", "value"]
        signals = {row["metric"] for row in rows if catalogue.find(row["metric"])}
        assert not signals or GRAFANA_UNITS[_unit(signals)] == query.unit
    elif columns[0] == "step" and query.unit:
        assert [row["step"] for row in rows] == sorted({row["step"] for row in rows}), "a trend's x rises, each once"
        signals = {c for c in columns[1:] if catalogue.find(c)}
        assert all(OTHER_COLUMNS.fullmatch(c) for c in columns[1:] if c not in signals)
        assert not signals or GRAFANA_UNITS[_unit(signals)] == query.unit
        empty = [c for c in columns if all(row[c] is None for row in rows)]
        assert empty == []


def _unit(signals: set[str]) -> str:
    (unit,) = {catalogue.find(name).unit for name in signals}  # type: ignore[union-attr]
    return unit


@pytest.mark.postgres
def test_the_fault_shows_on_the_run_board_above_its_band(lived: Lived) -> None:
    panel = next(q for q in SQL if q.board == "run" and q.panel == "policy.kl_k2")
    rows = {row["step"]: row for row in ask(lived, panel.query, values(lived))}
    assert rows[30]["policy.kl_k2"] < rows[30]["baseline high"]
    assert rows[45]["policy.kl_k2"] > 100 * rows[45]["baseline high"]
    again = {row["step"]: row for row in ask(lived, panel.query, values(lived, "2"))}
    assert min(again) == 50, "the second attempt is a curve of its own"
    assert again[55]["policy.kl_k2"] < 1e-4


@pytest.mark.postgres
def test_incidents_and_commands_are_a_series_over_steps(lived: Lived) -> None:
    panel = next(q for q in SQL if q.panel == "Incidents and commands")
    rows = {row["step"]: row for row in ask(lived, panel.query, values(lived))}
    assert rows[30]["critical incidents"] == 0
    assert rows[50]["critical incidents"] >= 2
    assert sum(row["commands done"] for row in rows.values()) == 1


@pytest.mark.postgres
def test_the_incident_board_shows_the_worst_tokens_of_the_sick_rank(lived: Lived) -> None:
    panel = next(q for q in SQL if q.panel == "Evidence tokens")
    rows = ask(lived, panel.query, values(lived))
    assert rows[0]["pair"] == "policy"
    assert rows[0]["step"] >= 40
    assert abs(rows[0]["delta"]) > 1.0
    assert all(row["delta"] == pytest.approx(row["a"] - row["b"]) for row in rows)


@pytest.mark.postgres
@pytest.mark.parametrize("name", BOARDS)
def test_every_variable_lists_values_that_its_board_can_use(
    lived: Lived, request: pytest.FixtureRequest, name: str
) -> None:
    for variable in BOARDS[name]["templating"]["list"]:
        if variable["type"] == "textbox":
            assert int(variable["query"]) >= 0
            continue
        if variable["datasource"]["uid"] == "foreshock-prometheus":
            metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()  # type: ignore[union-attr]
            server: Server = request.getfixturevalue("scraped")
            found = server.get(f"/api/v1/label/{label}/values", **{"match[]": metric})["data"]
        else:
            found = ask(lived, variable["query"], values(lived))
        assert found, f"{variable['name']} lists nothing"


@pytest.mark.postgres
def test_annotations_are_spans_with_a_text_and_tags(lived: Lived) -> None:
    told = {a["name"]: a for a in BOARDS["run_over_time"]["annotations"]["list"]}
    for name in ("Incidents", "Commands", "Attempts"):
        rows = ask(lived, told[name]["target"]["rawSql"], values(lived))
        assert rows, name
        assert {"time", "text", "tags"} <= set(rows[0])
    incidents = ask(lived, told["Incidents"]["target"]["rawSql"], values(lived))
    assert any(row["text"].startswith("onpolicy_disagreement: ") and "critical" in row["tags"] for row in incidents)


@pytest.mark.postgres
@pytest.mark.parametrize("query", PROMQL, ids=lambda q: q.id)
def test_every_promql_query_returns_series_under_legends_that_are_filled(
    lived: Lived, scraped: Server, query: Asked
) -> None:
    given = {"instance": [lived.url.removeprefix("http://"), "other:1"]}
    ready = for_prometheus(query.query, given, rate_interval="10s")
    found = scraped.get("/api/v1/query", query=ready)["data"]["result"]
    assert found, ready
    for series in found:
        assert all(series["metric"].get(label) for label in re.findall(r"{{(\w+)}}", query.legend)), series["metric"]
        assert re.search(r"\w", query.legend), "a legend is not empty"


@pytest.mark.parametrize("query", PROMQL, ids=lambda q: q.id)
def test_the_unit_of_a_promql_panel_follows_its_metric(query: Asked) -> None:
    if "bytes" in query.query:
        expected = {"Bps"}
    elif "rate(" in query.query and "increase" not in query.query and "histogram_quantile" not in query.query:
        expected = {"reqps", "ops"}
    elif "_seconds" in query.query:
        expected = {"s"}
    else:
        expected = {"short"}
    assert query.unit in expected


def test_the_committed_json_is_what_the_code_builds() -> None:
    for name, document in BOARDS.items():
        path = build.BUILT / f"{name}.json"
        assert path.read_text(encoding="utf-8") == build.text(document), "run `foreshock dashboards build`"
    assert {p.stem for p in build.BUILT.glob("*.json")} == set(BOARDS)


@pytest.mark.parametrize("name", BOARDS)
def test_the_json_goes_through_grafanas_published_model_unchanged(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    register_default_plugins()
    sources.register()
    # The model knows annotations by tags alone: SQL is compared as it stands.
    monkeypatch.setattr(
        "grafana_foundation_sdk.models.dashboard.AnnotationTarget.from_json",
        lambda data: run_over_time.SqlTarget(data["rawSql"]) if "rawSql" in data else _tags(data),
    )
    document = BOARDS[name]
    again = json.loads(json.dumps(Dashboard.from_json(document), cls=JSONEncoder))
    assert again == document


def _tags(data: dict[str, Any]) -> Any:
    from grafana_foundation_sdk.models.dashboard import AnnotationTarget

    return AnnotationTarget(data["limit"], data["matchAny"], data["tags"], data["type"])


@pytest.mark.parametrize("name", BOARDS)
def test_panels_lie_side_by_side_and_say_what_they_show(name: str) -> None:
    panels = BOARDS[name]["panels"]
    assert len({p["id"] for p in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, f"{panel['title']} lies on another panel"
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"], panel["title"]
            uids = {t["datasource"]["uid"] for t in panel["targets"]}
            assert uids == {panel["datasource"]["uid"]}


def test_a_signal_that_does_not_exist_or_a_mix_of_units_is_refused() -> None:
    with pytest.raises(ValueError, match="not signals of one unit"):
        unit_of(["policy.kl_k9"])
    with pytest.raises(ValueError, match="not signals of one unit"):
        unit_of(["policy.kl_k2", "lr"])


def test_boards_ask_only_for_the_views_of_the_contract() -> None:
    migrations = Path(__file__).parents[2] / "alembic/versions"
    views = set(re.findall(r"grafana_\w+", "".join(p.read_text() for p in migrations.glob("*.py"))))
    asked_for = {v for q in SQL for v in re.findall(r"(?:FROM|JOIN) (\w+)", q.query)}
    assert asked_for <= views
