"""The same passes on a Ray cluster: each unit a task of Ray Data, its sums merged here, in order.

Workers must see the files under the same paths (a shared file system) and have Foreshock installed.
"""

from __future__ import annotations

import pickle  # Ray's own way between its processes; nothing from a file or from others # nosec B403
from collections.abc import Callable, Sequence
from typing import Any

from foreshock_service.diagnosis.tokens.batches import DumpError, Unit


def on_ray(call: Callable[[Unit], Any], units: Sequence[Unit]) -> list[Any]:
    """`call` of every unit, in order. Uses the cluster that this process is connected to, else `RAY_ADDRESS`, else one
    of its own. Raises DumpError without Ray, and what `call` raises."""
    try:
        import ray
        import ray.data
    except ImportError:
        raise DumpError("--ray needs Ray: pip install 'foreshock[ray]'") from None
    if not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False

    def work(row: dict[str, Any]) -> dict[str, Any]:
        try:
            result: Any = call(pickle.loads(row["unit"]))  # packed by `items` below # nosec B301
        except DumpError as error:
            result = error
        return {"index": row["index"], "result": pickle.dumps(result)}

    items = [{"index": index, "unit": pickle.dumps(unit)} for index, unit in enumerate(units)]
    blocks = max(1, len(items))
    rows = ray.data.from_items(items, override_num_blocks=min(blocks, 4096)).map(work).take_all()
    ordered = sorted(rows, key=lambda row: int(row["index"]))
    results = [pickle.loads(row["result"]) for row in ordered]  # packed by `work` above # nosec B301
    for result in results:
        if isinstance(result, DumpError):
            raise result
    return results
