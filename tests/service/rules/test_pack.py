"""A pack explains itself when it is wrong, and a bad edit never replaces a good pack."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from foreshock_service.rules.illnesses import NAMES, all_rules, rule_named
from foreshock_service.rules.pack import DEFAULT, PackError, PackFile, _layout, default_pack, load_pack, parse_pack


def test_the_shipped_pack_holds_every_rule_in_order() -> None:
    assert [e.rule.name for e in default_pack().entries] == list(NAMES)
    assert [rule.name for rule in all_rules()] == list(NAMES)


def test_a_file_is_laid_over_the_shipped_pack_key_by_key(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text("rules:\n  entropy_collapse: {hold_steps: 4}\n  silent_run: {enabled: false}\n")
    pack = load_pack(path, {"entropy_collapse": {"clear_steps": 9}})
    config = pack.config("entropy_collapse")
    assert config is not None
    assert (config.hold_steps, config.clear_steps) == (4, 9)
    assert pack.config("silent_run") is None
    assert [e.rule.name for e in pack.entries] == [n for n in NAMES if n != "silent_run"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rules:\n  entropy_colapse: {}\n", ["line 2", "entropy_colapse", "did you mean `entropy_collapse`"]),
        ("rules:\n  silent_run:\n    warn_ss: 3\n", ["line 3", "warn_ss", "did you mean `warn_s`"]),
        ("rules:\n  silent_run:\n    warn_s: soon\n", ["line 3", "silent_run.warn_s", "'soon'"]),
        ("rules:\n  silent_run: {hold_steps: 0}\n", ["line 2", "hold_steps", "greater than or equal to 1"]),
        ("rules:\n  onpolicy_disagreement:\n    presets: {float32: 1e-5, bf16: 1}\n", ["line 3", "presets.bf16"]),
        ("rules: [silent_run]\n", ["line 1", "`rules` must map"]),
        ("rules:\n  silent_run: 3\n", ["line 2", "must be a map"]),
        ("version: 2\n", ["line 1", "`version` must be 1"]),
        ("rule: {}\n", ["line 1", "unknown key `rule`", "did you mean `rules`"]),
        ("- a\n", ["line 1"]),
        ("rules: {a: [}\n", ["line 1", "not YAML"]),
    ],
)
def test_an_error_names_the_key_and_the_line(text: str, words: list[str]) -> None:
    with pytest.raises(PackError) as caught:
        parse_pack(text, "my.yaml")
    for word in ["my.yaml", *words]:
        assert word in str(caught.value)


def test_an_empty_file_is_the_shipped_pack() -> None:
    assert parse_pack("", "empty.yaml").hash == default_pack().hash


def test_only_the_changed_rules_hash_changes() -> None:
    before, after = default_pack(), default_pack().with_overrides({"silent_run": {"warn_s": 60}})
    different = [a.rule.name for a, b in zip(before.entries, after.entries, strict=True) if a.hash != b.hash]
    assert different == ["silent_run"]
    assert before.hash != after.hash


def test_an_absent_or_oversized_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(PackError, match="cannot be read"):
        load_pack(tmp_path / "absent.yaml")
    (tmp_path / "big.yaml").write_text("#" * 2_000_000)
    with pytest.raises(PackError, match="larger than"):
        load_pack(tmp_path / "big.yaml")


def test_nested_aliases_do_not_blow_up() -> None:
    bomb = "a: &a [x]\n" + "".join(
        f"{c}: &{c} [{', '.join(['*' + p] * 9)}]\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True)
    )
    with pytest.raises(PackError, match="aliases that multiply"):
        parse_pack(bomb, "bomb.yaml")


def test_a_changed_file_is_read_again_and_a_bad_one_keeps_the_last_good_pack(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text("rules: {silent_run: {warn_s: 60}}")
    file = PackFile(path)
    first = file.current()
    assert file.current() is first

    path.write_text("rules: {silent_run: {warn_s: 61}}  ")
    os.utime(path, ns=(1, 1))
    second = file.current()
    assert second.hash != first.hash

    path.write_text("rules: {silent_rum: {}}")
    os.utime(path, ns=(2, 2))
    assert file.current() is second
    assert file.error is not None
    assert "did you mean `silent_run`" in file.error


def test_the_default_pack_repeats_no_default() -> None:
    text = DEFAULT.read_text(encoding="utf-8")
    assert parse_pack(text, "default.yaml", base={}).hash == default_pack().hash
    for entry in default_pack().entries:
        said = default_pack().settings[entry.rule.name]
        defaults = entry.rule.config()
        assert all(getattr(defaults, key) != getattr(entry.config, key) for key in said)


def test_another_layout_of_a_state_starts_afresh() -> None:
    """States are stored as arrays: a field put in the middle by an upgrade would be read as its neighbour."""

    class Before(msgspec.Struct, array_like=True):
        a: int = 0
        b: int = 0

    class After(msgspec.Struct, array_like=True):
        a: int = 0
        new: int = 0
        b: int = 0

    assert _layout(Before) != _layout(After)
    hashes = {name: rule_named(name) for name in NAMES}
    assert len({_layout(rule.state) for rule in hashes.values()}) > 10
