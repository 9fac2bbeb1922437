"""What words do: names, paths and reasons of clients where people, logs, mails, files and browsers meet them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import foreshock
from benchmarks.attacks.target import CANARY, SLACK_SECRET, Target, attack, until
from foreshock.frames.identity import run_name

EVIL = "<script>alert(1)</script>"
ESCAPE = "\x1b]0;owned\x07\x1b[2J\u202egpj.exe"
TELLS = """
import json, sys, foreshock
monitor = foreshock.init(run="math/secret", config=json.loads(sys.argv[1]))
monitor.log({"loss": 1.0})
monitor.end_step(1)
monitor.finish("completed")
"""
BAD_NAMES = (
    "math/q\n",
    "math/q\r\nSet-Cookie: a=b",
    "../../etc",
    "math/..",
    "./x",
    "math/<b>",
    "math/a b",
    "a/b/c",
    "=cmd/x",
)


def cli(target: Target, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`foreshock …` against the service."""
    told = {"FORESHOCK_URL": target.service.url, "FORESHOCK_TOKEN": target.admin, "COLUMNS": "200", **environment}
    command = [sys.executable, "-m", "foreshock_service.cli", *arguments]
    return subprocess.run(command, env={**os.environ, **told}, capture_output=True, text=True, check=False, timeout=60)


@attack(
    "names", "runs with line ends, dots alone, markup, blanks, `=cmd`", "400 or 422 for each; SDK: ValueError for each"
)
def bad_names(target: Target) -> str:
    statuses = {target.ask("POST", "/v1/ingest", target.admin, json=target.envelope(n)).status_code for n in BAD_NAMES}
    refused = 0
    for name in BAD_NAMES:
        try:
            run_name(name)
        except ValueError:
            refused += 1
    service = "400 or 422 for each" if statuses <= {400, 422} else str(statuses)
    return f"{service}; SDK: {'ValueError for each' if refused == len(BAD_NAMES) else f'{refused} refused'}"


@attack("names", "signals, roles, launches, clients and kinds with a line end", "400 for each")
def line_ends(target: Target) -> str:
    frame = {"step": 2, "rank": 0, "sealed_s": 1.0}
    tried: list[dict[str, Any]] = [
        {"client": "c" * 32 + "\n"},
        {"launch": "l\n"},
        {"role": "trainer\n"},
        {"frames": [{**frame, "sequence": 1, "role": "trainer", "scalars": {"loss\n": 1.0}}]},
        {"frames": [{**frame, "sequence": 1, "role": "trainer", "missing": {"loss": "why\n"}}]},
        {"notices": [{"sequence": 1, "kind": "note\n", "sealed_s": 1.0}]},
    ]
    got = {
        target.ask("POST", "/v1/ingest", target.admin, json=target.envelope("math/q", **said)).status_code
        for said in tried
    }
    return "400 for each" if got == {400} else str(got)


@attack("paths", "static files and runs by `..`, encoded and not", "401, 403 or 404 for each")
def traversal(target: Target) -> str:
    tried = ("/static/../settings.py", "/static/..%2f..%2fsettings.py", "/static/%2e%2e/x", "/static//etc/passwd",
             "/static/....//x", "/runs/..%2f..%2fetc/passwd", "/v1/runs/%2e%2e/%2e%2e", "/static/x%00.js")  # fmt: skip
    import http.client

    got = set()
    for path in tried:
        wire = http.client.HTTPConnection("127.0.0.1", target.service.port, timeout=10)
        wire.request("GET", path, headers={"Authorization": f"Bearer {target.admin}"})
        answer = wire.getresponse()
        got.add(answer.status if b"class Settings" not in answer.read() else 200)
        wire.close()
    return "401, 403 or 404 for each" if got <= {401, 403, 404, 422} else str(got)


