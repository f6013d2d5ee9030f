"""Attention in blocks, and what is made of it, against references of one query at a time."""

from __future__ import annotations

import math

import pytest
import torch
from kvc_kernels.projection import projected_norm, projected_norm_reference
from kvc_kernels.score import (
    causal_attention,
    causal_logits,
    fade_to_neighbours,
    pool_neighbours,
    put_first,
    put_last_first,
    window_attention,
    window_attention_reference,
)


def _drawn(window: int, tokens: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(window, 2 * group, 16), torch.randn(tokens, 2, 16)


@pytest.mark.parametrize("block", [1, 3 * 33 * 2, None], ids=["a query", "few", "all"])
@pytest.mark.parametrize("excluded", [0, 1, 5, 40])
@pytest.mark.parametrize(("group", "how"), [(1, "sum"), (3, "sum"), (3, "mean")])
@pytest.mark.parametrize(("window", "tokens"), [(1, 1), (1, 20), (8, 8), (33, 33), (7, 33)])
def test_window_attention(block, excluded, group, how, window, tokens):
    queries, keys = _drawn(window, tokens, group)
    for power in (1, 2):
        options = {"group": how, "excluded": excluded}
        got = window_attention(queries, keys, 0.25, power, block=block, **options)
        expected = window_attention_reference(queries, keys, 0.25, power, **options)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("block", [1, 500, None])
def test_the_log_sum_exp_may_be_given(block):
    queries, keys = _drawn(9, 20, 3)
    every = [logits for _, logits in causal_logits(queries, keys, 0.25)]
    lse = torch.cat(every, dim=2).logsumexp(-1).permute(2, 0, 1).flatten(1)  # [w, H*G]
    options = {"power": 2, "group": "mean", "block": block}
    expected = window_attention(queries, keys, 0.25, **options)
    torch.testing.assert_close(window_attention(queries, keys, 0.25, lse=lse, **options), expected)
    double = window_attention(queries, keys, 0.25, lse=lse - math.log(2), **options)
    torch.testing.assert_close(double, 4 * expected)


@pytest.mark.parametrize("block", [1, 500, 1 << 19])
def test_blocks_hold_no_more_than_asked(block):
    queries, keys = _drawn(30, 40, 3)
    sizes, nexts = [], 10
    for first, logits in causal_logits(queries, keys, 0.25, block=block):
        assert first == nexts
        assert logits.shape[-1] == first + logits.shape[2]
        sizes.append(logits.numel())
        nexts += logits.shape[2]
    assert nexts == 40
    assert max(sizes) <= max(block, 40 * 2 * 3)


def test_attention_of_a_query_sums_to_one():
    queries, keys = _drawn(9, 20, 3)
    for _, attention in causal_attention(queries, keys, 0.25, block=300):
        torch.testing.assert_close(attention.sum(-1), torch.ones(attention.shape[:3]))


def test_attention_in_half_precision_is_computed_in_float32():
    queries, keys = (drawn.bfloat16() for drawn in _drawn(9, 20, 3))
    got = window_attention(queries, keys, 0.25)
    expected = window_attention(queries.float(), keys.float(), 0.25)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("half_life", [0.5, 4.0])
@pytest.mark.parametrize("n", [1, 30])
def test_scores_fade_to_neighbours(half_life, n):
    torch.manual_seed(0)
    scores = torch.rand(2, n) ** 8
    scores[:, n // 2] = 0
    expected = torch.zeros_like(scores)
    for i in range(n):
        for j in range(n):
            faded = scores[:, j] * 2 ** (-abs(i - j) / half_life)
            expected[:, i] = expected[:, i].maximum(faded)
    got = fade_to_neighbours(scores, half_life)
    torch.testing.assert_close(got, expected, atol=1e-30, rtol=1e-5)
    assert fade_to_neighbours(torch.zeros(2, 0), half_life).shape == (2, 0)


def test_every_row_fades_at_its_own_pace():
    scores = torch.rand(3, 30) ** 8
    paces = torch.tensor([0.5, 2.0, 4.0], dtype=torch.float64)
    got = fade_to_neighbours(scores, 4.0, paces)
    for row, pace, faded in zip(scores, paces.tolist(), got, strict=True):
        torch.testing.assert_close(faded, fade_to_neighbours(row, pace))


def test_far_scores_fade_exactly_in_long_prompts():
    """A difference of positions, however far from the beginning."""
    scores = torch.zeros(1, 100_000)
    scores[0, 99_000] = 1.0
    got = fade_to_neighbours(scores, 2.0)[0, [98_990, 99_000, 99_020]]
    torch.testing.assert_close(got, torch.tensor([2.0**-5, 1.0, 2.0**-10]), rtol=1e-6, atol=0)


def test_pooling_nothing():
    assert pool_neighbours(torch.zeros(2, 0), 5).shape == (2, 0)


def test_first_rank_above_all_and_keep_their_order():
    scores = torch.tensor([[0.0, 3e-7, 4e-7, 900.0, 1e6]])
    chosen = torch.tensor([[True, True, True, False, False]])
    raised = put_first(scores, chosen)
    assert raised.argsort(descending=True).tolist() == [[2, 1, 0, 4, 3]]
    assert raised.max() < 1e29, "what selection protects stays above"
    assert put_last_first(scores, 0).equal(scores)
    assert put_last_first(scores, 2).argsort(descending=True).tolist() == [[4, 3, 2, 1, 0]]
    assert (put_last_first(scores, 9) >= 1e9).all()


@pytest.mark.parametrize("block", [1, 200, 1 << 18])
@pytest.mark.parametrize("group", [1, 3])
def test_projected_norm(block, group):
    torch.manual_seed(0)
    values, projection = torch.randn(11, 2, 8), torch.randn(20, 2 * group * 8)
    got = projected_norm(values, projection, block=block)
    expected = projected_norm_reference(values, projection)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-5)
