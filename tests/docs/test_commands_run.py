"""What the docs tell a reader to type is typed here: each `foreshock` and `curl` line of each page, against a service.

A line may name what its page leaves to the reader (a log, a configuration, a run): `Reader` lays those out. A value
that only a reader has (`ID`, `RUN`) is filled in by `VALUES`. A line that runs for minutes, or needs what no test
machine has, stands in `ELSEWHERE` with the test that runs it; an entry that no page needs any more fails.
"""

from __future__ import annotations

import json
import math
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from foreshock.monitor import Monitor
from tests.servers import free_port, wait_for
from tests.service.diagnosis.tokens.dumps import Rows, dumped

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "README.zh-CN.md", *ROOT.glob("docs/**/*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINE = re.compile(r"^(?:\$ )?((?:\w+=\S+ )*(?:foreshock|curl) .*)$")

ELSEWHERE = {
    "foreshock dashboards push": "needs Grafana: tests/dashboards/test_push.py",
    "FORESHOCK_DATABASE_URL=postgresql": "needs a PostgreSQL named db: tests/deploy/test_by_hand.py",
    "ROLL_HOME=": "needs a ROLL checkout: tests/service/doctor",
    "foreshock launch": "needs a training job: tests/service/launch",
    "foreshock diagnose dumps --ray": "starts a Ray cluster: tests/service/diagnosis/tokens/test_ray.py",
    "foreshock serve --ray": "starts a Ray cluster: tests/service/ray",
}
VALUES = {"http://127.0.0.1:8720": "{url}", " ID": " {token_id}", " RUN": " my-project/my-run"}
TRAINER = """
import foreshock
monitor = foreshock.init(run="my-project/my-run")
monitor.log({"reward.mean": 1.0})
monitor.end_step(0)
monitor.finish("completed")
"""


def play_rows(monitor: Monitor) -> None:
    """Fourteen healthy steps of a few tokens."""
    rows = Rows(rows=4, width=10)
    for step in range(14):
        monitor.observe("mismatch", **rows.observed())
        monitor.end_step(step)


UNENDING = ("--follow", "foreshock serve")


def documented() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        text = page.read_text()
        blocks = [body for language, body in FENCE.findall(text) if language in ("sh", "bash", "shell", "console")]
        blocks += re.findall(r"(?:^    .*\n)+", FENCE.sub("", text), re.MULTILINE)
        for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
            if matched := LINE.match(line.strip()):
                found.append((str(page.relative_to(ROOT)), matched.group(1)))
    return found


def run_elsewhere(line: str) -> str | None:
    return next((start for start in ELSEWHERE if line.startswith(start)), None)


HERE = [(page, line) for page, line in documented() if not run_elsewhere(line)]


class Reader:
    """A folder with what the pages take for granted, and a service that was started with the documented line."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"http://127.0.0.1:{free_port()}"
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("FORESHOCK_")},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(folder),
            "XDG_DATA_HOME": str(folder / "data"),
            "FORESHOCK_PORT": self.url.rpartition(":")[2],
            "FORESHOCK_URL": self.url,
        }
        self._log = (folder / "serve.log").open("w")
        self._serve = subprocess.Popen(
            ["foreshock", "serve"], cwd=folder, env=self.env, stdout=self._log, stderr=self._log
        )

    def lay_out(self) -> None:
        metrics = [
            {
                "step": step,
                "reward": 0.5 + 0.01 * math.sin(step),
                "entropy": 1.0 + 0.02 * math.cos(step),
                "grad_norm": 0.5,
            }
            for step in range(40)
        ]
        (self.folder / "trainer_state.json").write_text(json.dumps({"global_step": 40, "log_history": metrics}))
        rows = "".join(json.dumps(row) + "\n" for row in metrics)
        for name in ("train.jsonl", "a.jsonl", "train.log", "live.log"):
            (self.folder / name).write_text(rows)
        (self.folder / "b.csv").write_text(
            "step,reward,entropy\n" + "".join(f"{row['step']},{row['reward']},{row['entropy']}\n" for row in metrics)
        )
        console = "".join(
            f"step:{row['step']} - actor/entropy:{row['entropy']:.4f} - critic/score/mean:{row['reward']:.4f}\n"
            for row in metrics
        )
        (self.folder / "verl.log").write_text(console)
        for place in ("runs/exp7", "runs/grpo-7b"):
            writer = EventFileWriter(str(self.folder / place))
            for row in metrics:
                value = Summary.Value(tag="critic/score/mean", simple_value=row["reward"])
                writer.add_event(
                    Event(wall_time=1e9 + row["step"], step=int(row["step"]), summary=Summary(value=[value]))
                )
            writer.close()
        events = next((self.folder / "runs/exp7").iterdir())
        shutil.copy(events, self.folder / "events.out.tfevents.1")
        for name in ("config.yaml", "rlvr.yaml"):
            shutil.copy(ROOT / "tests/service/doctor/onpolicy.yaml", self.folder / name)
        for name, source in (("run_grpo.sh", "verl_consistent.sh"), ("grpo.py", "trl_consistent.py")):
            shutil.copy(ROOT / "tests/service/doctor/hosts" / source, self.folder / name)
        (self.folder / "mine.yaml").write_text("rules: {}\n")
        for name in ("dumps", "dumps-of-last-week"):
            dumped(self.folder / name, play_rows)
        wait_for(lambda: httpx.get(f"{self.url}/readyz").status_code == 200)
        subprocess.run([sys.executable, "-c", TRAINER], cwd=self.folder, env=self.env, check=True, timeout=60)

    def fill(self, line: str) -> str:
        made = ""
        if " ID" in line:
            answer = httpx.post(f"{self.url}/v1/tokens", json={"name": "passing", "scopes": ["read"]})
            made = answer.raise_for_status().json()["id"]
        for shown, value in VALUES.items():
            line = line.replace(shown, value.format(url=self.url, token_id=made))
        return line

    def type(self, line: str) -> tuple[int, str]:
        """The exit status of a line and what it printed; an unending one gets Ctrl-C once it has said something."""
        process = subprocess.Popen(
            # A background job of a shell ignores Ctrl-C, and so would what it starts.
            ["bash", "-c", f"exec env --default-signal=INT {line}"],
            cwd=self.folder,
            env=self.env
            | ({"FORESHOCK_PORT": "0", "XDG_DATA_HOME": str(self.folder / "own")} if "serve" in line else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if any(mark in line for mark in UNENDING):
            assert process.stdout is not None
            # `--follow` has nothing to say of a healthy log before its end.
            select.select([process.stdout], [], [], 8.0)
            time.sleep(1)
            process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
        return process.returncode, said

    def leave(self) -> None:
        self._serve.terminate()
        self._serve.wait(20)
        self._log.close()


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    one = Reader(tmp_path_factory.mktemp("reader"))
    try:
        one.lay_out()
        yield one
    finally:
        one.leave()


@pytest.mark.parametrize(
    ("page", "line"), HERE, ids=[f"{page}:{line.partition('#')[0].strip()}" for page, line in HERE]
)
def test_a_documented_line_does_what_its_page_says(reader: Reader, page: str, line: str) -> None:
    status, said = reader.type(reader.fill(line))
    # `check` and `doctor` answer with 1 where they found something.
    # 130 is Ctrl-C's own status.
    judges = re.search(r"foreshock (check|doctor|diagnose)", line) is not None
    allowed = {0, 130} if any(mark in line for mark in UNENDING) else {0, 1} if judges else {0}
    assert status in allowed, f"{page}: `{line}` ended with {status}\n{said}"
    assert "Traceback" not in said


def test_what_runs_elsewhere_is_still_documented() -> None:
    used = {run_elsewhere(line) for _, line in documented()}
    assert used - {None} == set(ELSEWHERE)
