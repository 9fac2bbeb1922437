"""docker-compose.yml: valid by the Compose specification, pinned, healthy by check, and without a secret in it.

No Docker engine runs where this is tested: the file is parsed by `compose-spec` (the published specification's types),
and what its services would run is run by hand in `test_by_hand.py`.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import compose_spec
import pytest
import yaml

from foreshock_service.settings import Settings

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docker-compose.yml").read_text()
FILE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = FILE["services"]
ONCE = {"tokens"}


def variables() -> dict[str, tuple[str, str]]:
    """Name → (`:?` or `:-`, its text) of every variable that the file asks the environment for."""
    return {name: (how, rest) for name, how, rest in re.findall(r"\$\{(\w+)(:[?-])?([^}]*)\}", TEXT)}


def test_the_file_is_valid_by_the_compose_specification() -> None:
    filled = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", re.sub(r"\$\{\w+:\?[^}]*\}", "secret", TEXT))
    parsed = compose_spec.PyCompose.from_yaml(yaml.safe_dump(yaml.safe_load(filled)))
    parsed.validate()
    assert set(parsed.service_names()) == {"postgres", "tokens", "foreshock", "prometheus", "alertmanager", "grafana"}


def test_the_validator_refuses_what_compose_would() -> None:
    with pytest.raises(Exception, match=r"imagee|unknown"):
        compose_spec.PyCompose.from_yaml("services: {a: {imagee: x}}")


@pytest.mark.parametrize("name", SERVICES)
def test_each_service_is_pinned_checked_restarted_and_drops_what_it_does_not_need(name: str) -> None:
    service = SERVICES[name]
    assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+(\.\d+)?(-\w+)?", service["image"]), "an image by its exact version"
    assert service["logging"]["options"]["max-size"], "logs are bounded"
    if name in ONCE:
        assert service["restart"] == "no"
    else:
        assert service["restart"] == "unless-stopped"
        assert {"test", "interval", "timeout", "retries", "start_period"} <= set(service["healthcheck"])
    if name != "postgres":  # its entry point changes owner and user
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service
    for port in service.get("ports", ()):
        assert port.startswith("${FORESHOCK_BIND:-127.0.0.1}:"), "nothing is open beyond this machine by default"


def test_services_wait_for_what_they_need_to_be_well() -> None:
    for name, service in SERVICES.items():
        for other, how in service.get("depends_on", {}).items():
            wanted = "service_completed_successfully" if other in ONCE else "service_healthy"
            assert how["condition"] == wanted, f"{name} → {other}"


def test_volumes_are_declared_and_every_mounted_file_is_in_the_repository() -> None:
    used = set()
    for service in SERVICES.values():
        for mount in service.get("volumes", ()):
            source, target, *mode = mount.split(":")
            if source.startswith("./"):
                assert (ROOT / source).exists(), source
                assert mode == ["ro"], f"{source} is mounted read-only"
            else:
                used.add(source)
            assert target.startswith("/")
    assert used == set(FILE["volumes"])


def test_secrets_come_from_the_environment_and_have_no_default() -> None:
    asked = variables()
    secret = {n for n in asked if "PASSWORD" in n}
    assert secret == {"FORESHOCK_DB_PASSWORD", "GRAFANA_DB_PASSWORD", "GRAFANA_ADMIN_PASSWORD"}
    assert all(asked[name][0] == ":?" for name in secret)
    example = (ROOT / "deploy/env.example").read_text()
    assert all(re.search(rf"^{name}=$", example, re.M) for name in secret)
    assert {n for n in asked if n not in secret} == {"FORESHOCK_BIND", "FORESHOCK_PUBLIC_URL"}
    for service in SERVICES.values():
        for key, value in service.get("environment", {}).items():
            if re.search("PASSWORD|SECRET|TOKEN|SLACK|SMTP_URL|WEBHOOK", key):
                assert value is None or re.fullmatch(r"\$\{\w+:\?[^}]+\}", value), key


def test_the_services_settings_exist_by_the_names_that_the_file_uses() -> None:
    known = {f"FORESHOCK_{name.upper()}" for name in Settings.model_fields}
    for name in ("tokens", "foreshock"):
        assert set(SERVICES[name]["environment"]) <= known
    example = (ROOT / "deploy/env.example").read_text()
    named = set(re.findall(r"^#?(FORESHOCK_\w+)=", example, re.M)) - {"FORESHOCK_DB_PASSWORD", "FORESHOCK_BIND"}
    assert named <= known


def test_grafanas_provisioning_fits_the_boards_and_the_mounts() -> None:
    sources = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/foreshock.yml").read_text())
    by_uid = {s["uid"]: s for s in sources["datasources"]}
    assert by_uid["foreshock-postgres"]["type"] == "grafana-postgresql-datasource"
    assert by_uid["foreshock-prometheus"]["type"] == "prometheus"
    provider = yaml.safe_load((ROOT / "deploy/grafana/provisioning/dashboards/foreshock.yml").read_text())["providers"][
        0
    ]
    assert f"./dashboards/built:{provider['options']['path']}:ro" in SERVICES["grafana"]["volumes"]
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (ROOT / "dashboards/built" / Path(home).name).exists()
    for text in (p.read_text() for p in (ROOT / "deploy/grafana").rglob("*.yml")):
        asked = set(re.findall(r"\$(\w+)", text))
        assert asked <= set(SERVICES["grafana"]["environment"])


@pytest.mark.parametrize("script", ["deploy/foreshock/tokens.sh", "deploy/postgres/10-grafana-reader.sh"])
def test_scripts_are_executable_and_plain_sh(script: str) -> None:
    path = ROOT / script
    assert path.stat().st_mode & 0o111
    text = path.read_text()
    assert text.startswith("#!/bin/sh\n")
    assert "\nset -eu\n" in text
    done = subprocess.run(["sh", "-n", str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
