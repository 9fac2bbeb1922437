"""What a demo of each illness must show, and whether it did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

DETECTION_STEPS = 3
"""An incident must open at most this many steps after the onset, unless the fault itself grows slowly."""
ASKED = frozenset({"approved", "delivered", "accepted", "done", "failed", "refused", "lost"})
"""States of a command that the trainer was, or was about to be, asked for. A proposal that nobody approved is none."""
Score = Literal["final_reward", "final_validation"]


@dataclass(frozen=True)
class Expectation:
    """What an illness must lead to.

    `rule` must open. `score` is where the damage shows, and the treated run must get half of it back; None where the
    damage is too small to tell from noise: then the command's own verdict counts. A `harmless` illness, and one that no
    command cures (`curable` False: labels are the job's own code), must lead to none.
    """

    rule: str
    score: Score | None = "final_reward"
    within_steps: int = DETECTION_STEPS
    harmless: bool = False
    curable: bool = True
    abrupt: bool = False


EXPECTATIONS: dict[str, Expectation] = {
    "stale_parameters": Expectation("onpolicy_disagreement"),
    "stale_scoring": Expectation("onpolicy_disagreement", harmless=True),
    "frozen_update": Expectation("frozen_update", score=None),
    "stale_engine": Expectation("rollout_mismatch"),
    "frozen_engine": Expectation("rollout_mismatch", score="final_validation", within_steps=8),
    "quantised_engine": Expectation("rollout_mismatch", score=None, abrupt=True),
    "shifted_labels": Expectation("rollout_mismatch", curable=False),
}


@dataclass(frozen=True)
class Check:
    """One thing that the demo had to show."""

    name: str
    passed: bool
    detail: str


def judge(report: dict[str, Any], mode: str) -> list[Check]:
    """Checks a finished report (`demo.report`) against what its illness must show. Pure."""
    wanted = EXPECTATIONS[report["illness"]]
    checks = [_quiet_when_healthy(report)]
    for name in ("untreated", "treated"):
        checks.append(_detected(report, name, wanted))
    if wanted.harmless or not wanted.curable:
        checks.append(_left_alone(report, "harmless" if wanted.harmless else "no command would cure it"))
    elif mode == "auto":
        checks.append(_commanded(report))
        checks.append(_helped(report) if wanted.score is None else _rescued(report, wanted.score))
    return checks


def _quiet_when_healthy(report: dict[str, Any]) -> Check:
    criticals = [i for i in report["incidents"] if i["run"] == "healthy" and i["severity"] == "critical"]
    detail = ", ".join(f"{i['rule']} at step {i['opened_step']}" for i in criticals) or "no critical incident"
    return Check("the healthy run is left in peace", not criticals, detail)


def _detected(report: dict[str, Any], run: str, wanted: Expectation) -> Check:
    onset = report["onset_step"]
    steps = [
        i["opened_step"]
        for i in report["incidents"]
        if i["run"] == run and i["rule"] == wanted.rule and i["opened_step"] is not None
    ]
    first = min((s for s in steps if s >= onset), default=None)
    broke = report[run].get("reward_broke_step")
    in_time = first is not None and first <= onset + wanted.within_steps
    before = first is not None and (broke is None or first < broke + wanted.abrupt)
    detail = f"{wanted.rule} at step {first}, onset {onset}, reward broke at {broke}"
    return Check(f"{run}: seen in time", in_time and before, detail)


def _commanded(report: dict[str, Any]) -> Check:
    done = [c for c in report["commands"] if c["run"] == "treated" and c["state"] == "done"]
    detail = ", ".join(f"{c['kind']} done at step {c['done_step']}" for c in done) or "no command was carried out"
    return Check("treated: a command was carried out", bool(done), detail)


def _left_alone(report: dict[str, Any], why: str) -> Check:
    issued = [c["kind"] for c in report["commands"] if c["run"] == "treated" and c["state"] in ASKED]
    return Check(f"treated: {why}, so nothing was commanded", not issued, ", ".join(issued) or "no command")


def _helped(report: dict[str, Any]) -> Check:
    verdicts = [f"{c['kind']} {c['verdict']}" for c in report["commands"] if c["run"] == "treated"]
    return Check("treated: the command helped", any(v.endswith("helped") for v in verdicts), ", ".join(verdicts))


def _rescued(report: dict[str, Any], score: Score) -> Check:
    healthy, ill, treated = (report[r][score] for r in ("healthy", "untreated", "treated"))
    half_way = ill + 0.5 * (healthy - ill)
    detail = f"{score}: healthy {healthy:.2f}, untreated {ill:.2f}, treated {treated:.2f}"
    return Check("treated: at least half-way back", treated >= half_way and treated > ill, detail)
