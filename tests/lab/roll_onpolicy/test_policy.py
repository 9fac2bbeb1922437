"""The small policy: its passes agree where nothing differs, and differ by as much as the numerics say."""

from __future__ import annotations

import torch

from lab.roll_onpolicy import engine, policy, problems
from lab.roll_onpolicy.policy import Cache, Numerics

WEIGHTS = policy.initial_weights(3)
IDS = torch.randint(2, 32, (6, 20), generator=torch.Generator().manual_seed(5))


def test_decoding_with_a_cache_equals_one_forward() -> None:
    cache = Cache([], [])
    parts = [policy.forward(WEIGHTS, IDS[:, :8], Numerics(), cache)]
    parts += [policy.forward(WEIGHTS, IDS[:, t : t + 1], Numerics(), cache, t) for t in range(8, 20)]
    torch.testing.assert_close(torch.cat(parts, 1), policy.forward(WEIGHTS, IDS, Numerics()), rtol=1e-4, atol=1e-5)


def test_a_row_has_the_same_bits_in_any_batch_and_padding() -> None:
    alone = policy.forward(WEIGHTS, IDS[:2, :12], Numerics())
    together = policy.forward(WEIGHTS, IDS, Numerics())[:2, :12]
    assert float((alone - together).abs().max()) < 1e-6


def test_recomputation_changes_no_gradient() -> None:
    gradients = []
    for recompute in (False, True):
        leaves = {name: w.clone().requires_grad_() for name, w in WEIGHTS.items()}
        torch.log_softmax(policy.forward(leaves, IDS, Numerics(recompute=recompute)), -1)[..., 3].sum().backward()
        gradients.append(torch.cat([w.grad.flatten() for w in leaves.values() if w.grad is not None]))
    assert torch.equal(*gradients)


def test_split_sums_differ_by_rounding_alone_and_bf16_by_more() -> None:
    exact = policy.forward(WEIGHTS, IDS, Numerics())
    split = policy.forward(WEIGHTS, IDS, Numerics(split_k=True))
    low = policy.forward(policy.as_numerics(WEIGHTS, Numerics(bf16=True)), IDS, Numerics(bf16=True))
    assert 0 < float((exact - split).abs().max()) < 1e-4
    assert float((exact - low).abs().max()) > 1e-3


def test_the_engine_scores_what_it_sampled_and_a_row_ends_once() -> None:
    asked = problems.draw(6, 1).repeated(4)
    out = engine.generate(WEIGHTS, asked, torch.Generator().manual_seed(1), Numerics(), 0)
    mask = out.response_mask_NS[:, 1:]
    scored = torch.log_softmax(policy.forward(WEIGHTS, out.ids_NS, Numerics()), -1)[:, :-1]
    again = scored.gather(-1, out.ids_NS[:, 1:, None])[..., 0] * mask
    torch.testing.assert_close(out.logp_NT, again, rtol=1e-3, atol=1e-4)
    ends = ((out.ids_NS == problems.END) * out.response_mask_NS).sum(1)
    assert torch.equal(ends > 0, out.ended_N)
    assert int(ends.max()) <= 1


def test_top_k_never_samples_outside_the_k_most_likely() -> None:
    asked = problems.draw(6, 2).repeated(4)
    out = engine.generate(WEIGHTS, asked, torch.Generator().manual_seed(2), Numerics(), 3)
    scored = torch.log_softmax(policy.forward(WEIGHTS, out.ids_NS, Numerics()), -1)[:, :-1]
    rank = (scored > out.logp_NT[..., None] + 1e-4).sum(-1)
    assert int((rank * out.response_mask_NS[:, 1:]).max()) < 3
