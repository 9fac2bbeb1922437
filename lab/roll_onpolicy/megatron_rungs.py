"""The rungs that need real Megatron-core: ROLL's own worker and strategy on two gloo ranks, one process group a rung.

    python -m lab.roll_onpolicy.megatron_rungs --out megatron.json --old ROLL_BEFORE --mcore-old DIR \
        --december ROLL_2025_12_08 --mcore-cached DIR --current ROLL_HEAD --mcore-current DIR

``--old`` is a checkout from before 2025-12-08 and ``--mcore-old`` a folder with the Megatron-core that it pins (0.13);
``--mcore-cached`` one with 0.14. Folders come from ``pip install --no-deps --target DIR megatron-core==0.13.1``. A rung
whose source or Megatron-core is not given is written down as not run, with that reason; none is imitated.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.roll_onpolicy.processes import run_to_end

TRAIN_BUDGET = "240"  # megatron_worker.BUDGET_TRAIN, so that both passes cut alike


@dataclass(frozen=True)
class Condition:
    """One rung: which source, which Megatron-core, and ``megatron_worker``'s options."""

    name: str
    source: str  # old, december (2025-12-08) or current
    megatron: str  # old, cached or current
    options: tuple[str, ...]


CONDITIONS = (
    Condition("identical partition, 2025-11", "old", "old", ("--infer-budget", TRAIN_BUDGET)),
    Condition("seed's two partitions, 2025-11", "old", "old", ()),
    Condition("two partitions, bf16, 2025-11", "old", "old", ("--dtype", "bf16")),
    Condition("two partitions, bf16, full recomputation, 2025-11", "old", "old", ("--dtype", "bf16", "--recompute")),
    Condition("off-load and reload, bf16, 2025-11", "old", "old", ("--dtype", "bf16", "--offload", "--steps", "5")),
    Condition("off-load and reload, bf16, 2025-11, Megatron-core 0.14", "old", "cached",
              ("--dtype", "bf16", "--offload", "--steps", "5")),
    Condition("dropout 0.1 in training, 2025-11", "old", "old", ("--dropout", "0.1")),
    Condition("stale half shard in training, lr 1e-6", "old", "old", ("--stale", "half", "--lr", "1e-6")),
    Condition("stale half shard in training, lr 1e-6, bf16", "old", "old",
              ("--stale", "half", "--lr", "1e-6", "--dtype", "bf16")),
    Condition("stale half shard in training, lr 1e-3", "old", "old", ("--stale", "half", "--lr", "1e-3")),
    Condition("one stale rank in training, lr 1e-3", "old", "old", ("--stale", "rank1", "--lr", "1e-3")),
    Condition("all parameters stale in training, lr 1e-3, lag 2", "old", "old",
              ("--stale", "all", "--lr", "1e-3", "--lag", "2", "--steps", "4")),
    Condition("two partitions, bf16, recomputation, off-load, current", "current", "current",
              ("--dtype", "bf16", "--recompute", "--offload", "--steps", "5")),
    Condition("old log-probs reused, 2025-12-08", "december", "old", ("--old", "reused", "--dtype", "bf16")),
    Condition("the same without sample_uuid, 2025-12-08", "december", "old", ("--old", "zeros", "--dtype", "bf16")),
    Condition("the same without sample_uuid, current", "current", "current", ("--old", "zeros", "--dtype", "bf16")),
    Condition("float32 logits, a micro-batch of one row, current", "current", "current", ("--steps", "2")),
)  # fmt: skip


def run(condition: Condition, homes: dict[str, str], megatrons: dict[str, str], python: str) -> dict[str, Any]:
    """The condition's result, or ``{"not_run": reason}``."""
    home, megatron = homes.get(condition.source, ""), megatrons.get(condition.megatron, "")
    if not home:
        return {"not_run": f"no {condition.source} ROLL source given"}
    if not megatron:
        return {"not_run": f"megatron-core absent ({condition.megatron})"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [
            python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m",
            "lab.roll_onpolicy.megatron_worker", "--home", home, "--megatron", megatron, "--out", str(out),
            *condition.options,
        ]  # fmt: skip
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "ROLL_LOG_DIR": folder,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        }
        status, said = run_to_end(command, Path(folder), environment, 600)
        if out.exists():
            result: dict[str, Any] = json.loads(out.read_text())
            for private in ("home", "megatron", "out"):
                result["options"].pop(private)
            return result
        raised = [
            line.split("]: ", 1)[1] for line in said.splitlines() if line.startswith("[rank") and "Error: " in line
        ]
        return {"not_run" if not raised else "raised": (raised[-1] if raised else f"exit {status}")[:200]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    for name in ("old", "december", "current", "mcore-old", "mcore-cached", "mcore-current"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with what ROLL imports")
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    homes = {"old": options.old, "december": options.december, "current": options.current}
    megatrons = {"old": options.mcore_old, "cached": options.mcore_cached, "current": options.mcore_current}
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    for condition in CONDITIONS:
        if options.only and not any(word in condition.name for word in options.only):
            continue
        results[condition.name] = run(condition, homes, megatrons, options.python)
        shown = (
            results[condition.name].get("not_run")
            or results[condition.name].get("raised")
            or [s["policy"]["kl_k2"] for s in results[condition.name]["steps"]]
        )
        print(condition.name, shown, flush=True)
        options.out.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
