"""One picture of the demo: reward, policy.kl_k2 and mismatch.kl_k3 of the three runs over their steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

Series = dict[str, dict[str, list[tuple[int, int, float | None]]]]
"""run → signal → [(attempt, step, value)]"""

COLOURS = {"healthy": "#2a7f62", "untreated": "#b3261e", "treated": "#1f5fa8"}
PANELS = (
    ("reward.mean", "reward", False),
    ("policy.kl_k2", "policy.kl_k2 (nats)", True),
    ("mismatch.kl_k3", "mismatch.kl_k3 (nats)", True),
)


def draw(report: dict[str, Any], series: Series, path: Path) -> None:
    """Writes the PNG. A rolled-back run's attempts are drawn as separate lines over the same steps."""
    figure, axes = plt.subplots(len(PANELS), 1, figsize=(10, 9), sharex=True)
    for axis, (signal, label, logarithmic) in zip(axes, PANELS, strict=True):
        for run, colour in COLOURS.items():
            _lines(axis, series.get(run, {}).get(signal, []), colour, run, logarithmic)
        axis.set_ylabel(label)
        axis.grid(alpha=0.25)
        axis.axvline(report["onset_step"], color="#555555", linestyle=":", linewidth=1.2)
        _marks(axis, report)
        if logarithmic:
            axis.set_yscale("log")
    axes[0].text(report["onset_step"], 1.02, "onset", transform=axes[0].get_xaxis_transform(), fontsize=8, ha="right")
    axes[0].legend(loc="lower left", frameon=False, ncols=3)
    axes[-1].set_xlabel("training step")
    figure.suptitle(
        f"foreshock demo: {report['illness']}, seed {report['seed']}", x=0.02, y=0.985, ha="left", fontsize=12
    )
    figure.text(0.02, 0.943, _story(report), fontsize=9, color="#333333")
    figure.tight_layout(rect=(0, 0, 1, 0.96))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _lines(axis: Axes, points: list[tuple[int, int, float | None]], colour: str, run: str, logarithmic: bool) -> None:
    attempts = sorted({attempt for attempt, _, _ in points})
    for attempt in attempts:
        drawn = [(s, v) for a, s, v in points if a == attempt and v is not None and (v > 0 or not logarithmic)]
        if drawn:
            label = run if attempt == attempts[-1] else "_earlier attempt"
            fade = 1.0 if attempt == attempts[-1] else 0.35
            axis.plot(*zip(*drawn, strict=True), color=colour, label=label, linewidth=1.4, alpha=fade)


def _marks(axis: Axes, report: dict[str, Any]) -> None:
    for incident in report["incidents"]:
        if incident["run"] == "treated" and incident["opened_step"] is not None and incident["severity"] == "critical":
            axis.axvline(incident["opened_step"], color="#c77700", linewidth=1.1)
    for command in report["commands"]:
        if command["run"] == "treated" and command["done_step"] is not None:
            axis.axvline(command["done_step"], color=COLOURS["treated"], linewidth=1.1, linestyle="--")


def _story(report: dict[str, Any]) -> str:
    incidents = [i for i in report["incidents"] if i["run"] == "treated" and i["opened_step"] is not None]
    commands = [c for c in report["commands"] if c["run"] == "treated" and c["done_step"] is not None]
    parts = [f"onset at step {report['onset_step']} (dotted)"]
    parts += [f"{i['rule']} opened at {i['opened_step']} (orange)" for i in incidents if i["severity"] == "critical"][
        :2
    ]
    parts += [f"{c['kind']} done at {c['done_step']} (dashed)" for c in commands][:2]
    return " · ".join(parts)
