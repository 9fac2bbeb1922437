"""YAML that others wrote costs little and makes nothing but plain values."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.attacks.files import YAMLS
from foreshock_service.bounded_yaml import AbsurdYAML, safe_load
from foreshock_service.doctor.document import UnreadableError, parse
from foreshock_service.rules.pack import PackError, parse_pack

PIECES = st.sampled_from(
    ["a", ": ", "\n", "  ", "- ", "&a ", "*a", "<<: ", "[", "]", "{", "}", ",", "!!python/name:os.system", "!!binary ",
     "2001-99-99", "9" * 5000, "1e999", "'", '"', "|", ">", "? ", "\x00", "\ufeff", "---\n", "%YAML 9\n", "!!set ", "~"]
)  # fmt: skip


@pytest.mark.parametrize("name", list(YAMLS))
def test_each_bomb_is_a_clear_error_for_packs_and_for_doctor(name: str) -> None:
    with pytest.raises(PackError):
        parse_pack(YAMLS[name])
    with pytest.raises(UnreadableError):
        parse(YAMLS[name])


def test_anchors_and_merges_of_honest_files_still_work() -> None:
    assert safe_load("base: &b {x: 1}\nmine: {<<: *b, y: 2}") == {"base": {"x": 1}, "mine": {"x": 1, "y": 2}}
    assert safe_load("") is None


def test_what_is_too_much_says_so() -> None:
    with pytest.raises(AbsurdYAML, match="multiply"):
        safe_load(YAMLS["merges that multiply"])


@given(st.lists(PIECES, max_size=30).map("".join))
@settings(max_examples=200, deadline=None)
def test_whatever_the_text_only_the_named_errors_come(text: str) -> None:
    for read, named in ((safe_load, yaml.YAMLError), (parse_pack, PackError), (parse, UnreadableError)):
        try:
            read(text)
        except named:
            continue
