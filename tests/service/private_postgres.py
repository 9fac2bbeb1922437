"""A real PostgreSQL server of one's own, for tests and benchmarks: initdb and pg_ctl in a temporary folder."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any


def find_binaries() -> Path | None:
    """The folder of initdb and pg_ctl, the newest version first."""
    for folder in sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: float(p.parent.name), reverse=True):
        if (folder / "initdb").exists():
            return folder
    found = shutil.which("initdb")
    return Path(found).resolve().parent if found else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class PrivateServer:
    """One PostgreSQL server of the test session's own, run by an unprivileged user (initdb refuses root)."""

    def __init__(self, binaries: Path) -> None:
        self.binaries = binaries
        self.folder = Path(tempfile.mkdtemp(prefix="fs-pg-", dir="/tmp"))
        self.user: dict[str, Any] = {}
        if os.geteuid() == 0:
            owner = pwd.getpwnam("postgres")
            os.chown(self.folder, owner.pw_uid, owner.pw_gid)
            self.user = {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}
        self.port = _free_port()
        self.url = f"postgresql://foreshock@/postgres?host={self.folder}&port={self.port}"

    def _call(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [str(self.binaries / program), *arguments],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, "LC_ALL": "C.UTF-8"},
            **self.user,
        )
        if done.returncode:
            log = self.folder / "log"
            raise RuntimeError(f"{program} failed: {done.stdout}\n{log.read_text() if log.exists() else ''}")

    def start(self) -> None:
        data = str(self.folder / "data")
        self._call("initdb", "-D", data, "-U", "foreshock", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8", "-N")
        self.launch()

    def launch(self) -> None:
        """Starts the server, for the first time or again after `halt`."""
        data = str(self.folder / "data")
        options = f"-k {self.folder} -p {self.port} -c listen_addresses='' -c max_connections=100"
        self._call("pg_ctl", "-D", data, "-l", str(self.folder / "log"), "-o", options, "-w", "start")

    def halt(self) -> None:
        """Stops it at once, as a crash would."""
        self._call("pg_ctl", "-D", str(self.folder / "data"), "-m", "immediate", "-w", "stop")

    def stop(self) -> None:
        try:
            self.halt()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
