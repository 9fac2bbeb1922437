"""Foreshock beside other tools, in one run: how quiet on healthy runs, how early on ill ones, how dear.

    python -m benchmarks.detection.peers --venv DIR [--on stream cases] [--seeds 20] [--json FILE] [--plot FILE]

DIR is a virtual environment that holds the other tools (`make bench-peers` makes one); without it they are listed as
not run. Every contestant hears the same runs in its shipped settings; nobody was tuned. Markdown on standard output.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.detection import cases
from benchmarks.detection.common_stream import ENTROPIES
from benchmarks.detection.peers import contest, rules
from benchmarks.detection.peers.table import CASE_HEAD, STREAM_HEAD, Heard, case_figures, markdown, stream_figures

WATCHED = ("policy.kl_k2", "reference.kl_k3", "entropy.mean", "grad.norm")
RISING = ("policy.kl_k2", "policy.kl_k3", "mismatch.kl_k3", "reference.kl_k3", "grad.norm")
MOVING = (*RISING, "entropy.mean", "length.mean", "reward.mean")
Rule = Callable[[contest.Rows], Iterator[int]]

RESTATED: dict[str, Rule] = {
    "W&B z(30) > 3 on approxkl (emulated)": partial(rules.z_score, signals=WATCHED[:1]),
    "W&B z(30) > 3 on four signals (emulated)": partial(rules.z_score, signals=WATCHED),
    "KillLossSpike (emulated)": rules.kill_loss_spike,
    "yardstick on log approxkl": partial(rules.yardstick, signals=RISING[:1]),
}
ON_CASES: dict[str, Rule] = {
    "W&B z(30) > 3 on four signals (emulated)": partial(rules.z_score, signals=WATCHED),
    "KillLossSpike (emulated)": rules.kill_loss_spike,
    "yardstick on KLs and gradient norm": partial(rules.yardstick, signals=RISING),
    "yardstick on all, either direction": partial(rules.yardstick, signals=MOVING, falls=True),
}
PEERS = ("rlprobe", "rlwatch", "rlwatch-approxkl", "rldoctor", "trainspotter")
LOG_READERS = ("rldoctor", "trainspotter")
NO_INPUT = {
    "martingale": "reads each token's log-prob beside the digest of the weights that drew it; these logs hold scalars"
}
TOKEN_SEEDS = 2
"""Seeds, at the lower entropy, for what costs 0.1 ms a token and hears tokens drawn for it."""
NO_VENV = "no virtual environment with it: --venv"
Figures = dict[str, dict[str, Any]]


def on_stream(given: argparse.Namespace) -> tuple[Figures, dict[str, str]]:
    """Contestant → figures over the common stream; contestant → why it was not run."""
    runs = contest.stream_runs(given.seeds)
    ready: dict[str, Callable[[], list[Heard]]] = {"Foreshock": partial(contest.foreshock, runs)}
    ready |= {tool: partial(_peer, given, tool, runs) for tool in PEERS}
    few = [run for run in runs if run.name.endswith(tuple(f"{ENTROPIES[0]}-{seed}" for seed in range(TOKEN_SEEDS)))]
    ready[f"martingale, {TOKEN_SEEDS} seeds, tokens drawn"] = partial(_peer, given, "martingale", few)
    ready |= {name: partial(contest.restated, rule, runs) for name, rule in RESTATED.items()}
    return _all(ready, stream_figures, {}, given.only)


def on_cases(given: argparse.Namespace) -> tuple[Figures, dict[str, str]]:
    """The same over the labelled real runs, for the contestants that read a log of scalars."""
    from benchmarks.detection.peers.real import case_runs, heard_by_check

    runs = case_runs(cases.folder())
    ready: dict[str, Callable[[], list[Heard]]] = {"Foreshock": partial(heard_by_check, cases.folder())}
    ready |= {tool: partial(_peer, given, tool, runs, raw=True, every=given.every) for tool in LOG_READERS}
    ready |= {name: partial(contest.restated, rule, runs) for name, rule in ON_CASES.items()}
    return _all(ready, case_figures, NO_INPUT, given.only)


def _peer(given: argparse.Namespace, tool: str, runs: Sequence[contest.Run], **how: Any) -> list[Heard]:
    if given.venv is None:
        raise contest.CannotRunError(NO_VENV)
    return contest.peer(given.venv / "bin" / "python", tool, runs, minutes=given.minutes, **how)


def _all(
    ready: Mapping[str, Callable[[], list[Heard]]],
    figures: Callable[[Sequence[Heard]], dict[str, Any]],
    no_input: Mapping[str, str],
    only: list[str],
) -> tuple[Figures, dict[str, str]]:
    told, skipped = Figures(), dict(no_input)
    for name, run in ready.items():
        if only and name not in only:
            continue
        print(f"{name} …", file=sys.stderr, flush=True)
        try:
            told[name] = figures(run())
        except contest.CannotRunError as reason:
            skipped[name] = str(reason)
    return told, skipped


def main() -> int:
    """0 with the tables on standard output, 2 for a venv without an interpreter or labelled runs that are not there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--venv", type=Path, help="the virtual environment that holds the other tools")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--on", nargs="+", choices=("stream", "cases"), default=["stream"],
                        help="the common stream, the labelled real runs (FORESHOCK_CASES)")  # fmt: skip
    parser.add_argument("--every", type=int, default=10, help="rows of a real log between two polls of a log reader")
    parser.add_argument("--minutes", type=float, default=60, help="stop a tool after this; what it finished counts")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="these contestants alone")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--plot", type=Path, help="also draw the common stream's figures here (PNG)")
    given = parser.parse_args()
    if given.venv is not None and not (given.venv / "bin" / "python").exists():
        print(f"no interpreter in {given.venv}: run `make bench-peers`", file=sys.stderr)
        return 2
    if "cases" in given.on and not (cases.folder() / "index.json").is_file():
        print(f"no labelled runs in {cases.folder()}: set FORESHOCK_CASES", file=sys.stderr)
        return 2
    written: dict[str, Any] = {"seeds": given.seeds}
    for name, contest_of, head in (("stream", on_stream, STREAM_HEAD), ("cases", on_cases, CASE_HEAD)):
        if name in given.on:
            told, skipped = contest_of(given)
            print(markdown(told, head, skipped) + "\n", flush=True)
            written |= {name: told, f"{name}_not_run": skipped}
    if given.json:
        given.json.write_text(json.dumps(written, indent=1), encoding="utf-8")
    if given.plot and "stream" in given.on:
        from benchmarks.detection.plots import early_and_quiet

        early_and_quiet(written["stream"], given.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
