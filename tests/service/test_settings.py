"""Settings: declared once, documented from there, refused by name when wrong, and never spilling a secret."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError

from foreshock_service.settings import Settings, render

DOCUMENT = Path(__file__).parents[2] / "docs" / "settings.md"


def test_the_document_is_current() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == render(), (
        "run python -m foreshock_service.settings > docs/settings.md"
    )


def test_every_setting_has_a_sentence_and_a_unit_entry() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description, name
        assert isinstance(field.json_schema_extra, dict), name
        assert "unit" in field.json_schema_extra, name


def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORESHOCK_PORT", "9000")
    monkeypatch.setenv("FORESHOCK_DEFAULT_MODE", "approve")
    settings = Settings()
    assert (settings.port, settings.default_mode) == (9000, "approve")


@pytest.mark.parametrize(("name", "value"), [("port", "70000"), ("default_mode", "yolo"), ("public_url", "ftp://x")])
def test_a_wrong_value_is_refused_by_name_and_not_repeated(monkeypatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"FORESHOCK_{name.upper()}", value)
    with pytest.raises(ValidationError) as refused:
        Settings()
    assert refused.value.errors()[0]["loc"] == (name,)
    assert value not in str(refused.value)


def test_secrets_stay_hidden() -> None:
    settings = Settings(database_url=SecretStr("postgresql://u:hunter2@h/d"), webhook_secret=SecretStr("hunter2"))
    assert "hunter2" not in f"{settings!r} {settings} {settings.model_dump_json()}"


@pytest.mark.parametrize(
    ("host", "near"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("127.8.0.1", True), ("0.0.0.0", False), ("::", False),
     ("10.0.0.5", False), ("gpu-7", False)],
)  # fmt: skip
def test_only_loopback_counts_as_near(host: str, near: bool) -> None:
    assert Settings(host=host).listens_on_loopback is near


def test_urls_are_spelled_for_people() -> None:
    assert Settings(host="::1").url == "http://[::1]:8720"
    assert Settings(public_url="https://watch.example/").url == "https://watch.example"
