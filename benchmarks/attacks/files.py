"""What is read or obeyed on the user's side: rule packs, configurations, logs, spools, a service that lies."""

from __future__ import annotations

import io
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.attacks.target import Target, attack
from benchmarks.attacks.words import cli

MERGES = "a: &a {x: 1}\n" + "\n".join(
    f"b{i}: &b{i} {{<<: [*{'a' if i == 0 else f'b{i - 1}'}, *{'a' if i == 0 else f'b{i - 1}'}]}}" for i in range(40)
)
YAMLS = {
    "a tag that runs a program": "rules: !!python/object/apply:os.system ['touch owned']",
    "aliases that multiply": "a: &a [x]\n" + "\n".join(
        f"b{i}: &b{i} [{', '.join([f'*b{i - 1}' if i else '*a'] * 9)}]" for i in range(40)
    ),
    "merges that multiply": MERGES,
    "an alias of itself": "rules: &a [*a]",
    "100,000 brackets": "[" * 100_000,
    "the 99th month": "version: 2001-99-99",
    "a number of 6,000 digits": "version: " + "9" * 6000,
}  # fmt: skip


CHECK = """
import resource, sys
from foreshock_service.cli import main
try:
    main(["check", sys.argv[1]])
except SystemExit:
    print("PEAK", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@attack("YAML", "a rule pack by REST: tags, bombs, cycles, depth, dates", "422 for each, within 10 s, serving on")
def packs(target: Target) -> str:
    began, got = time.monotonic(), {}
    for name, text in YAMLS.items():
        body = {"run": "math/q", "pack": text}
        got[name] = target.ask("POST", "/v1/rules/replay", target.admin, json=body).status_code
    late = "" if time.monotonic() - began < 10 else f", after {time.monotonic() - began:.0f} s"
    odd = {name: status for name, status in got.items() if status != 422}
    return f"{odd or '422 for each, within 10 s'}{late}{target.alive()}"


@attack("YAML", "the same as a configuration for `doctor`", "exit 2 and one line for each")
def configurations(target: Target) -> str:
    odd = {}
    for number, (name, text) in enumerate(YAMLS.items()):
        path = target.folder / f"config-{number}.yaml"
        path.write_text(text)
        done = cli(target, "doctor", str(path))
        if done.returncode != 2 or "Traceback" in done.stderr:
            odd[name] = done.stderr[-200:]
    return "exit 2 and one line for each" if not odd and not Path("owned").exists() else str(odd)


@attack(
    "files", "3,000 hostile logs: random bytes, cut and damaged records, gzip bombs", "a report or a reason for each"
)
def logs(target: Target) -> str:
    from foreshock_service.check import readers
    from foreshock_service.check.readers.base import Notes, Unreadable

    chance = random.Random(7)
    starts = (
        b"",
        b":W&B\xe1\xbe\x00",
        b"\x18" + bytes(7),
        b"{",
        b"step:3 - ",
        b'{"log_history": [',
        b"PK\x03\x04",
        b"\x1f\x8b",
    )
    for _ in range(3000):
        data = chance.choice(starts) + chance.randbytes(chance.randrange(400))
        try:
            _, reader = readers.detect(data)
            list(reader(io.BytesIO(data), Notes()))
        except Unreadable:
            continue
        except Exception as error:
            return f"{type(error).__name__} on {data[:40]!r}"
    return "a report or a reason for each"


@attack("files", "a gzip of 512 MiB without a line end, read by `check`", "ended, below 400 MiB of memory")
def gzip_bomb(target: Target) -> str:
    import gzip

    path = target.folder / "bomb.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=9) as file:
        for _ in range(512):
            file.write(b"9" * (1 << 20))
    done = subprocess.run(
        [sys.executable, "-c", CHECK, str(path)], capture_output=True, text=True, timeout=120, check=False
    )
    peak = int((re.search(r"PEAK (\d+)", done.stdout) or [0, "99999"])[1])
    return "ended, below 400 MiB of memory" if peak < 400 else f"{peak} MiB {done.stderr[-200:]}"


@attack("files", "a spool's segment of random bytes", "counted as corrupt, no record made up")
def spool(target: Target) -> str:
    from foreshock.transport.spool import parse

    chance = random.Random(3)
    for _ in range(2000):
        records, _ = parse(chance.choice((b"", b"FSR1")) + chance.randbytes(chance.randrange(200)))
        if records:
            return f"{records}"
    return "counted as corrupt, no record made up"


@attack(
    "files", "pickle in anything that is read from a file or the network", "loaded nowhere but where it is justified"
)
def pickles(target: Target) -> str:
    root = Path(__file__).resolve().parents[2]
    loads = re.compile(
        r"pickle\.loads?\(|torch\.load\((?![^)]*weights_only=True)|marshal\.load|shelve\.|allow_pickle=True|joblib"
    )
    found = [
        f"{path.name}:{number}"
        for folder in ("collectors", "service")
        for path in (root / folder).rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if loads.search(line) and "nosec" not in line
    ]
    return "loaded nowhere but where it is justified" if not found else str(found)


SDK = """
import sys, time, foreshock
monitor = foreshock.init(run="math/sdk", capabilities=["stop", "scale_lr"], mode="auto", url=sys.argv[1], poll_s=1.0,
                         spool_dir=sys.argv[2], timeout_s=2.0)
