"""Who a process is, found from what launchers set."""

from __future__ import annotations

import pytest

from foreshock.frames.identity import discover, launch_id, run_name


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"FORESHOCK_LAUNCH": "mine", "SLURM_JOB_ID": "7"}, "mine"),
        ({"TORCHELASTIC_RUN_ID": "abc", "TORCHELASTIC_RESTART_COUNT": "2"}, "torchelastic-abc-2"),
        ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "1"}, "slurm-17-1"),
        ({"SLURM_JOB_ID": "17"}, "slurm-17-0"),
        ({"RAY_JOB_ID": "02000000"}, "ray-02000000"),
        ({"RAY_JOB_ID": "ffffffff", "SLURM_JOB_ID": "17"}, "slurm-17-0"),
    ],
)
def test_the_launch_is_the_launchers_and_new_at_each_restart(environment: dict[str, str], expected: str) -> None:
    assert launch_id(None, environment) == expected


def test_without_a_launcher_each_process_is_its_own_launch() -> None:
    assert launch_id(None, {}) != launch_id(None, {})


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({"RANK": "3", "WORLD_SIZE": "8"}, (3, 8)),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, (1, 2)),
        ({"RANK": "x", "WORLD_SIZE": "8"}, (0, 1)),
        ({"RANK": "9", "WORLD_SIZE": "8"}, (0, 1)),
        ({}, (0, 1)),
    ],
)
def test_rank_and_world_come_from_the_environment(environment: dict[str, str], place: tuple[int, int]) -> None:
    found = discover("lab/x", launch="one", environment=environment)
    assert (found.rank, found.world) == place


def test_arguments_win_and_a_run_without_a_project_gets_one() -> None:
    found = discover("x", project="math", role="driver", rank=1, world=4, launch="one", environment={"RANK": "0"})
    assert (found.run, found.role, found.rank, found.world) == ("math/x", "driver", 1, 4)
    assert run_name("a/b") == "a/b"


@pytest.mark.parametrize("name", ["", "/", "a/", "/b", "a/b/c", "sp ace", "x" * 129, "a/" + "x" * 129, "täst"])
def test_a_malformed_run_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match="run must be"):
        run_name(name)