@attack("paths", "a checkpoint's path with a line end; one that climbs", "not registered; kept as text")
def checkpoint_paths(target: Target) -> str:
    for step, path in ((1, "/ckpt/1\nrm -rf /"), (2, "../../../etc/passwd")):
        envelope = target.envelope("math/q")
        data = {"path": path, "step": step}
        notice = {"sequence": envelope["sequence"], "kind": "checkpoint", "sealed_s": 1.0, "step": step, "data": data}
        target.ask("POST", "/v1/ingest", target.admin, json={**envelope, "notices": [notice]})
    rows = target.ask("GET", "/v1/runs/math/q/checkpoints", target.admin).json()["checkpoints"]
    paths = [row["path"] for row in rows]
    first = "registered" if any("rm" in path for path in paths) else "not registered"
    return f"{first}; {'kept as text' if '../../../etc/passwd' in paths else paths}"


@attack("paths", "a token dump of run `../../x`; a spool in somebody else's folder", "ValueError; nothing adopted")
def local_paths(target: Target) -> str:
    try:
        foreshock.init(run="../../x", url="http://127.0.0.1:1", dump_dir=str(target.folder / "dumps"))
        first = "written"
    except ValueError:
        first = "ValueError"
    from foreshock.transport.adopt import adopt

    real, link = target.folder / "theirs", target.folder / "spool-link"
    (real / ("e" * 32)).mkdir(parents=True)
    (real / ("e" * 32) / "lock").touch()
    header = '{"client":"%s","run":"math/q","launch":"l","role":"trainer","rank":0,"url":"u"}' % ("e" * 32)
    (real / ("e" * 32) / "header.json").write_text(header)
    link.symlink_to(real)
    adopted = list(adopt(link, "math/q", "u", 1 << 20, 1e9))
    return f"{first}; {'nothing adopted' if not adopted else 'adopted'}"


@attack(
    "terminals",
    "escape sequences and reversed text in labels and reasons, listed by the CLI",
    "written out, not acted on",
)
def terminal(target: Target) -> str:
    target.ask("PATCH", "/v1/runs/math/q", target.admin, json={"labels": {"team": ESCAPE}})
    command = target.command()
    target.ask("POST", f"/v1/commands/{command}/reject", target.admin, json={"reason": ESCAPE})
    envelope = target.envelope("math/q")
    notice = {"sequence": envelope["sequence"], "kind": "checkpoint", "sealed_s": 1.0, "step": 3}
    path = {"path": "/c/\u202e\x9b2J", "step": 3}
    target.ask("POST", "/v1/ingest", target.admin, json={**envelope, "notices": [{**notice, "data": path}]})
    told = "".join(cli(target, *words).stdout for words in (["runs", "show", "math/q"], ["commands", "list", "math/q"]))
    alive = re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", told)
    return "written out, not acted on" if alive is None and "math/q" in told else f"{alive}: {told[:200]!r}"


@attack("terminals", "the same in a log that `check` reads and a file that `doctor` reads", "written out, not acted on")
def terminal_files(target: Target) -> str:
    log, config = target.folder / "hostile.jsonl", target.folder / "hostile.yaml"
    rows = [f'{{"step": {i}, "reward": 0.5, "\\u001b[2Jx": 1, "entropy": {1.0 - i / 100}}}' for i in range(40)]
    log.write_text("\n".join(rows))
    escaped = '"\\e]0;owned\\a\\e[2J"'
    config.write_text(
        f"actor_train: {{model_args: {escaped}}}\nactor_infer: {{strategy_args: {escaped}, x: {escaped}}}\n"
    )
    told = "".join(r.stdout + r.stderr for r in (cli(target, "check", str(log)), cli(target, "doctor", str(config))))
    alive = re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", told)
    return "written out, not acted on" if alive is None and len(told) > 100 else f"{alive}: {told[:300]!r}"


@attack("logs", "a path, a token's name and a notice that try to write a line of the log", "no forged line")
def log_lines(target: Target) -> str:
    forged = "2026-01-01 00:00:00,000 INFO foreshock: forged"
    target.ask("GET", "/v1/runs/%0a" + forged.replace(" ", "%20").replace(",", "%2c"), target.admin)
    envelope = target.envelope("math/q")
    notice = {"sequence": envelope["sequence"], "kind": "checkpoint", "sealed_s": 1.0, "step": 4}
    data = {"path": f"x\n{forged}", "step": 4}
    target.ask("POST", "/v1/ingest", target.admin, json={**envelope, "notices": [{**notice, "data": data}]})
    text = target.log()
    lines = [line for line in text.splitlines() if line.startswith(forged[:20])]
    acts = re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text)
    return "no forged line" if not lines and acts is None else f"{lines} {acts}"


