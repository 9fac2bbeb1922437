"""Every value knows its line; what is no configuration is a clear error."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreshock_service.doctor.document import UNKNOWN, UnreadableError, parse, read


def test_values_know_their_lines_and_absent_ones_have_none() -> None:
    document = parse("a: 1\nb:\n  c: [x, y]\n  d: 1e-6\n")
    assert (document.get("b.c.1").value, document.get("b.c.1").line) == ("y", 3)
    assert (document.number("b.d").value, document.number("b.d").line) == (1e-6, 4)
    assert (document.get("b.z", 7).value, document.get("b.z", 7).line) == (7, None)


def test_interpolations_are_followed_and_what_is_elsewhere_is_unknown() -> None:
    document = parse("a: 5\nb: {c: '${a}', d: '${.c}', e: 'n-${a}', f: '${now:%Y}', g: '${missing}', h: '${h2}'}\n")
    assert [document.get(f"b.{k}").value for k in "cde"] == [5, 5, "n-5"]
    assert [document.get(f"b.{k}").value for k in "fgh"] == [UNKNOWN] * 3


def test_an_interpolation_that_refers_to_itself_is_unknown() -> None:
    assert parse("a: ${b}\nb: ${a}\n").get("a").value is UNKNOWN


def test_merged_and_repeated_keys_read_as_yaml_reads_them() -> None:
    document = parse("base: &base {x: 1, y: 2}\nmine:\n  <<: *base\n  y: 3\n")
    assert (document.get("mine.x").value, document.get("mine.y").value) == (1, 3)
    assert document.get("mine.y").line == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1, 2\nb: 3", "line 2"), ("", "is empty"), ("- 1\n- 2", "no mapping"),
        ("a: !!python/name:os.system ''", "no valid YAML"),
        ("a: &a [*a]", "nested too deeply"), ("a: b: c", "no valid YAML"),
    ],
)  # fmt: skip
def test_what_is_no_configuration_is_a_clear_error(text: str, message: str) -> None:
    with pytest.raises(UnreadableError, match=message):
        parse(text)


def test_aliases_that_multiply_are_refused() -> None:
    bomb = "a0: &a0 {x: 1}\n" + "".join(
        f"a{n}: &a{n} {{{', '.join(f'k{i}: *a{n - 1}' for i in range(10))}}}\n" for n in range(1, 9)
    )
    with pytest.raises(UnreadableError, match="aliases that multiply"):
        parse(bomb)


def test_a_file_that_is_not_there_or_not_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match=r"absent\.yaml cannot be read"):
        read(tmp_path / "absent.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00a")
    with pytest.raises(UnreadableError, match="not UTF-8"):
        read(tmp_path / "binary.yaml")


@pytest.mark.parametrize(
    ("key", "value"), [("api_key", "abcdef"), ("url", "https://user:abcdef@host"), ("x", "sk-abcdef" + "1" * 20)]
)
def test_no_secret_is_quoted_as_evidence(key: str, value: str) -> None:
    quoted = parse(f"a:\n  {key}: {value}\n").get(f"a.{key}").quote()
    assert "abcdef" not in quoted
    assert quoted.startswith(f"line 2: a.{key}: ")
