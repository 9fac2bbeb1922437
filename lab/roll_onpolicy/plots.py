"""The ladder as pictures: how large each rung's disagreement is, what it does to a run, and the courses of a few."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from lab.roll_onpolicy.summary import Run, level

COLOURS = {
    "learns": "#2a7f62",
    "wobbles": "#d59b2d",
    "stands still": "#3b6fb6",
    "crashes": "#b8352f",
    "not judged": "#888888",
}
COURSES = {
    "identical": "#2a7f62", "seed without fault": "#3b6fb6", "mixed groups": "#b8352f",
    "seed with mixed groups": "#7b3fa0", "old of another batch": "#555555", "stale training, lag 1": "#d59b2d",
}  # fmt: skip
FLOOR = 1e-17  # where "exactly 0" is drawn


def _worst(outcomes: list[str]) -> str:
    return next((word for word in ("crashes", "stands still", "wobbles", "learns") if word in outcomes), "not judged")


def sizes(rows: list[dict[str, Any]], out: Path) -> None:
    """Every float32 rung's `policy.kl_k2`, median to largest, coloured by what a hundred steps do."""
    import matplotlib.pyplot as plt

    shown = [r for r in rows if r["dtype"] == "fp32" and "not_run" not in r][::-1]
    figure, axes = plt.subplots(figsize=(9, 0.27 * len(shown) + 1.4))
    for place, r in enumerate(shown):
        colour = COLOURS[_worst(r["outcome"])]
        median, largest = max(r["policy.kl_k2"], FLOOR), max(r["policy.kl_k2 max"], FLOOR)
        axes.plot([median, largest], [place, place], color=colour, linewidth=2, alpha=0.6)
        axes.plot(median, place, "o", color=colour, markersize=6)
        axes.plot(max(r["mismatch.kl_k3"], FLOOR), place, "|", color="black", markersize=9)
    axes.set_yticks(range(len(shown)), [r["rung"] for r in shown], fontsize=8)
    axes.set_xscale("log")
    axes.set_xlim(FLOOR / 3, 100)
    axes.axvline(FLOOR * 3, color="#cccccc", linewidth=1)
    axes.text(FLOOR / 2, len(shown) - 0.3, "exactly 0", fontsize=7, color="#666666")
    axes.set_xlabel("nats: ● policy.kl_k2 median, line to the largest step;  | mismatch.kl_k3 median")
    axes.set_title("How large each condition's disagreement is, and what a hundred steps do", fontsize=10)
    for word, colour in list(COLOURS.items())[:4]:
        axes.plot([], [], "o", color=colour, label=f"worst seed {word}")
    axes.legend(fontsize=7, loc="center")
    axes.grid(axis="x", alpha=0.2)
    figure.tight_layout()
    figure.savefig(out / "onpolicy-disagreement-sizes.png", dpi=110)
    plt.close(figure)


def courses(results: list[Run], out: Path) -> None:
    """Reward, truncated share, length and `policy.kl_k2` over the steps of a few rungs, every seed a thin line."""
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(2, 2, figsize=(10, 6), sharex=True)
    panels: tuple[tuple[Any, str, Any, int], ...] = (
        (grid[0, 0], "reward of learnable problems", lambda s: s["reward"], 5),
        (grid[0, 1], "truncated share", lambda s: s["truncated"], 5),
        (grid[1, 0], "gradient norm", lambda s: s["grad_norm"], 5),
        (grid[1, 1], "policy.kl_k2 (nats; bottom: exactly 0)", lambda s: max(s["policy"]["kl_k2"], FLOOR), 1),
    )
    for axes, title, read, window in panels:
        for name, colour in COURSES.items():
            runs = [r for r in results if r["rung"] == name and r["dtype"] == "fp32" and "steps" in r]
            for number, run in enumerate(runs):
                values = _smooth([read(s) for s in run["steps"]], window)
                label = name if number == 0 else None
                axes.plot(values, color=colour, linewidth=1.2, alpha=0.8, label=label)
        axes.set_title(title, fontsize=9)
        axes.grid(alpha=0.2)
    grid[1, 1].set_yscale("log")
    for axes in grid[1]:
        axes.set_xlabel("step")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="lower center", ncols=len(COURSES), fontsize=8)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(out / "onpolicy-disagreement-courses.png", dpi=110)
    plt.close(figure)


def _smooth(values: list[float], window: int) -> list[float]:
    smoothed = []
    for place in range(len(values)):
        part = [v for v in values[max(0, place + 1 - window) : place + 1] if not math.isnan(v)]
        smoothed.append(sum(part) / len(part) if part else float("nan"))
    return smoothed


def doses(rows: list[dict[str, Any]], results: list[Run], out: Path) -> None:
    """Reward at the end against the size of the disagreement, one mark a seed, by kind of cause."""
    import matplotlib.pyplot as plt

    kinds = {
        "noise or dropout": ("noise", "dropout", "bf16 logits", "split-K"),
        "stale scoring": ("stale scoring",),
        "stale training": ("stale half", "stale rank", "stale training"),
        "wrong rows": ("old of", "misordered"),
        "zeros": ("old log-probs zero",),
        "mixed groups": ("mixed groups",),
        "nothing wrong": ("identical", "micro-batch", "seed without fault"),
    }
    marks = ("o", "s", "D", "X", "P", "v", "^")
    figure, axes = plt.subplots(figsize=(8, 4.5))
    for (kind, words), mark in zip(kinds.items(), marks, strict=True):
        xs, ys = [], []
        for run in results:
            if run["dtype"] == "fp32" and "steps" in run and any(w in run["rung"] for w in words):
                values = sorted(s["policy"]["kl_k2"] for s in run["steps"][:20])
                xs.append(max(values[len(values) // 2], FLOOR))
                ys.append(level(run))
        axes.scatter(xs, ys, marker=mark, s=36, alpha=0.8, label=kind)
    axes.set_xscale("log")
    axes.set_xlim(FLOOR / 3, 30)
    axes.set_xlabel("policy.kl_k2, median of the first twenty steps (nats; left edge: exactly 0)")
    axes.set_ylabel("learnable reward at the end")
    axes.set_title("The size of the disagreement does not decide: what caused it does", fontsize=10)
    axes.legend(fontsize=8, loc="center")
    axes.grid(alpha=0.2)
    figure.tight_layout()
    figure.savefig(out / "onpolicy-disagreement-doses.png", dpi=110)
    plt.close(figure)


def draw(results: list[Run], rows: list[dict[str, Any]], out: Path) -> None:
    """All pictures into ``out``."""
    import matplotlib

    matplotlib.use("Agg")
    sizes(rows, out)
    courses(results, out)
    doses(rows, results, out)
