"""A start script's options are read as the shell would pass them, each with its line; nothing is executed."""

from __future__ import annotations

from foreshock_service.doctor.commandline import parse
from foreshock_service.doctor.document import UNKNOWN


def test_flags_overrides_lists_and_their_lines() -> None:
    document = parse("run.py --a-b 1e-6 --flag \\\n  --pair 0.2 0.3 x.y=False \\\n  '+x.z=[\"a\", 1]' --eq=7\n")
    read = {path: document.get(path).value for path in ("flag", "pair", "x.y", "x.z", "eq")}
    assert read == {"flag": True, "pair": [0.2, 0.3], "x.y": False, "x.z": ["a", 1], "eq": 7}
    assert document.number("a_b").value == 1e-6
    assert [document.get(path).line for path in ("a_b", "pair", "x.z")] == [1, 2, 3]


def test_later_options_win_and_comments_do_not_count() -> None:
    document = parse("ARGS=(\n  --k 1\n  # --k 2\n  --k 3 # --k 4\n)\ntrain ${ARGS[@]} --m a#b\n")
    assert (document.get("k").value, document.get("k").line) == (3, 4)
    assert document.get("m").value == "a#b"


def test_constants_are_followed_and_what_else_decides_is_unknown() -> None:
    script = (
        'N=4\nexport M="${N}2"\nif [ x ]; then\n  L=5\n  train --late 1\nfi\ntrain --n $N --m ${M} --l $L --e ${E:-3} '
    )
    document = parse(script + "--s $(nproc) --t $((N * 2)) --q '$N' x.y=$E\n")
    assert [document.get(name).value for name in ("n", "m", "q")] == [4, 42, "$N"]
    assert [document.get(name).value for name in ("l", "e", "s", "t", "late", "x.y")] == [UNKNOWN] * 6


def test_nothing_in_a_script_is_run(tmp_path: object) -> None:
    document = parse(f"train --a `touch {tmp_path}/ran` --b 1\n")
    assert document.get("b").value == 1
    assert document.get("a").value is UNKNOWN
