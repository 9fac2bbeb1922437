"""The kinds of panel: curves over steps with their baseline band, curves over time, numbers, tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from grafana_foundation_sdk.builders import common, dashboard, stat, table, timeseries, trend
from grafana_foundation_sdk.builders.prometheus import Dataquery as PromQuery
from grafana_foundation_sdk.models import common as kinds
from grafana_foundation_sdk.models.dashboard import (
    DynamicConfigValue,
    FieldColorModeId,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMapping,
    ValueMappingResult,
)

from dashboards.sources import POSTGRES, PROMETHEUS, Sql
from foreshock.frames import catalogue

HEIGHT: Final = 8
WIDTH: Final = 8
UNITS: Final = {
    "nats": "suffix: nats", "share": "percentunit", "tokens": "suffix: tokens", "steps": "suffix: steps",
    "seconds": "s", "count": "short", "1": "none",
}  # fmt: skip
"""Unit in the catalogue → Grafana's."""
COLOURS: Final = {
    "healthy": "green", "warning": "orange", "critical": "red", "unknown": "gray", "open": "red",
    "acknowledged": "orange", "mitigated": "yellow", "resolved": "green", "helped": "green", "no_effect": "orange",
    "worse": "red", "failed": "red", "expired": "orange", "lost": "red", "quarantined": "red", "candidate": "gray",
}  # fmt: skip
THIS_RUN: Final = "run IN (${run:sqlstring}) AND attempt = ${attempt:sqlstring}::int"
WINDOW: Final = "step BETWEEN ${from_step:sqlstring}::bigint AND ${to_step:sqlstring}::bigint"


def unit_of(signals: Sequence[str]) -> str:
    """Grafana's unit of signals that share one. Raises ValueError for a name or a mix that the catalogue forbids."""
    found = {catalogue.find(name) for name in signals}
    units = {signal.unit if signal else None for signal in found}
    if None in units or len(units) != 1:
        raise ValueError(f"{list(signals)}: not signals of one unit, but {units}")
    return UNITS[str(units.pop())]


def quoted(names: Sequence[str]) -> str:
    """SQL literals, separated by commas. Names are the catalogue's own: no quotes in them."""
    return ", ".join(f"'{name}'" for name in names)


def signals_sql(signals: Sequence[str], band: str | None, where: str) -> str:
    """One row a step, one column a signal; `band` adds the three lines of that signal's baseline."""
    columns = [f"max(value) FILTER (WHERE name = '{name}') AS \"{name}\"" for name in signals]
    rows = f"SELECT step, signal AS name, value FROM grafana_points WHERE {where} AND signal IN ({quoted(signals)})"  # nosec B608
    if band:
        for edge in ("low", "centre", "high"):
            columns.append(f"max(value) FILTER (WHERE name = '{edge}') AS \"baseline {edge}\"")
            rows += f" UNION ALL SELECT step, '{edge}', {edge} FROM grafana_bands WHERE {where} AND signal = '{band}'"  # nosec B608
    return f"SELECT step, {', '.join(columns)} FROM ({rows}) AS s GROUP BY step ORDER BY step"  # nosec B608


def over_steps(
    title: str, signals: Sequence[str], *, band: str | None = None, log: bool = False, where: str | None = None
) -> trend.Panel:
    """Signals of one unit over steps; the sentence under the title is the catalogue's."""
    known = [catalogue.find(name) for name in signals]
    sentences = " ".join(f"{s.name}: {s.sentence}" if len(known) > 1 else s.sentence for s in known if s)
    panel = steps_panel(title, sentences).unit(unit_of(signals))
    panel = panel.with_target(Sql(signals_sql(signals, band, where or f"{THIS_RUN} AND {WINDOW}")))
    if log:
        # Also differences that are exactly 0, which a plain logarithm leaves out: linear below 1e-9.
        panel = panel.scale_distribution(
            common.ScaleDistributionConfig().type(kinds.ScaleDistribution.SYMLOG).log(10).linear_threshold(1e-9)
        )
    return _with_band(panel) if band else panel


