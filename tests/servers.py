"""Real servers for tests, each private to the test: Prometheus and Alertmanager as Debian packages them.

Where a binary is missing the test skips and says so; in CI (`CI` set) it fails.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest


def find_binary(name: str, package: str) -> str:
    """The path of a program; skips the test where it is not installed, and fails it in CI."""
    found = shutil.which(name)
    if found is None:
        reason = f"{name} is not installed (Debian: apt-get install {package})"
        if os.environ.get("CI"):
            pytest.fail(f"needed in CI: {reason}")
        pytest.skip(reason)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    """What `condition` returns once it is true; a refused connection counts as not yet."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            found = condition()
        except httpx.TransportError:
            found = None
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError("it did not happen in time")


class Server:
    """One process with an HTTP port, ended by its own handle. `path` answers 200 when it is ready."""

    def __init__(self, command: Sequence[str], port: int, folder: Path, ready: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._log = folder / f"{Path(command[0]).name}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_for(lambda: self._alive() and httpx.get(self.url + ready, trust_env=False).status_code == 200)
        except BaseException:
            self.stop()
            raise

    def _alive(self) -> bool:
        if self._process.poll() is not None:
            raise RuntimeError(f"ended with {self._process.returncode}: {self._log.read_text()[-2000:]}")
        return True

    def get(self, path: str, **params: Any) -> Any:
        """The decoded answer of a GET."""
        answer = httpx.get(self.url + path, params=params, trust_env=False)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def alertmanager(folder: Path, config: Path) -> Server:
    """A private Alertmanager, without its cluster port."""
    program = find_binary("prometheus-alertmanager", "prometheus-alertmanager")
    port = free_port()
    command = [program, f"--config.file={config}", f"--storage.path={folder / 'am'}", "--cluster.listen-address="]
    return Server([*command, f"--web.listen-address=127.0.0.1:{port}"], port, folder, "/-/ready")


def prometheus(folder: Path, config: Path) -> Server:
    """A private Prometheus."""
    program = find_binary("prometheus", "prometheus")
    port = free_port()
    command = [program, f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    return Server([*command, f"--web.listen-address=127.0.0.1:{port}"], port, folder, "/-/ready")