@attack("pages", "markup in labels, reasons and paths on the fleet's and the run's page", "escaped, no script of it")
def markup(target: Target) -> str:
    target.ask("PATCH", "/v1/runs/math/q", target.admin, json={"labels": {"team": EVIL}})
    body = {"actions": [{"kind": "scale_lr", "arguments": {"factor": 0.5}}], "reason": EVIL}
    target.command()
    target.ask("POST", "/v1/runs/math/q/commands", target.admin, json=body)
    pages = [target.page(path) for path in ("/", "/runs/math/q", f"/?q={EVIL}")]
    if any(EVIL in page for page in pages):
        return "a script"
    return "escaped, no script of it" if all("&lt;script&gt;" in page for page in pages[:2]) else "not shown"


@attack("exports", "`=cmd` in a name that a spreadsheet would run", "no export in CSV exists")
def formulas(target: Target) -> str:
    document = target.ask("GET", "/v1/openapi.json", target.admin).text
    writes = [
        path.name
        for path in Path(foreshock.__file__).parents[2].glob("service/**/*.py")
        if re.search(r"csv\.(writer|DictWriter)|to_csv|text/csv", path.read_text())
    ]
    return "no export in CSV exists" if "text/csv" not in document and not writes else f"{writes}"


@attack("templates", "`{{7*7}}`, `{% … %}` and `%(x)s` in a reason, on the page and in the webhook", "as they came")
def templates(target: Target) -> str:
    text = "{{7*7}} {% include '/etc/passwd' %} %(x)s ${7*7}"
    target.command()
    body = {"actions": [{"kind": "scale_lr", "arguments": {"factor": 0.25}}], "reason": text}
    target.ask("POST", "/v1/runs/math/q/commands", target.admin, json=body)
    page = target.page("/") + target.page("/runs/math/q")
    until(lambda: any(b"7*7" in body for _, _, body in target.sink.got))
    sent = next(body.decode() for _, _, body in target.sink.got if b"7*7" in body)
    whole = {"page": "{{7*7}}" in page, "webhook": "{{7*7}}" in sent, "no file": "root:x" not in page + sent}
    return "as they came" if all(whole.values()) else str(whole)


@attack("outgoing", "a receiver that redirects to the metadata address", "not followed; the delivery is dead")
def redirect(target: Target) -> str:
    target.command()
    until(lambda: any(path.endswith(CANARY) for path, _, _ in target.sink.got))
    rows = until(lambda: _dead(target, target.service.url, target.admin, "webhook"))
    followed = any("meta-data" in path for path, _, _ in target.sink.got)
    return f"{'followed' if followed else 'not followed'}; the delivery is {rows[0]['state']}"


@attack(
    "outgoing",
    "a webhook configured to the metadata address",
    "never connected; dead: a link-local or metadata address",
)
def metadata(target: Target) -> str:
    def ask(method: str, path: str, body: Any = None) -> Any:
        return target.ask(method, path, target.narrow_admin, base=target.narrow.url, json=body)

    envelope = target.envelope("math/n")
    told = {"mode": "approve", "capabilities": ["scale_lr"], "config": {}}
    notice = {"sequence": envelope["sequence"], "kind": "started", "sealed_s": 1.0, "data": told}
    until(lambda: ask("POST", "/v1/ingest", {**envelope, "notices": [notice]}).status_code == 200)
    body = {"actions": [{"kind": "scale_lr", "arguments": {"factor": 0.5}}], "reason": "x"}
    until(lambda: ask("POST", "/v1/runs/math/n/commands", body).status_code == 201)
    rows = until(lambda: _dead(target, target.narrow.url, target.narrow_admin, "webhook"))
    why = "a link-local or metadata address" if "link-local or metadata" in str(rows[0]) else str(rows[0])
    return f"never connected; {rows[0]['state']}: {why}"


