"""The launcher with real processes: exit codes, signals, crashes, hand-overs, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

JOB = str(Path(__file__).with_name("job.py"))
LAUNCH = [sys.executable, "-m", "foreshock_service.cli", "launch"]


def started(*job: str, options: tuple[str, ...] = (), **environment: str) -> subprocess.Popen[str]:
    given = {k: v for k, v in os.environ.items() if not k.startswith("FORESHOCK_")} | environment
    fast = ("--resume-arg", "--from={checkpoint}", "--backoff-s", "0.05", "--grace-s", "1", *options)
    return subprocess.Popen(
        [*LAUNCH, *fast, "--", sys.executable, JOB, *job], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=given,
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> tuple[int, list[dict[str, Any]], str]:
    out, err = process.communicate(timeout=90)
    return process.returncode, [json.loads(line) for line in out.splitlines()], err


def first_line(process: subprocess.Popen[str], key: str) -> Any:
    assert process.stdout is not None
    for line in process.stdout:
        said = json.loads(line)
        if key in said:
            return said[key]
    raise AssertionError("the job never said it")


@pytest.mark.parametrize("code", [0, 5])
def test_the_exit_code_is_the_job_s_and_its_output_is_untouched(code: int) -> None:
    returned, said, err = ended(started("exit", str(code), options=("--max-restarts", "0")))
    assert returned == code
    assert [one["argv"] for one in said] == [["exit", str(code)]]
    assert said[0]["LAUNCHER_KINDS"] == "rollback,stop"
    assert said[0]["resumed"] is False
    assert ("no restart is left" in err) == bool(code)


def test_a_death_by_signal_is_passed_on_as_the_shell_does() -> None:
    assert ended(started("kill", options=("--max-restarts", "0")))[0] == 128 + signal.SIGKILL


def test_a_command_that_cannot_be_started_is_127() -> None:
    done = subprocess.run([*LAUNCH, "--", "/no/such/program"], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 127
    assert "cannot start" in done.stderr


def test_a_crash_starts_it_again_at_the_newest_checkpoint_that_is_there(tmp_path: Path) -> None:
    checkpoint = tmp_path / "step-4"
    checkpoint.mkdir()
    code, said, _ = ended(started("crash-until", "2", str(checkpoint)))
    assert code == 0
    assert [one["RESTARTS"] for one in said] == ["0", "1", "2"]
    assert said[1]["argv"] == ["crash-until", "2", str(checkpoint), f"--from={checkpoint}"]
    assert (said[1]["RESUME_FROM"], said[1]["RESUME_STEP"], said[1]["COMPLETES"]) == (str(checkpoint), "4", None)
    assert len({one["LAUNCH"] for one in said}) == 3, "each start is a launch, hence an attempt, of its own"


def test_without_a_checkpoint_it_starts_again_as_it_was(tmp_path: Path) -> None:
    code, said, _ = ended(started("crash-until", "1", str(tmp_path / "gone")))
    assert code == 0
    assert [one["argv"] for one in said] == [["crash-until", "1", str(tmp_path / "gone")]] * 2


def test_the_budget_bounds_the_restarts() -> None:
    code, said, err = ended(started("crash-until", "9", options=("--max-restarts", "2")))
    assert (code, len(said)) == (3, 3)
    assert "no restart is left" in err


def test_a_rollback_stops_the_job_and_starts_it_at_the_checkpoint_past_the_offending_steps(tmp_path: Path) -> None:
    checkpoint = tmp_path / "c"
    checkpoint.mkdir()
    code, said, err = ended(started("rollback", str(checkpoint), "40", "47"))
    assert code == 0
    assert said[1] == {"answer": "handed_over", "detail": {}}
    again = said[2]
    assert again["argv"][-1] == f"--from={checkpoint}"
    assert (again["RESUME_STEP"], again["SKIP_STEPS"], again["RESTARTS"]) == ("40", "7", "1")
    completed = json.loads(again["COMPLETES"])
    assert (completed["id"], completed["attempt"], completed["detail"]["by"]) == ("c1", 3, "foreshock launch")
    assert "starting again" in err


@pytest.mark.parametrize(
    ("options", "make", "why"),
    [((), False, "there is no checkpoint"), (("--max-restarts", "0"), True, "restarts are spent")],
)
def test_a_rollback_that_cannot_be_done_is_refused_and_the_job_goes_on(
    options: tuple[str, ...], make: bool, why: str, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "c"
    if make:
        checkpoint.mkdir()
    code, said, _ = ended(started("rollback", str(checkpoint), "4", "5", options=options))
    assert code == 0
    assert said[1]["answer"] == "refused"
    assert why in said[1]["detail"]["text"]
    assert len(said) == 2


def test_a_stop_ends_the_job_for_good_with_0() -> None:
    code, said, _ = ended(started("stop"))
    assert code == 0
    assert len(said) == 2


@pytest.mark.parametrize(("how", "code"), [("polite", 7), ("plain", 128 + signal.SIGTERM)])
def test_signals_go_to_the_job_and_its_answer_is_the_exit_code(how: str, code: int) -> None:
    process = started("sleep", how)
    first_line(process, "ready")
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == code


def test_a_job_that_does_not_listen_is_killed_after_the_grace(tmp_path: Path) -> None:
    # By a rollback, since what a person's signal does is the job's own affair.
    script = tmp_path / "deaf.py"
    script.write_text(
        "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"sys.argv = ['job', 'rollback', {str(tmp_path)!r}, '1', '2', *sys.argv[1:]]\n"
        f"exec(open({JOB!r}).read())\n"
    )
    began = time.monotonic()
    done = subprocess.run(
        [*LAUNCH, "--resume-arg", "--from={checkpoint}", "--grace-s", "1", "--", sys.executable, str(script)],
        capture_output=True, text=True, check=False, timeout=90,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began > 1.0
    assert [json.loads(line).get("RESTARTS") for line in done.stdout.splitlines()] == ["0", None, "1"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="adopting orphans is Linux's")
def test_nothing_of_the_job_is_left_when_it_starts_again(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    process = started("orphan", str(told), options=("--backoff-s", "1.5"))
    orphan = first_line(process, "orphan")
    told.write_text(str(orphan))
    code, said, _ = ended(process)
    assert code == 0
    assert {"orphan_lives": False} in said


def test_a_service_that_is_down_changes_nothing() -> None:
    code, said, _ = ended(started("crash-until", "1", FORESHOCK_URL="http://127.0.0.1:9"))
    assert (code, len(said)) == (0, 2)


def test_a_launcher_that_has_gone_leaves_the_job_as_it_is() -> None:
    from foreshock.control.command import Command
    from foreshock.control.supervised import Launcher
    from foreshock.wire import Action
    from foreshock.wire import commands as wire

    launcher = Launcher("/tmp/no-such-socket", frozenset({"rollback"}), True)
    command = Command(wire.Command(id="c", run="a/b", attempt=1, actions=[Action(kind="rollback")]), 0, 1)
    launcher.carry_out(command)
    assert (command.state, launcher.leaving) == ("refused", "")
    launcher.tell(checkpoint="/x", step=1)
    assert threading.active_count() >= 1
