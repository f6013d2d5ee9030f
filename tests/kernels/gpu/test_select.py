"""Selection by the digits of scores against selection by sorting: exactly the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvc_kernels import select
from kvc_kernels.gpu.select import compete, kept_positions, protect
from kvc_kernels.select import RankedPages, compete_reference, weighted

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VALUES = [-torch.inf, -1e30, -1.0, -0.0, 0.0, 1e-45, 1e-38, 2.0, 2.0000002, 1e30, 3e30, torch.inf]


def _stable(scores: torch.Tensor, pages: torch.Tensor, page: int) -> torch.Tensor:
    """Positions kept when all keys are sorted, equal scores by position."""
    order = scores.cpu().sort(dim=-1, descending=True, stable=True).indices
    kept = torch.zeros_like(order, dtype=torch.bool)
    kept.scatter_(1, order, torch.arange(order.shape[1]) < pages.cpu()[:, None] * page)
    return kept.nonzero()[:, 1]


def _check(scores: torch.Tensor, pages: torch.Tensor, page: int) -> None:
    got = kept_positions(scores, pages, page, int(pages.sum()), 7)
    assert (got.cpu() - 7).equal(_stable(scores, pages, page))


def _check_shares(scores, page, won, safe, groups, weights=None, limit=torch.inf):
    """Heads that compete, by sorted pages and as the torch path does it."""
    best = scores.cpu().sort(descending=True).values[:, ::page]
    expected = compete_reference(weighted(best, weights, limit), won, safe, groups)
    on_device = [torch.tensor(each, device=scores.device) for each in (won, safe)]
    weights = None if weights is None else weights.to(scores.device)
    assert compete(scores, page, *on_device, groups, weights, limit).cpu().equal(expected)
    if len(set(won)) == len(set(safe)) == 1:
        got = compete(scores, page, won[0], safe[0], groups, weights, limit)
        assert got.cpu().equal(expected)


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_scores_many_of_them_equal(data):
    page = data.draw(st.sampled_from([1, 2, 8]))
    groups, heads = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    most = data.draw(st.integers(1, 4))
    row = st.lists(st.sampled_from(VALUES), min_size=most * page, max_size=most * page)
    rows = groups * heads
    scores = torch.tensor(data.draw(st.lists(row, min_size=rows, max_size=rows)))
    counts = torch.tensor(data.draw(st.lists(st.integers(0, most), min_size=rows, max_size=rows)))
    _check(scores.to(DEVICE), counts.to(DEVICE), page)
    safe = data.draw(st.lists(st.integers(0, most), min_size=groups, max_size=groups))
    won = [data.draw(st.integers(0, heads * (most - least))) for least in safe]
    _check_shares(scores.to(DEVICE), page, won, safe, groups)
    weights = torch.tensor(data.draw(st.lists(st.floats(1e-3, 8), min_size=rows, max_size=rows)))
    _check_shares(scores.to(DEVICE), page, won, safe, groups, weights.float(), 1e29)


@pytest.mark.parametrize(("page", "total"), [(8, 64), (64, 2048), (32, 2112), (16, 5056)])
@pytest.mark.parametrize("kinds", [1, 3, None], ids=["all equal", "3", "all different"])
def test_rows_longer_than_a_tile(device, page, total, kinds):
    """Ties lie on both sides of where a tile ends."""
    torch.manual_seed(total)
    rows, most = 4, total // page
    scores = torch.rand(rows, total, device=device)
    if kinds:
        scores = (scores * kinds).floor()
    pages = torch.randint(0, most + 1, (rows,), device=device)
    pages[0], pages[1] = 0, most
    _check(scores, pages, page)
    for won in (0, rows * (most - 1) // 3, rows * (most - 1)):
        _check_shares(scores, page, [won], [1], 1)
    _check_shares(scores, page, [most // 2, 2 * most], [most // 4, 0], 2)


def test_scores_that_differ_in_the_last_bit(device):
    """What the last of the four passes tells apart, on both sides of zero."""
    bits = torch.arange(64, dtype=torch.int32).view(2, 32)
    for above in (0x3F800000, 0x00000000, -0x40800000):
        scores = (bits + above).view(torch.float32).flip(1).contiguous().to(device)
        for count in (1, 3):
            _check(scores, torch.full((2,), count, device=device), 8)
            _check_shares(scores, 8, [count], [0], 1)


@pytest.mark.parametrize("page", [8, 16])
def test_protected_positions_and_padded_rows(device, page):
    """As `protect` lifts sinks and recent keys, and as rows of fewer keys begin with -inf."""
    total, rows = 40 * page, 4
    scores = torch.rand(rows, total, device=device) ** 8
    first = total - torch.tensor([40, 3, 1, 17], device=device) * page
    scores.masked_fill_(torch.arange(total, device=device) < first[:, None], -torch.inf)
    protect(scores, 4, 16, first, 1e30)
    for pages in ([1, 1, 1, 1], [40, 3, 1, 17], [5, 2, 0, 3], [40, 40, 40, 40], [0, 0, 0, 9]):
        _check(scores, torch.tensor(pages, device=device), page)
    _check_shares(scores, page, [30], [1], 1)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("sinks", "recent"), [(0, 0), (4, 32), (700, 0), (9, 9), (3, -5), (0, 300)]
)
def test_protection_is_that_of_torch(device, sinks, recent, padded):
    for total in (8, 264):
        scores, first = torch.rand(3, 2, total), None
        if padded:
            first = torch.tensor([0, 8, 0, total - 8, 0, 8]) // 8 * 8
            before = torch.arange(total) < first[:, None]
            scores = scores.masked_fill(before.view(3, 2, total), -torch.inf)
        on_device = scores.to(device)
        on_device_first = None if first is None else first.to(device)
        protect(on_device.view(6, -1), sinks, recent, on_device_first, select.PROTECTED)
        select.protect(scores, sinks, recent, first)
        assert on_device.cpu().equal(scores)


def test_nan_ranks_first_and_leaves_no_hole(device):
    scores = torch.rand(3, 64, device=device)
    scores[0, 5:20] = torch.nan
    scores[1, 3:9] = -torch.tensor(torch.nan)
    scores[2] = torch.nan
    pages = torch.tensor([1, 2, 3], device=device)
    got = kept_positions(scores, pages, 8, 6)
    assert got.cpu().equal(_stable(scores, pages, 8))
    scores[0, 40] = torch.inf  # as good as NaN, and behind it
    got = kept_positions(scores, pages, 8, 6)
    assert got[:8].tolist() == list(range(5, 13))
    assert compete(scores, 8, 5, 0, 1, None, 0.0).tolist() == [2, 1, 2]
    assert RankedPages(scores.cpu(), 8).compete(5, 0, 1).tolist() == [2, 1, 2]


def test_many_rows_in_one_group(device):
    """As a large model has; more than a warp, and no power of two."""
    scores = torch.randint(0, 9, (40, 16), device=device).float()
    _check(scores, torch.randint(0, 3, (40,), device=device), 8)
    _check_shares(scores, 8, [30], [1], 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_is_at_most_twice_the_scores(device):
    """A prompt of 32,768 tokens at rate 4 in a model of 32 layers of 8 heads."""
    scores = torch.rand(256, 32768, device=device)
    total = 256 * 32768 // 16 // 4
    size, before = scores.numel() * scores.itemsize, torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ranked = RankedPages(scores, 16)
    ranked.kept_positions(ranked.compete(total - 256, 1, 1), total)
    assert size + torch.cuda.max_memory_allocated() - before <= 2 * size


def test_nothing_kept(device):
    scores = torch.rand(3, 16, device=device)
    none = torch.zeros(3, dtype=torch.int64, device=device)
    assert kept_positions(scores, none, 8, 0).shape == (0,)


def test_what_does_not_fit_is_refused(device):
    scores = torch.rand(3, 16, device=device)
    pages = torch.ones(3, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="not rows of pages"):
        RankedPages(scores, 5)
    with pytest.raises(ValueError, match="contiguous float32"):
        RankedPages(scores.T.contiguous().T, 8)
    with pytest.raises(ValueError, match="pages is"):
        kept_positions(scores, pages.int(), 8, 3)
    with pytest.raises(ValueError, match="2 groups"):
        compete(scores, 8, 1, 1, 2, None, 0.0)
    with pytest.raises(ValueError, match="won is"):
        compete(scores, 8, pages, 1, 1, None, 0.0)
    with pytest.raises(ValueError, match="weights are"):
        compete(scores, 8, 1, 1, 1, scores[0], 0.0)
