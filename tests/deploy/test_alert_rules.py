"""The shipped alerting rules: `promtool check rules`, and `promtool test rules` in which every one fires and rests."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from foreshock_service.api import fleet
from tests.servers import find_binary

RULES = Path(__file__).parents[2] / "deploy/prometheus/alerts.yml"
ALERTS = {r["alert"]: r for g in yaml.safe_load(RULES.read_text())["groups"] for r in g["rules"]}
ILL: dict[str, dict[str, str]] = {
    "ForeshockWatchdog": {},
    "ForeshockDown": {'up{job="foreshock"}': "0x60"},
    "ForeshockNobodyLeads": {'foreshock_leads{job="foreshock"}': "0x60"},
    "ForeshockHeartbeatMissed": {'foreshock_heartbeat_timestamp_seconds{job="foreshock"}': "0x60"},
    "ForeshockDatabaseDown": {'foreshock_database_up{job="foreshock"}': "0x60"},
    "ForeshockWorkerCrashing": {'foreshock_worker_crashes_total{job="foreshock",worker="writer"}': "0+1x60"},
    "ForeshockIngestLag": {'foreshock_ingest_lag_seconds{job="foreshock"}': "30x60"},
    "ForeshockQueueFull": {'foreshock_envelopes_turned_away_total{job="foreshock"}': "0+1x60"},
    "ForeshockIngestFailing": {'foreshock_envelopes_failed_total{job="foreshock"}': "0+1x60"},
    "ForeshockEvaluationLag": {'foreshock_evaluation_lag_seconds{job="foreshock"}': "90x60"},
    "ForeshockStepsFailing": {'foreshock_steps_failed_total{job="foreshock"}': "0+1x60"},
    "ForeshockOutboxLag": {'foreshock_outbox_lag_seconds{job="foreshock"}': "600x60"},
    "ForeshockDeadLetters": {'foreshock_deliveries{job="foreshock",channel="webhook",state="dead"}': "_x25 1x35"},
    "ForeshockItemsLost": {'foreshock_run_lost_items_total{job="foreshock",run="a/b",reason="refused"}': "0+1x60"},
    "ForeshockRunCritical": {'foreshock_run_verdict{job="foreshock",run="a/b",verdict="critical"}': "1x60"},
}
WELL = {
    'up{job="foreshock",instance="a"}': "1x60",
    'up{job="foreshock",instance="b"}': "0x60",
    'foreshock_leads{job="foreshock",instance="a"}': "1x60",
    'foreshock_leads{job="foreshock",instance="b"}': "0x60",
    'foreshock_heartbeat_timestamp_seconds{job="foreshock"}': "0+60x60",
    'foreshock_database_up{job="foreshock"}': "1x60",
    'foreshock_worker_crashes_total{job="foreshock",worker="writer"}': "2x60",
    'foreshock_ingest_lag_seconds{job="foreshock"}': "0.1x60",
    'foreshock_envelopes_turned_away_total{job="foreshock"}': "5x60",
    'foreshock_envelopes_failed_total{job="foreshock"}': "1x60",
    'foreshock_evaluation_lag_seconds{job="foreshock"}': "2x60",
    'foreshock_steps_failed_total{job="foreshock"}': "1x60",
    'foreshock_outbox_lag_seconds{job="foreshock"}': "20x60",
    'foreshock_deliveries{job="foreshock",channel="webhook",state="dead"}': "4x60",
    'foreshock_run_lost_items_total{job="foreshock",run="a/b",reason="refused"}': "3x60",
    'foreshock_run_verdict{job="foreshock",run="a/b",verdict="critical"}': "0x60",
}


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = find_binary("promtool", "prometheus")
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)


def test_promtool_passes_the_rules() -> None:
    done = promtool("check", "rules", str(RULES))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout


def test_every_rule_fires_on_its_illness_and_rests_in_health(tmp_path: Path) -> None:
    assert set(ILL) == set(ALERTS)
    # `absent()` looks at every series, so each illness is a world of its own.
    tests: list[dict[str, Any]] = [_world(series, name, firing=True) for name, series in ILL.items()] + [
        _world(WELL, name, firing=False) for name in ALERTS if name != "ForeshockWatchdog"
    ]
    path = tmp_path / "rules_test.yml"
    path.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    done = promtool("test", "rules", str(path))
    assert done.returncode == 0, done.stdout + done.stderr


def _world(series: dict[str, str], name: str, *, firing: bool) -> dict[str, Any]:
    alert: dict[str, Any] = {"alertname": name, "eval_time": "28m", "exp_alerts": []}
    world: dict[str, Any] = {
        "interval": "1m",
        "input_series": [{"series": s, "values": v} for s, v in series.items()],
        "alert_rule_test": [alert],
    }
    if firing:
        # What promtool compares is labels and annotations; the annotations' text is not the matter here.
        world["promql_expr_test"] = [
            {
                "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}})',
                "eval_time": "28m",
                "exp_samples": [{"labels": "{}", "value": 1}],
            }
        ]
        del world["alert_rule_test"]
    return world


def test_rules_ask_only_for_metrics_that_the_service_exports(house: Any) -> None:
    house.step(1, {"reward.mean": 0.5})
    house.near.get("/healthz")
    exported = {f.name for f in text_string_to_metric_families(house.near.get("/metrics").text)}
    # These two appear with the first alert and the first loss.
    exported |= {"foreshock_deliveries", "foreshock_run_lost_items"}
    asked = {m.removesuffix("_total") for rule in ALERTS.values() for m in re.findall(r"foreshock_\w+", rule["expr"])}
    assert asked, "the rules ask for something"
    assert asked <= exported
    assert fleet.LEASE_S < 120, "a change of leader must not look like a missed heartbeat"


@pytest.mark.parametrize("name", sorted(ALERTS))
def test_every_alert_says_how_bad_and_what(name: str) -> None:
    alert = ALERTS[name]
    assert alert["labels"]["severity"] in ("none", "warning", "critical")
    assert alert["annotations"]["summary"].endswith(".")
    page = (Path(__file__).parents[2] / "docs/prometheus.md").read_text()
    assert f"`{name}`" in page
