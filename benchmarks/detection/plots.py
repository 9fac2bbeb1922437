"""Pictures of the detection figures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

MARKERS = "*sDv^P<>X"


def early_and_quiet(told: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """One point per contestant: false alarms per healthy run (x) against ill runs found before the break (y).

    A bar hangs from a point down to the share of healthy runs on which the contestant spoke in the same window: what
    is above it was found, what is below may be chance. Raises ValueError where no contestant has both figures.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    points = _points(told)
    if not points:
        raise ValueError("no contestant heard both healthy and ill runs: nothing to draw")
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 5), sharey=True, layout="constrained")
    for axis, (kind, title) in zip(
        axes, (("collapse", "Collapse"), ("approxkl_only", "Only approxkl moves before the break")), strict=True
    ):
        ours = [p for p in points if p[0].startswith("Foreshock")]
        for place, (name, x, found, chance) in enumerate(points):
            colour = "#c2410c" if (name, x, found, chance) in ours else f"C{place % 10}"
            y = found[kind]
            axis.plot([x, x], [100 * min(chance, y), 100 * y], color=colour, alpha=0.35, linewidth=2)
            size, marker = (150, "o") if colour == "#c2410c" else (50, MARKERS[place % len(MARKERS)])
            axis.scatter(x, 100 * y, s=size, color=colour, marker=marker, zorder=3, label=name)
        axis.set(title=title, xlabel="false alarms per healthy run of 200 steps", ylim=(-5, 105))
        axis.set_xscale("symlog", linthresh=1)
        axis.set_xlim(-0.1, 1.5 * max(1.0, *(x for _, x, _, _ in points)))
        axis.xaxis.set_major_formatter(mpl.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("runs found in [90, 120), before the break (%)")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _points(told: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, float, dict[str, float], float]]:
    """(name, false alarms per healthy run, kind → share found, share of healthy runs with an alarm in the window)."""
    needed = ("false_alarms_per_healthy_run", "healthy_in_window", "collapse_in_window", "approxkl_only_in_window")
    return [
        (
            name,
            row["false_alarms_per_healthy_run"],
            {kind: row[f"{kind}_in_window"] for kind in ("collapse", "approxkl_only")},
            row["healthy_in_window"],
        )
        for name, row in told.items()
        if all(row[column] is not None for column in needed)
    ]


def confusion_matrix(matrix: Mapping[str, Mapping[str, int]], path: Path) -> None:
    """Rows: what was wrong; columns: what was named first; a cell's colour is its share of the row.

    Raises ValueError on an empty matrix.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    if not matrix:
        raise ValueError("nothing was asked: nothing to draw")
    rows, columns = (
        list(matrix),
        sorted({name for row in matrix.values() for name in row}, key=lambda n: (n == "nothing", n)),
    )
    shares = [[matrix[row].get(column, 0) / sum(matrix[row].values()) for column in columns] for row in rows]
    figure, axis = pyplot.subplots(figsize=(2.6 + 0.75 * len(columns), 1.8 + 0.36 * len(rows)), layout="constrained")
    axis.imshow(shares, cmap="Oranges", vmin=0, vmax=1, aspect="auto")
    for y, row in enumerate(rows):
        for x, column in enumerate(columns):
            if matrix[row].get(column):
                ink = "white" if shares[y][x] > 0.6 else "black"
                axis.text(x, y, str(matrix[row][column]), ha="center", va="center", fontsize=9, color=ink)
    axis.set_xticks(range(len(columns)), columns, rotation=40, ha="right")
    axis.set_yticks(range(len(rows)), rows)
    axis.set(xlabel="named first", ylabel="what was wrong")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
