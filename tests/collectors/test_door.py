"""The public door: what it shows, what importing it costs, what its settings say."""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import foreshock
from foreshock.settings import Settings, load


def test_every_exported_name_resolves_and_nothing_else_does() -> None:
    assert foreshock.__all__ == ["Command", "Monitor", "Semantics", "__version__", "init", "resumed"]
    assert dir(foreshock) == sorted(foreshock.__all__)
    for name in foreshock.__all__:
        assert getattr(foreshock, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'tensor'"):
        foreshock.tensor  # noqa: B018


def test_importing_it_imports_nothing_heavy_and_neither_does_init() -> None:
    script = (
        "import sys, foreshock; assert not {'numpy', 'msgspec', 'urllib3', 'torch'} & set(sys.modules);"
        "foreshock.init(run='x'); assert not {'torch', 'fastapi', 'sqlalchemy', 'foreshock_service'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_the_version_is_the_distributions() -> None:
    text = (Path(foreshock.__file__).parents[2] / "pyproject.toml").read_text()
    assert f'version = "{foreshock.__version__}"' in text


def test_every_public_method_has_a_docstring() -> None:
    for name, member in inspect.getmembers(foreshock.Monitor, inspect.isfunction):
        if not name.startswith("_"):
            assert member.__doc__, name


def test_every_setting_has_a_unit_and_a_sentence() -> None:
    for declared in fields(Settings):
        assert declared.metadata["sentence"].endswith("."), declared.name
        assert isinstance(declared.metadata["unit"], str)
        assert isinstance(declared.default, int | float) is (
            declared.metadata["unit"] not in ("", "path")
        ) or isinstance(declared.default, bool)


def test_arguments_win_over_the_environment_over_defaults() -> None:
    environment = {
        "FORESHOCK_TIMEOUT_S": "3",
        "FORESHOCK_URL": " http://x ",
        "FORESHOCK_RAISE": "1",
        "FORESHOCK_EVIDENCE": "no",
    }
    loaded = load({"timeout_s": 4, "token": None}, environment)
    assert (loaded.timeout_s, loaded.url, loaded.raise_errors, loaded.evidence) == (4.0, "http://x", True, False)
    assert loaded.backoff_s == Settings().backoff_s


def test_a_typo_in_the_environment_is_logged_and_costs_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert load({}, {"FORESHOCK_TIMEOUT_S": "ten"}).timeout_s == Settings().timeout_s
    assert "FORESHOCK_TIMEOUT_S ignored" in caplog.text


@pytest.mark.parametrize("wrong", [{"timeout_s": "ten"}, {"timeout_s": -1}, {"verify_tls": "maybe"}, {"colour": 1}])
def test_a_wrong_argument_is_an_error(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        load(wrong, {})


def test_the_token_is_not_among_what_may_be_shown() -> None:
    assert "s3cret" not in repr(Settings(token="s3cret").public())
