"""The trainer path's parts: partition, advantages, loss."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lab.roll_onpolicy.own_path import OwnPath
from lab.roll_onpolicy.path import LossInput, Rows, Settings

SETTINGS = Settings(budget_infer=200, budget_train=120)
PROMPT, RESPONSE = 4, 28


def rows(seed: int, count: int = 32) -> Rows:
    draw = torch.Generator().manual_seed(seed)
    length = torch.randint(1, RESPONSE + 1, (count,), generator=draw)
    place = torch.arange(PROMPT + RESPONSE)[None]
    attention = (place < PROMPT + length[:, None]).float()
    response = attention * (place >= PROMPT)
    ids = torch.randint(2, 32, attention.shape, generator=draw) * attention.long()
    return Rows(ids, attention, response, (torch.rand(count, generator=draw) < 0.5).float(), RESPONSE)


@pytest.mark.parametrize("seed", range(5))
def test_a_partition_takes_every_row_once_within_budget_and_cuts_alike_on_every_rank(seed: int) -> None:
    batch = rows(seed)
    ranks = OwnPath().partition(batch, 120, SETTINGS)
    seen = torch.cat([m.rows_B for rank in ranks for m in rank])
    assert sorted(seen.tolist()) == list(range(32))
    assert len({tuple((len(m.rows_B), m.length) for m in rank) for rank in ranks}) == 1
    for micro in (m for rank in ranks for m in rank):
        assert len(micro.rows_B) * micro.length <= 120
        assert micro.length >= batch.attention_NS[micro.rows_B].sum(1).max()
        assert micro.length % SETTINGS.round_to == 0


def test_a_sequence_longer_than_the_budget_is_refused_with_both_sizes() -> None:
    with pytest.raises(ValueError, match="exceeds the micro-batch budget of 16"):
        OwnPath().partition(rows(0), 16, SETTINGS)


def test_ordered_groups_give_an_all_wrong_prompt_no_advantage_and_mixed_ones_do() -> None:
    batch = rows(1)
    scores = batch.scores_N.clone()
    scores[:8] = 0.0  # the first prompt fails on all eight
    batch = replace(batch, scores_N=scores)
    plain = replace(SETTINGS, whiten=False)
    ordered = OwnPath().advantages(batch, plain)
    mixed = OwnPath().advantages(batch, replace(plain, groups="mixed"))
    assert ordered.mixed == 0.0
    assert mixed.mixed > 0.9
    assert float(ordered.values_NT[:8].abs().max()) == 0.0
    assert float(mixed.values_NT[:8].abs().max()) > 0.1


def test_truncated_rows_leave_the_loss_but_not_the_group_mean() -> None:
    batch = rows(2)
    full = batch.response_NS[:, 1:].sum(1) == RESPONSE
    kept = OwnPath().advantages(batch, replace(SETTINGS, mask_truncated=False))
    masked = OwnPath().advantages(batch, SETTINGS)
    assert full.any()
    assert float(masked.final_NT[full].sum()) == 0.0
    assert float(kept.final_NT[full].sum()) > 0.0


def loss_input(old_shift: float = 0.0) -> tuple[LossInput, torch.Tensor]:
    batch, draw = rows(3, 8), torch.Generator().manual_seed(3)
    logits = torch.randn(8, PROMPT + RESPONSE, 32, generator=draw, requires_grad=True)
    final = batch.response_NS[:, 1:]
    old = OwnPath().log_probs(logits, batch.ids_NS, batch.response_NS).detach() - old_shift * final
    advantages = torch.randn(8, 1, generator=draw) * final
    return LossInput(
        logits, batch.ids_NS, batch.response_NS, old, advantages, final, 8, int(final.sum()), 8, 1, 1
    ), logits


def test_equal_log_probs_give_ratio_one_approxkl_zero_and_the_plain_policy_gradient() -> None:
    part, logits = loss_input()
    out = OwnPath().loss(part, SETTINGS)
    out.loss.backward()
    assert logits.grad is not None
    got = logits.grad.clone()
    logits.grad = None
    scored = OwnPath().log_probs(logits, part.ids, part.response)
    row = (-scored * part.advantages).sum(1) / part.final.sum(1)
    row.mean().backward()
    assert out.approxkl == 0.0
    torch.testing.assert_close(got, logits.grad, rtol=1e-5, atol=1e-8)


def test_approxkl_is_half_the_square_of_a_constant_difference() -> None:
    part, _ = loss_input(old_shift=0.2)
    assert OwnPath().loss(part, SETTINGS).approxkl == pytest.approx(0.02, rel=1e-5)


def test_micro_batch_normalisation_weighs_a_lone_row_more_than_the_global_one() -> None:
    part, _ = loss_input()
    first = {name: getattr(part, name)[:1] for name in ("logits", "ids", "response", "old_logp", "advantages", "final")}
    lone = replace(part, **first, micro_batches=2)
    alone = OwnPath().loss(lone, replace(SETTINGS, normalisation="micro_batch")).loss / 2
    shared = OwnPath().loss(lone, SETTINGS).loss / 2
    assert float((alone / shared).detach()) == pytest.approx(4.0, rel=1e-4)  # 1/2 of the step against 1/8
