"""Score, select, compact and store against their references."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvc_kernels.compact import compact, compact_reference
from kvc_kernels.score import pool_neighbours, window_attention, window_attention_reference
from kvc_kernels.select import (
    RankedPages,
    compete_reference,
    kept_positions_reference,
    weighted,
)
from kvc_kernels.store import store


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(("window", "tokens"), [(1, 1), (1, 20), (8, 8), (8, 33)])
def test_window_attention(power, group, window, tokens):
    torch.manual_seed(0)
    queries = torch.randn(window, 2 * group, 16)
    keys = torch.randn(tokens, 2, 16)
    scores = window_attention(queries, keys, 0.25, power)
    expected = window_attention_reference(queries, keys, 0.25, power)
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)


def test_attention_of_one_query_sums_to_its_group():
    queries, keys = torch.randn(1, 6, 16), torch.randn(40, 2, 16)
    scores = window_attention(queries, keys, 0.25, power=1)
    torch.testing.assert_close(scores.sum(-1), torch.full((2,), 3.0))


def test_pooling_lifts_neighbours():
    scores = torch.tensor([[0.0, 0.0, 6.0, 0.0, 0.0, 3.0]])
    assert pool_neighbours(scores, 3).tolist() == [[0, 6, 6, 6, 3, 3]]
    assert pool_neighbours(scores, 3, "mean").tolist() == [[0, 2, 2, 2, 1, 1]]
    assert pool_neighbours(scores, 1).tolist() == scores.tolist()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_selection(data):
    """Any scores, many of them equal, and any pages per head."""
    page = data.draw(st.sampled_from([1, 2, 8]))
    heads = data.draw(st.integers(1, 5))
    pages = data.draw(st.integers(1, 6))
    values = st.integers(-3, 3).map(float)
    row = st.lists(values, min_size=pages * page, max_size=pages * page)
    scores = torch.tensor(data.draw(st.lists(row, min_size=heads, max_size=heads)))
    counts = torch.tensor(
        data.draw(st.lists(st.integers(0, pages), min_size=heads, max_size=heads))
    )
    ranked = RankedPages(scores, page)
    page_scores = ranked.page_scores
    assert (page_scores.diff(dim=-1) <= 0).all()
    assert page_scores[:, 0].tolist() == scores.amax(-1).tolist()
    assert ranked.above(1.0).tolist() == (page_scores > 1).sum(1).tolist()
    got = ranked.kept_positions(counts, int(counts.sum()), 100)
    assert (got - 100).tolist() == kept_positions_reference(scores, counts, page).tolist()


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_competition(data):
    """Groups of heads with any pages, many of them equal, and so many that they have already."""
    groups, heads, pages, page = (data.draw(st.integers(1, most)) for most in (3, 4, 6, 3))
    row = st.lists(st.integers(-3, 3).map(float), min_size=pages * page, max_size=pages * page)
    rows = groups * heads
    scores = torch.tensor(data.draw(st.lists(row, min_size=rows, max_size=rows)))
    safe = data.draw(st.lists(st.integers(0, pages), min_size=groups, max_size=groups))
    won = [data.draw(st.integers(0, heads * (pages - least))) for least in safe]
    ranked = RankedPages(scores, page)
    expected = compete_reference(ranked.page_scores, won, safe, groups)
    assert ranked.compete(torch.tensor(won), torch.tensor(safe), groups).equal(expected)
    if groups == 1:
        assert ranked.compete(won[0], safe[0], 1).equal(expected)
    weights = torch.rand(rows) + 0.5
    got = ranked.compete(torch.tensor(won), torch.tensor(safe), groups, weights, 2.0)
    by_weight = weighted(ranked.page_scores, weights, 2.0)
    assert got.equal(compete_reference(by_weight, won, safe, groups))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_compact(dtype):
    torch.manual_seed(0)
    layers, heads, page, dim = 2, 3, 4, 8
    arena = torch.randn(12, layers, heads, page, dim).to(dtype)
    source = torch.tensor([7, 2, 9, 4, 11])
    slots = (source[:, None] * page + torch.arange(page)).flatten()
    pages = torch.tensor([1, 3, 2, 1, 4, 1])
    positions = torch.cat([torch.randperm(20)[: n * page].sort().values for n in pages.tolist()])
    target = torch.tensor([5, 1])
    got = [arena.clone(), -arena[..., :5].contiguous()]
    expected = [each.clone() for each in got]
    compact(*got, slots, positions, pages, target)
    untouched = [block for block in range(12) if block not in target.tolist()]
    for one, reference in zip(got, expected, strict=True):
        before = reference[untouched]
        compact_reference(reference, slots, positions, pages, target)
        assert torch.equal(one, reference)
        assert torch.equal(one[untouched], before)


def test_store_writes_only_its_slots():
    arena = torch.zeros(3, 2, 4, 8)  # [num_blocks, H, P, D]
    new = torch.randn(3, 2, 8)
    store(arena, torch.tensor([4, 7, 9]), new)
    assert torch.equal(arena[1, :, 0], new[0])
    assert torch.equal(arena[1, :, 3], new[1])
    assert torch.equal(arena[2, :, 1], new[2])
    assert arena.count_nonzero() == new.count_nonzero()
