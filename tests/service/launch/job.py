"""A tiny job for launcher tests: says on standard output how it was started, then does what its arguments say.

job.py crash-until N | rollback CKPT STEP UNTIL | stop | sleep | exit CODE | orphan FILE
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import foreshock
from foreshock.control.command import Command
from foreshock.control.supervised import Launcher
from foreshock.wire import Action
from foreshock.wire import commands as wire

EVERY = ("RESUME_FROM", "RESUME_STEP", "SKIP_STEPS", "RESTARTS", "COMPLETES", "LAUNCH", "LAUNCHER_KINDS")


def hand_over(kind: str, **arguments: object) -> None:
    launcher = Launcher.found(controller=True)
    assert launcher is not None
    actions = [Action(kind=kind, arguments=dict(arguments))]
    command = Command(wire.Command(id="c1", run="lab/x", attempt=3, actions=actions), 0, 7)
    launcher.carry_out(command)
    print(json.dumps({"answer": command.state, "detail": command.detail}), flush=True)
    if launcher.leaving:
        launcher.leave()


def main() -> None:
    said = {name: os.environ.get(f"FORESHOCK_{name}") for name in EVERY}
    print(json.dumps({"argv": sys.argv[1:], "resumed": foreshock.resumed() is not None} | said), flush=True)
    what, *rest = sys.argv[1:]
    restarts = int(said["RESTARTS"] or 0)
    launcher = Launcher.found(controller=True)
    if what == "crash-until":
        assert launcher is not None
        if rest[1:]:
            launcher.tell(checkpoint=rest[1], step=4)
        sys.exit(3 if restarts < int(rest[0]) else 0)
    if what == "exit":
        sys.exit(int(rest[0]))
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "rollback" and not foreshock.resumed():
        hand_over("rollback", checkpoint=rest[0], step=int(rest[1]), skip_until_step=int(rest[2]))
    if what == "stop":
        hand_over("stop")
    if what == "orphan":
        if not restarts:
            # In another session: a signal to the group does not reach it.
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
            print(json.dumps({"orphan": child.pid}), flush=True)
            sys.exit(1)
        try:
            os.kill(int(Path(rest[0]).read_text()), 0)
            print(json.dumps({"orphan_lives": True}), flush=True)
        except ProcessLookupError:
            print(json.dumps({"orphan_lives": False}), flush=True)
    if what == "sleep":
        if "deaf" in rest:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if "polite" in rest:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        print(json.dumps({"ready": os.getpid()}), flush=True)
        time.sleep(60)


main()