def steps_panel(title: str, sentence: str) -> trend.Panel:
    """An empty panel whose x-axis is the column `step`. Such panels take no annotations."""
    panel = trend.Panel().title(title).description(sentence).datasource(POSTGRES).height(HEIGHT).span(WIDTH)
    legend = common.VizLegendOptions().show_legend(True).placement(kinds.LegendPlacement.BOTTOM)
    panel = panel.legend(legend.display_mode(kinds.LegendDisplayMode.LIST).calcs(["lastNotNull"]))
    panel = panel.tooltip(common.VizTooltipOptions().mode(kinds.TooltipDisplayMode.MULTI))
    return panel.x_field("step").line_width(1.5).show_points(kinds.VisibilityMode.AUTO)


def _with_band(panel: trend.Panel) -> trend.Panel:
    grey = {"mode": "fixed", "fixedColor": "gray"}
    quiet = [DynamicConfigValue(id_val="color", value=grey), DynamicConfigValue(id_val="custom.lineWidth", value=0)]
    filled = DynamicConfigValue(id_val="custom.fillBelowTo", value="baseline low")
    dashed = DynamicConfigValue(id_val="custom.lineStyle", value={"fill": "dash", "dash": [4, 6]})
    return (
        panel.override_by_name("baseline low", quiet)
        .override_by_name("baseline high", [*quiet, filled])
        .override_by_name("baseline centre", [quiet[0], dashed])
    )


def over_time(title: str, sentence: str, queries: Sequence[PromQuery] | Sequence[Sql], unit: str) -> timeseries.Panel:
    """Curves over time, of either source."""
    source = POSTGRES if any(isinstance(q, Sql) for q in queries) else PROMETHEUS
    panel = timeseries.Panel().title(title).description(sentence).datasource(source).unit(unit).line_width(1.5)
    for query in queries:
        panel = panel.with_target(query)
    legend = common.VizLegendOptions().show_legend(True).placement(kinds.LegendPlacement.BOTTOM)
    panel = panel.legend(legend.display_mode(kinds.LegendDisplayMode.LIST).calcs(["lastNotNull"]))
    return panel.height(HEIGHT).span(WIDTH).tooltip(common.VizTooltipOptions().mode(kinds.TooltipDisplayMode.MULTI))


def listing(title: str, sentence: str, sql: str, *, width: int = 24, height: int = HEIGHT) -> table.Panel:
    """A table; words that say how well something is are coloured, and `run` links to the run's board."""
    panel = table.Panel().title(title).description(sentence).datasource(POSTGRES).with_target(Sql(sql))
    panel = panel.mappings([coloured()]).span(width).height(height).filterable(True).no_value("–")
    for name in ("verdict", "severity", "status", "state"):
        panel = panel.override_by_name(
            name, [DynamicConfigValue(id_val="custom.cellOptions", value={"type": "color-text"})]
        )
    link = [{"title": "Open the run", "url": "/d/foreshock-run?var-run=${__value.text}"}]
    return panel.override_by_name("run", [DynamicConfigValue(id_val="links", value=link)])


def number(
    title: str, sentence: str, query: Sql | PromQuery, unit: str, *, bad_from: float | None = None
) -> stat.Panel:
    """One number, or one a series; red from `bad_from` on."""
    source = POSTGRES if isinstance(query, Sql) else PROMETHEUS
    panel = stat.Panel().title(title).description(sentence).datasource(source).with_target(query).unit(unit)
    steps = [Threshold(value=None, color="green")]
    if bad_from is not None:
        steps.append(Threshold(value=bad_from, color="red"))
    panel = panel.thresholds(dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps))
    panel = panel.color_scheme(dashboard.FieldColor().mode(FieldColorModeId.THRESHOLDS)).mappings([coloured()])
    values = common.ReduceDataOptions().calcs(["lastNotNull"]).fields("/.*/" if isinstance(query, Sql) else "")
    return panel.reduce_options(values).height(4).span(4)


def coloured() -> ValueMapping:
    """Words in their colours."""
    options = {word: ValueMappingResult(color=colour, index=i) for i, (word, colour) in enumerate(COLOURS.items())}
    return ValueMap(options=options)
