"""`--plot`: the signals that the incidents speak of, with their learned ranges and the incidents as shaded spans."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from foreshock_service.check.judge import Report
from foreshock_service.check.trace import Point, Trace
from foreshock_service.rules.illnesses import rule_named

USUAL: Final = (
    "reward.mean", "policy.kl_k2", "mismatch.kl_k3", "mismatch.abs_mean", "entropy.mean", "reference.kl_k3",
    "grad.norm", "length.mean", "length.truncated", "loss",
)  # fmt: skip
MAX_PANELS: Final = 6
LINE, BAND, WARNING, CRITICAL = "#1f4e79", "#9fbfdf", "#e6a700", "#c62828"


class NoPlot(Exception):  # noqa: N818 - said to people as it is
    """It cannot be drawn; the message says why."""


def plot(report: Report, path: Path, title: str) -> None:
    """Writes a picture; its format by the file's ending. Raises NoPlot."""
    if report.trace is None or not report.trace.points:
        raise NoPlot("nothing to draw: no step was read")
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise NoPlot("--plot needs matplotlib: pip install 'foreshock[check]'") from error
    signals = _chosen(report, report.trace)
    figure, axes = pyplot.subplots(len(signals), 1, sharex=True, squeeze=False, figsize=(10, 1.2 + 1.7 * len(signals)))
    try:
        for axis, signal in zip(axes[:, 0], signals, strict=True):
            _panel(axis, signal, report.trace.points[signal], report)
        _step_ticks(axes[-1, 0], report.trace.points[signals[0]])
        axes[-1, 0].set_xlabel("step")
        figure.suptitle(f"{title}: {report.verdict}", x=0.01, ha="left", fontsize=11)
        figure.tight_layout()
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise NoPlot(f"{path}: {error}") from error
    finally:
        pyplot.close(figure)


def _chosen(report: Report, trace: Trace) -> list[str]:
    """First what the incidents read, then the usual ones."""
    read = [signal for incident in report.incidents for signal in _shown_on(incident.rule)]
    ordered = dict.fromkeys([*(s for s in USUAL[:1]), *read, *USUAL])
    return [signal for signal in ordered if signal in trace.points][:MAX_PANELS] or list(trace.points)[:MAX_PANELS]


def _panel(axis: Any, signal: str, points: list[Point], report: Report) -> None:
    at = [index for index, *_ in points]
    low, high = [p[2] for p in points], [p[3] for p in points]
    axis.plot(at, [(a + b) / 2 for a, b in zip(low, high, strict=True)], color=LINE, linewidth=1.1)
    if low != high:
        axis.fill_between(at, low, high, color=LINE, alpha=0.25, linewidth=0)
    banded = [(p[0], p[4]) for p in points if p[4] is not None]
    if banded:
        axis.fill_between(
            [i for i, _ in banded],
            [b[0] for _, b in banded],
            [b[2] for _, b in banded],
            color=BAND,
            alpha=0.35,
            linewidth=0,
            label="learned range",
        )
    positive = [v for v in low if v > 0]
    if len(positive) == len(low) and max(high) > 50 * min(positive):
        axis.set_yscale("log")
    else:
        # The range may reach far beyond the data: the data decides what is shown.
        reach = max(max(high) - min(low), 1e-12)
        axis.set_ylim(min(low) - 0.08 * reach, max(high) + 0.08 * reach)
    shown = 0
    for incident in report.incidents:
        if signal in _shown_on(incident.rule):
            first, last = _where(incident.opened_step, points), _where(incident.resolved_step, points)
            colour = CRITICAL if incident.severity == "critical" else WARNING
            axis.axvspan(first, last, color=colour, alpha=0.13, linewidth=0)
            axis.axvline(first, color=colour, linewidth=1.2)
            axis.annotate(
                incident.rule,
                (first, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(3, -9 - 8 * (shown % 4)),
                textcoords="offset points",
                fontsize=7,
                color=colour,
            )
            shown += 1
    axis.set_ylabel(signal, fontsize=8)
    axis.tick_params(labelsize=7)
    axis.grid(alpha=0.2)


def _shown_on(rule: str) -> tuple[str, ...]:
    """What a rule judges: the reward is context to all but the rules of the reward itself."""
    reads = rule_named(rule).reads
    return reads if rule.startswith("reward") else tuple(s for s in reads if not s.startswith("reward."))


def _where(step: int | None, points: list[Point]) -> int:
    """The index of a step; the last one for None, and where steps come again the first."""
    if step is None:
        return points[-1][0]
    return next((index for index, at, *_ in points if at >= step), points[-1][0])


def _step_ticks(axis: Any, points: list[Point]) -> None:
    """Ticks by index, labelled with steps: after a restart steps come again."""
    shown = points[:: max(1, len(points) // 8)]
    axis.set_xticks([p[0] for p in shown], [str(p[1]) for p in shown])
