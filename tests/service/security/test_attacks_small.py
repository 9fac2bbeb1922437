"""A small `make attacks`: a real service behind tokens, attacked; each row of the table is a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import benchmarks.attacks.__main__  # noqa: F401 - registers the attacks
from benchmarks.attacks.target import ATTACKS, Attack, Target

SLOW = (
    "a gzip of 512 MiB", "a zstd bomb", "60 ", "the same command twenty", "the same as a configuration",
    "a redirect elsewhere", "a command for another run", "9 MiB",
)  # fmt: skip
"""Seconds each: only in `make attacks`."""
SMALL = [tried for tried in ATTACKS if not tried.tried.startswith(SLOW)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """The services of `make attacks`, for all rows."""
    made = Target(tmp_path_factory.mktemp("attacks"))
    try:
        yield made.start()
    finally:
        made.stop()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "tried", SMALL, ids=[f"{t.area}: {t.tried}"[:70].encode("ascii", "replace").decode() for t in SMALL]
)
def test_an_attack_ends_as_expected(tried: Attack, target: Target) -> None:
    assert tried.run(target) == tried.expected


def test_a_door_left_open_is_noticed(target: Target) -> None:
    """The table itself can fail: with a good token the same questions are answered."""
    (tried,) = (t for t in ATTACKS if t.tried == "a wrong token")
    from benchmarks.attacks.doors import on_every_route, told

    assert told(on_every_route(target, target.admin)) != tried.expected
    assert len(ATTACKS) >= 58
