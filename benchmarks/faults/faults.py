"""The faults, each one trial: sets the stage, breaks something, lets the run end, says what came of it."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults import proxy as ways
from benchmarks.faults.count import Count, Ledger
from benchmarks.faults.proxy import Exchange, Proxy
from benchmarks.faults.stage import Stage
from foreshock_service.demo.processes import Service, free_port
from foreshock_service.store.flags import Flag

YEAR_S = 31_536_000
BOTH = ("sqlite", "postgresql")


@dataclass
class Trial:
    """What one trial came to. `wall`, `cpu`: by how much the run was slowed, as a share of its undisturbed twin."""

    count: Count
    wrong: list[str]
    wall: float | None = None
    cpu: float | None = None


class NotPossibleError(RuntimeError):
    """This machine cannot make the fault; the message says what it lacks."""


@dataclass(frozen=True)
class Fault:
    """A fault, the databases it is tried on, and the one reason under which losses must be counted (None: no loss)."""

    name: str
    sentence: str
    trial: Callable[[Stage, bool], Trial]
    databases: tuple[str, ...] = ("sqlite",)
    reason: str | None = None


def service_killed(stage: Stage, small: bool) -> Trial:
    """SIGKILL of the service in the middle of the run, restarted 10 s later (small: a light loop, 2 s)."""
    calm: Service | None = None
    steps, outage_s = (80, 2.0) if small else (160, 10.0)
    try:
        if small:
            struck = stage.train(steps=steps, pace=0.1)
        else:
            calm = Service(Path(stage.spool).parent, free_port())
            calm.start()
            twin = stage.train(calm.url, spool=f"{stage.spool}-twin", job="lab", steps=steps)
            struck = stage.train(job="lab", steps=steps)
        struck.until_step(10)
        stage.service.kill()
        time.sleep(outage_s)
        stage.service.start()
        struck.wait()
        if calm is None:
            return Trial(*stage.conclude())
        stage.forget(twin)
        wrong = [text for text in (twin.wait(),) if text]
        wall, cpu = (_slower(struck.ledger, twin.ledger, clock) for clock in ("wall_s", "cpu_s"))
        found, more = stage.conclude()
        return Trial(found, wrong + more, wall, cpu)
    finally:
        if calm is not None:
            calm.stop()


def service_stopped(stage: Stage, small: bool) -> Trial:
    """SIGSTOP: connections stay open and nobody answers; then SIGCONT, and late requests are carried out after all."""
    trainer = stage.train(steps=40, pace=0.1)
    trainer.until_step(8)
    assert stage.service.process is not None
    stage.service.process.send_signal(signal.SIGSTOP)
    time.sleep(3.0)
    stage.service.process.send_signal(signal.SIGCONT)
    return Trial(*stage.conclude())


def postgresql_restarted(stage: Stage, small: bool) -> Trial:
    """PostgreSQL stopped at once (as by a crash), started again 3 s later; the service stays up."""
    assert stage.postgres is not None
    trainer = stage.train(steps=60, pace=0.1)
    trainer.until_step(10)
    stage.postgres.halt()
    time.sleep(3.0)
    stage.postgres.launch()
    return Trial(*stage.conclude())


def disk_full(stage: Stage, small: bool) -> Trial:
    """The service is away and the spool's disk, 256 KiB in a mount namespace of its own, fills up."""
    script = 'mkdir -p "$FORESHOCK_SPOOL_DIR" && mount -t tmpfs -o size=256k,mode=700 none "$FORESHOCK_SPOOL_DIR"'
    within = ["unshare", "-m", "sh", "-c", f'{script} && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        raise NotPossibleError("mount namespaces (unshare -m) need root")
    return _away(stage, {"within": within, "padding": 300, "environment": {"FORESHOCK_QUEUE_ITEMS": "20"}}, 140)


def spool_unwritable(stage: Stage, small: bool) -> Trial:
    """The service is away and the spool's folder is a file."""
    blocked = Path(stage.spool).parent / "blocked"
    blocked.write_text("no folder")
    return _away(stage, {"spool": str(blocked), "environment": {"FORESHOCK_QUEUE_ITEMS": "20"}}, 60)


def wrong_token(stage: Stage, small: bool) -> Trial:
    """Every envelope is answered with 401; the successor has the right token."""
    stage.train(steps=30, environment={"FORESHOCK_TOKEN": "fsk_wrong", "FORESHOCK_FINISH_S": "1"}).wait()
    return Trial(*stage.conclude())


def service_hangs(stage: Stage, small: bool) -> Trial:
    """Nothing is ever answered; the successor finds the service well."""
    return _throughout(stage, ways.hang)


def service_answers_garbage(stage: Stage, small: bool) -> Trial:
    """Noise, wrong lengths, redirects, other protocols; the successor finds the service well."""
    return _throughout(stage, ways.garbage)


def connection_cut(stage: Stage, small: bool) -> Trial:
    """Four of five connections break: before, inside or after the request, or inside the answer."""
    return _through(stage, ways.cut)


def connection_slow(stage: Stage, small: bool) -> Trial:
    """Requests and answers are held for up to a second each; the client waits one in all."""
    return _through(stage, ways.delay)


def deliveries_repeated(stage: Stage, small: bool) -> Trial:
    """Each request arrives twice, an older one again behind it; each answer arrives twice."""
    return _through(stage, ways.repeat)


def client_killed(stage: Stage, small: bool) -> Trial:
    """SIGKILL of the trainer inside a step, while the service is away; a successor adopts its spool."""
    door = Proxy(stage.service.port, ways.away)
    try:
        trainer = stage.train(door.url, steps=1000, pace=0.4)
        trainer.until_step(8)
        time.sleep(0.2)  # in the middle of the next step
        trainer.kill()
        door.mode = ways.well
        return Trial(*stage.conclude(door.url))
    finally:
        door.close()


def spool_corrupt(stage: Stage, small: bool) -> Trial:
    """One bit of the spool flips between the client's end and its successor: one record is lost, and counted."""
    door = Proxy(stage.service.port, ways.away)
    try:
        stage.train(door.url, steps=40, environment={"FORESHOCK_FINISH_S": "0.5"}).wait()
        segment = max(Path(stage.spool).glob("*/*.seg"), key=lambda path: path.stat().st_size)
        data = bytearray(segment.read_bytes())
        data[data.index(b"padding_", len(data) // 2)] ^= 1
        segment.write_bytes(bytes(data))
        door.mode = ways.well
        return Trial(*stage.conclude(door.url))
    finally:
        door.close()


def clock_elsewhere(stage: Stage, small: bool) -> Trial:
    """The trainer's boot clock is a year ahead (a time namespace): event times must not notice."""
    within = ["unshare", "-T", "--boottime", str(YEAR_S), "--monotonic", str(YEAR_S), "--fork"]
    if shutil.which("unshare") is None or subprocess.run([*within, "true"], check=False).returncode:
        raise NotPossibleError("time namespaces (unshare -T) need root and Linux 5.6")
    stage.train(steps=30, within=within).wait()
    found, wrong = stage.conclude()
    apart = stage.events_apart()
    return Trial(found, wrong + ([f"event times {apart:.0f} s from receipt"] if apart > 30 else []))


def clock_jumps(stage: Stage, small: bool) -> Trial:
    """The boot clock jumps a year ahead, in another run a week back, while sealed frames wait: stored, flagged."""
    wrong: list[str] = []
    found = Count()
    for jump in (YEAR_S, -604_800):
        stage.begin("clock_jumps")
        trial = _away(stage, {"jump": jump}, 30)
        apart, flagged = stage.events_apart(), stage.flagged(Flag.ABSURD_CLOCK)
        wrong += trial.wrong + ([f"event times {apart:.0f} s from receipt"] if apart > 60 else [])
        wrong += [] if flagged else [f"no absurd clock was flagged after a jump of {jump} s"]
        found += trial.count
    return Trial(found, wrong)


FAULTS = (
    Fault("service_killed", "service killed, back 10 s later", service_killed, BOTH),
    Fault("service_stopped", "service stopped for 3 s", service_stopped, BOTH),
    Fault("postgresql_restarted", "PostgreSQL crashed, back 3 s later", postgresql_restarted, ("postgresql",)),
    Fault("connection_cut", "connections cut anywhere", connection_cut, BOTH),
    Fault("connection_slow", "requests and answers late", connection_slow, BOTH),
    Fault("deliveries_repeated", "deliveries repeated and reordered", deliveries_repeated, BOTH),
    Fault("service_hangs", "service hangs", service_hangs),
    Fault("service_answers_garbage", "service answers garbage", service_answers_garbage),
    Fault("wrong_token", "wrong token", wrong_token),
    Fault("client_killed", "trainer killed, spool adopted", client_killed),
    Fault("disk_full", "disk full under the spool", disk_full, reason="disk_full"),
    Fault("spool_unwritable", "spool unwritable", spool_unwritable, reason="spool_unwritable"),
    Fault("spool_corrupt", "a bit of the spool flips", spool_corrupt, reason="corrupt"),
    Fault("clock_elsewhere", "clock a year ahead", clock_elsewhere),
    Fault("clock_jumps", "clock jumps during an outage", clock_jumps),
)


def _away(stage: Stage, options: dict[str, Any], steps: int) -> Trial:
    """The service answers 503 for all but the last ten of `steps` steps, then is back while the trainer still runs."""
    door = Proxy(stage.service.port, ways.away)
    try:
        trainer = stage.train(door.url, steps=steps, pace=0.03, **options)
        trainer.until_step(steps - 10)
        door.mode = ways.well
        return Trial(*stage.conclude(door.url))
    finally:
        door.close()


def _throughout(stage: Stage, mode: Callable[[Exchange], None]) -> Trial:
    """`mode` until the trainer has ended; then all is well."""
    door = Proxy(stage.service.port, mode)
    try:
        trainer = stage.train(door.url, steps=30, environment={"FORESHOCK_FINISH_S": "1"})
        trainer.wait()
        door.mode = ways.well
        found, wrong = stage.conclude(door.url)
        return Trial(found, wrong + ([] if door.did[mode.__name__] else ["the fault never struck"]))
    finally:
        door.close()


def _through(stage: Stage, mode: Callable[[Exchange], None]) -> Trial:
    """`mode` for the whole run and its successors."""
    door = Proxy(stage.service.port, mode)
    try:
        stage.train(door.url, steps=60, environment={"FORESHOCK_FINISH_S": "5"}).wait()
        if stage.spooled():
            door.mode = ways.well
        return Trial(*stage.conclude(door.url))
    finally:
        door.close()


def _slower(struck: Ledger, twin: Ledger, clock: str) -> float:
    """By how much the struck run's steps took longer than the twin's, from the third sealed step to the last."""

    def spent(ledger: Ledger) -> float:
        return float(ledger.steps[-1][clock] - ledger.steps[2][clock])

    return spent(struck) / spent(twin) - 1.0
