"""The demo's report: what the jobs did and what the service saw, in one JSON-able dictionary."""

from __future__ import annotations

from typing import Any

import httpx

from foreshock_service.demo.processes import Training

BREAK_MARGIN = 0.15
"""The reward is broken when its five-step mean lies this far below its own best, now and at the end."""


class Reader:
    """Asks the service what it saw of a run."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=f"{url}/v1", timeout=30.0)

    def series(self, run: str, signals: list[str]) -> dict[str, list[tuple[int, int, float | None]]]:
        """signal → [(attempt, step, value)], every step."""
        answer = self._get(f"/runs/{run}/series", signal=signals, max_points=10_000)
        return {
            s["signal"]: [(p["attempt"], p["step"], _number(p["value"])) for p in s["points"]] for s in answer["series"]
        }

    def incidents(self, run: str) -> list[dict[str, Any]]:
        """All incidents of a run, first opened first."""
        found: list[dict[str, Any]] = self._get("/incidents", run=run, limit=200)["incidents"]
        return sorted(found, key=lambda i: i["opened_at"])

    def commands(self, run: str) -> list[dict[str, Any]]:
        """All commands of a run, first created first."""
        found: list[dict[str, Any]] = self._get(f"/runs/{run}/commands", limit=200)["commands"]
        return sorted(found, key=lambda c: c["created_at"])

    def _get(self, path: str, **query: Any) -> Any:
        answer = self._http.get(path, params=query)
        answer.raise_for_status()
        return answer.json()


def build(illness: str, seed: int, onset: int, trainings: list[Training], reader: Reader) -> dict[str, Any]:
    """The report: `illness, seed, onset_step, healthy|untreated|treated, incidents, commands`."""
    report: dict[str, Any] = {"illness": illness, "seed": seed, "onset_step": onset, "incidents": [], "commands": []}
    for training in trainings:
        name = training.job.name
        result = training.result()
        history = result["history"]
        report[name] = {
            "final_reward": result["final_reward"],
            "final_validation": result["final_validation"],
            "steps": result["steps"],
            "attempts": result["attempts"],
            "seconds": training.seconds,
            "reward_broke_step": broke_at([(h["step"], h["reward.mean"]) for h in history], onset),
        }
        report["incidents"] += [
            {
                "run": name,
                **{k: i[k] for k in ("rule", "severity", "status", "opened_step", "onset_step", "edge", "message")},
            }
            for i in reader.incidents(training.job.run)
        ]
        report["commands"] += [
            {"run": name, **{k: c[k] for k in ("kind", "state", "issued_step", "done_step", "reason", "verdict")}}
            for c in reader.commands(training.job.run)
        ]
    return report


def broke_at(rewards: list[tuple[float, float]], onset: int, window: int = 5) -> int | None:
    """First step from `onset` whose five-step mean reward lies `BREAK_MARGIN` below the best before it, for good.

    For good: the last ten steps' mean lies there too. None: it did not break.
    """
    values = [reward for _, reward in rewards]
    means = [sum(values[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(values))]
    best = max(means[window - 1 :], default=0.0)
    last = sum(values[-10:]) / max(1, len(values[-10:]))
    if last >= best - BREAK_MARGIN:
        return None
    reached = 0.0
    for (step, _), mean in zip(rewards, means, strict=True):
        reached = max(reached, mean)
        if step >= onset and mean < reached - BREAK_MARGIN:
            return int(step)
    return None


def _number(value: float | str | None) -> float | None:
    """JSON spells non-finite numbers as words."""
    return None if value is None else float(value)
