"""A micro-batch of verl's actor: the tensors that belong to its response tokens, without a host synchronisation.

Legend: B rows, R response positions, N tokens of all sequences, K response tokens. v1 keeps rows jagged (packed here as
[K] with `cu_seqlens`), v0 padded ([B, R]); in both the model's log-probs cover whole sequences, shifted by one.
"""

from __future__ import annotations

from typing import Any

from foreshock.adapters.rows import Rows


def rows(log_probs: Any, data: Any) -> Rows:
    """`log_probs`: jagged, or [N], of the training forward. Raises KeyError where `data` is not an actor's."""
    values_N = log_probs.values() if log_probs.is_nested else log_probs
    values_N = values_N.detach().reshape(-1)
    responses = data["responses"]
    place, cu_seqlens = _jagged(data) if responses.is_nested else (_padded(data, len(values_N)), None)

    def field(*names: str) -> Any:
        found = next((data[name] for name in names if name in data.keys()), None)  # noqa: SIM118 - a TensorDict
        return found.values() if found is not None and found.is_nested else found

    # `response_mask` is what rejection left of `loss_mask`; v0 keeps no other, so the driver sends it along.
    return Rows(
        values_N[place], field("old_log_probs"), field("rollout_log_probs"), field("ref_log_prob"),
        field("advantages"), field("foreshock_mask", "loss_mask", "response_mask"), field("responses"), cu_seqlens,
    )  # fmt: skip


def _jagged(data: Any) -> tuple[Any, Any]:
    """Where the response tokens' log-probs lie in [N], and the responses' offsets."""
    import torch

    ends_B = data["prompts"].offsets()[1:] + data["responses"].offsets()[1:]
    offsets = data["responses"].offsets()
    count = data["responses"].values().shape[0]
    row_K = torch.repeat_interleave(offsets.diff(), output_size=count)
    return torch.arange(count, device=offsets.device) + (ends_B - offsets[1:] - 1)[row_K], offsets


def _padded(data: Any, total: int) -> Any:
    import torch

    attention_BS, width = data["attention_mask"], data["prompts"].shape[1]
    lengths_B = attention_BS[:, width:].sum(1)
    first_B = attention_BS.sum(1).cumsum(0) - lengths_B - 1
    steps_R = torch.arange(data["responses"].shape[1], device=attention_BS.device)
    return (first_B[:, None] + steps_R).clamp(0, total - 1)  # padding points anywhere: it is masked
