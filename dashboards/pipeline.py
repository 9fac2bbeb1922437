"""Pipeline: Foreshock's own health, from Prometheus: lag, losses, queue, deliveries, the door."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.builders import dashboard

from dashboards import board
from dashboards.panels import number, over_time
from dashboards.sources import PROMETHEUS, promql

HERE: Final = 'instance=~"$instance"'
RATE: Final = "$__rate_interval"


def _rate(metric: str, by: str) -> str:
    return f"sum by ({by}) (rate({metric}{{{HERE}}}[{RATE}]))"


def build() -> dashboard.Dashboard:
    """The board."""
    made = board.new("pipeline", "Foreshock: pipeline", "Foreshock's own health.", since="now-3h", refresh="15s")
    instances = "label_values(foreshock_build_info, instance)"
    made = made.with_variable(board.choice("instance", "Replica", instances, many=True, source=PROMETHEUS))
    return _door(_work(_state(made)))


def _state(made: dashboard.Dashboard) -> dashboard.Dashboard:
    heartbeat = f"time() - max(foreshock_heartbeat_timestamp_seconds{{{HERE}}})"
    dead = 'sum(foreshock_deliveries{state="dead"}) or vector(0)'
    lost = "sum(increase(foreshock_run_lost_items_total[1h])) or vector(0)"
    up = f"sum(foreshock_database_up{{{HERE}}})"
    return (
        made.with_row(dashboard.Row("Is it well?"))
        .with_panel(number("Replicas", "Processes whose database answers.", promql(up, "replicas"), "short"))
        .with_panel(
            number("Heartbeat", "Since the last sign of life.", promql(heartbeat, "heartbeat"), "s", bad_from=120)
        )
        .with_panel(
            number(
                "Evaluation lag", "Age of the oldest step that waits for its verdict.",
                promql("max(foreshock_evaluation_lag_seconds)", "lag"), "s", bad_from=60,
            )
        )
        .with_panel(
            number(
                "Outbox lag", "Age of the oldest alert not delivered.",
                promql("max(foreshock_outbox_lag_seconds)", "lag"), "s", bad_from=300,
            )
        )
        .with_panel(number("Dead letters", "Alerts given up.", promql(dead, "dead letters"), "short", bad_from=1))
        .with_panel(
            number("Lost", "Items that collectors dropped in the last hour.", promql(lost, "lost"), "short", bad_from=1)
        )
    )  # fmt: skip


def _work(made: dashboard.Dashboard) -> dashboard.Dashboard:
    evaluated = [
        promql(_rate("foreshock_steps_evaluated_total", "instance"), "{{instance}} evaluated"),
        promql(_rate("foreshock_steps_failed_total", "instance"), "{{instance}} failed", "B"),
    ]
    queue = [
        promql(f"foreshock_writer_queue_length{{{HERE}}}", "{{instance}} waiting"),
        promql(f"foreshock_writer_queue_capacity{{{HERE}}}", "{{instance}} capacity", "B"),
    ]
    lags = [
        promql(f"foreshock_ingest_lag_seconds{{{HERE}}}", "ingest {{instance}}"),
        promql("foreshock_evaluation_lag_seconds", "evaluation", "B"),
        promql("foreshock_outbox_lag_seconds", "outbox", "C"),
    ]
    rate = "Envelopes a second, by what became of them."
    bytes_in = [promql(_rate("foreshock_ingest_bytes_total", "instance"), "{{instance}}")]
    losses = [promql("sum by (run, reason) (increase(foreshock_run_lost_items_total[10m]))", "{{run}} {{reason}}")]
    deliveries = [promql("sum by (channel, state) (foreshock_deliveries)", "{{channel}} {{state}}")]
    envelopes = [promql(_rate("foreshock_ingest_envelopes_total", "outcome"), "{{outcome}}")]
    return (
        made.with_row(dashboard.Row("From frame to alert"))
        .with_panel(over_time("Envelopes", rate, envelopes, "reqps"))
        .with_panel(over_time("Bytes in", "Bytes of envelopes a second.", bytes_in, "Bps"))
        .with_panel(over_time("Queue", "Envelopes in front of the writer.", queue, "short"))
        .with_panel(over_time("Lag", "How long what is oldest has waited.", lags, "s"))
        .with_panel(over_time("Steps", "Steps a second.", evaluated, "ops"))
        .with_panel(over_time("Losses", "Items that collectors dropped in ten minutes, by reason.", losses, "short"))
        .with_panel(over_time("Deliveries", "Alerts kept, by channel and state.", deliveries, "short"))
        .with_panel(
            over_time("Commands", "By state.", [promql("sum by (state) (foreshock_commands)", "{{state}}")], "short")
        )
        .with_panel(
            over_time(
                "Worker crashes", "Workers started again in ten minutes.",
                [promql(f"increase(foreshock_worker_crashes_total{{{HERE}}}[10m])", "{{instance}} {{worker}}")],
                "short",
            )
        )
    )  # fmt: skip


def _door(made: dashboard.Dashboard) -> dashboard.Dashboard:
    p95 = (
        f"histogram_quantile(0.95, sum by (route, le) (rate(foreshock_http_request_seconds_bucket{{{HERE}}}[{RATE}])))"
    )
    refused = [promql(f"sum(rate(foreshock_http_rate_limited_total{{{HERE}}}[{RATE}]))", "rate limited")]
    return (
        made.with_row(dashboard.Row("The door"))
        .with_panel(
            over_time(
                "Requests", "A second, by status.",
                [promql(_rate("foreshock_http_requests_total", "status"), "{{status}}")], "reqps",
            )
        )
        .with_panel(over_time("Time to answer", "95 % are faster.", [promql(p95, "{{route}}")], "s"))
        .with_panel(over_time("Turned away", "Requests a second answered 429.", refused, "reqps"))
        .with_panel(
            over_time(
                "Waiting trainers and pages", "Long-polls and event streams open now.",
                [promql(f"foreshock_waiters{{{HERE}}}", "{{instance}}")], "short",
            )
        )
    )  # fmt: skip