done = []
for step in range(1, 30):
    monitor.log({"loss": 1.0})
    monitor.end_step(step)
    done += [c.kind for c in monitor.commands()]
    time.sleep(0.05)
monitor.finish("completed")
print("DONE", done)
"""


def obeyed(target: Target, **lies: object) -> str:
    """What a trainer carried out whose service's replies were changed like this."""
    import threading
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    import msgspec

    class Liar(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if "ack" in self.path:
                self.send(b'{"state":"accepted"}', 200 if lies.get("confirms") else 409, "application/json")
                return
            command = {"id": "c1", "run": "math/sdk", "attempt": 1, "actions": [{"kind": "stop"}], "reason": "x"}
            command |= {k: v for k, v in lies.items() if k in command}
            reply = {"acknowledged": 1_000_000, "attempt": 1, "mode": "auto", "commands": [command]}
            if lies.get("redirect"):
                self.send(b"", 307, "text/plain", {"Location": target.service.url + self.path})
            else:
                self.send(lies.get("body") or msgspec.msgpack.encode(reply), 200, "application/msgpack")  # type: ignore[arg-type]

        do_GET = do_POST

        def send(self, body: bytes, status: int, kind: str, more: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(more or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Liar)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    folder = target.folder / f"sdk-{server.server_port}"
    try:
        done = subprocess.run(
            [sys.executable, "-c", SDK, f"http://127.0.0.1:{server.server_port}", str(folder)],
            capture_output=True, text=True, timeout=90, check=False,
            env={**os.environ, "FORESHOCK_EXIT_FLUSH_S": "0.2"},
        )  # fmt: skip
    finally:
        server.shutdown()
        server.server_close()
    found = re.search(r"DONE (\[.*\])", done.stdout)
    return found[1] if found else done.stderr[-300:]


@attack(
    "forged replies",
    "a command for another run; another attempt; a kind not announced; none confirmed",
    "[], [], [], []",
)
def forged(target: Target) -> str:
    lies: list[dict[str, object]] = [
        {"run": "math/other", "confirms": True},
        {"attempt": 9, "confirms": True},
        {"actions": [{"kind": "rollback", "arguments": {"checkpoint": "/etc"}}], "confirms": True},
        {"confirms": False},
    ]
    return ", ".join(obeyed(target, **lie) for lie in lies)


@attack("forged replies", "the same command twenty times, confirmed each time (control: it is carried out)", "['stop']")
def repeated(target: Target) -> str:
    return obeyed(target, confirms=True)


@attack("forged replies", "a redirect elsewhere; 3 MiB of answer; garbage", "[], [], [], token not sent on")
def strange(target: Target) -> str:
    before = target.log().count("math/sdk")
    got = [obeyed(target, redirect=True), obeyed(target, body=b"\x00" * (3 << 20)), obeyed(target, body=b"\xc1garbage")]
    sent_on = target.log().count("math/sdk") > before
    return f"{', '.join(got)}, token {'sent on' if sent_on else 'not sent on'}"