def _dead(target: Target, base: str, token: str, channel: str) -> list[dict[str, Any]]:
    answer = target.ask("GET", "/v1/deliveries?state=dead", token, base=base)
    return [row for row in answer.json().get("deliveries", []) if row["channel"] == channel]


@attack("outgoing", "a webhook's body, changed on its way or sent again", "signature wrong; same delivery id")
def replayed_webhook(target: Target) -> str:
    from foreshock_service.alerts.webhook import DELIVERY_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER, signature

    target.command()
    _, headers, body = until(lambda: next((g for g in target.sink.got if g[0].endswith(CANARY)), None))
    parts = headers[TIMESTAMP_HEADER], headers[DELIVERY_HEADER]
    good = headers[SIGNATURE_HEADER] == signature(CANARY, *parts, body)
    bad = headers[SIGNATURE_HEADER] == signature(CANARY, *parts, body + b" ")
    later = headers[SIGNATURE_HEADER] == signature(CANARY, str(int(parts[0]) + 1), parts[1], body)
    same = parts[1].encode() in body
    return (
        f"signature {'wrong' if good and not bad and not later else 'good'}; {'same' if same else 'other'} delivery id"
    )


@attack("secrets", "keys in a configuration that the SDK sends", "none in what was stored, none on the page")
def config_secrets(target: Target) -> str:
    keys = {"wandb_api_key": "w" * 40, "hub": {"hf_token": "hf_" + "A" * 30}, "db": "postgresql://u:hunter2@db/x",
            "argv": ["--openai-api-key", "sk-" + "B" * 30], "env": "AWS_SECRET_ACCESS_KEY=" + "C" * 40,
            "passwords": ["hunter2"], "note": "key: xoxb-1234567890-abcdef"}  # fmt: skip
    environment = {**os.environ, "FORESHOCK_URL": target.service.url, "FORESHOCK_TOKEN": target.admin}
    environment["FORESHOCK_SPOOL_DIR"] = str(target.folder / "spool")
    subprocess.run([sys.executable, "-c", TELLS, json.dumps(keys)], env=environment, check=True, timeout=60)
    run = until(lambda: target.ask("GET", "/v1/runs/math/secret", target.admin).json().get("config"))
    stored = (target.folder / "wide" / "foreshock.db").read_bytes()
    stored += (target.folder / "wide" / "foreshock.db-wal").read_bytes()
    page = target.page("/runs/math/secret")
    leaked = [s for s in ("w" * 40, "A" * 30, "hunter2", "B" * 30, "C" * 40, "xoxb-1234567890") if s in f"{run}{page}"]
    kept = [s for s in ("w" * 40, "A" * 30, "hunter2", "B" * 30, "C" * 40, "xoxb-1234567890") if s.encode() in stored]
    return "none in what was stored, none on the page" if not leaked + kept else f"{leaked} {kept}"


@attack("secrets", "the same by a client of one's own, as plain JSON", "none stored")
def config_secrets_by_hand(target: Target) -> str:
    target.begin("math/hand", data={"config": {"api_key": "K" * 40, "x": {"password": "P" * 30}}})
    stored = (target.folder / "wide" / "foreshock.db").read_bytes()
    stored += (target.folder / "wide" / "foreshock.db-wal").read_bytes()
    return "none stored" if b"K" * 40 not in stored and b"P" * 30 not in stored else "stored"


@attack("secrets", "tokens, webhook and Slack secrets in logs, /metrics, errors and every answer", "in none")
def nowhere(target: Target) -> str:
    target.ask("GET", f"/v1/runs?token={CANARY}", CANARY)
    target.ask("POST", "/v1/ingest", target.admin, content=b"{", headers={"Content-Type": "application/json"})
    answers = "".join(
        target.ask("GET", path, target.admin).text
        for path in ("/metrics", "/v1/deliveries", "/v1/tokens", "/v1/nothing", "/v1/openapi.json", "/", "/readyz")
    )
    found = [s for s in (CANARY, SLACK_SECRET, "xoxb-0123456789", target.admin) if s in answers + target.log()]
    return "in none" if not found else f"found {[s[:8] for s in found]}"
