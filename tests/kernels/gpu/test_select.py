"""Selection without the order of the keys against selection with it: exactly the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvc_kernels.gpu.select import kept_positions, rank_pages
from kvc_kernels.select import kept_positions_reference


def _stable(scores: torch.Tensor, pages: torch.Tensor, page: int) -> torch.Tensor:
    """Positions kept when all keys are sorted, equal scores by position."""
    order = scores.cpu().sort(dim=-1, descending=True, stable=True).indices
    kept = torch.zeros_like(order, dtype=torch.bool)
    kept.scatter_(1, order, torch.arange(order.shape[1]) < pages.cpu()[:, None] * page)
    return kept.nonzero()[:, 1]


def _check(scores: torch.Tensor, pages: torch.Tensor, page: int) -> None:
    ranks = rank_pages(scores, page)
    by_page = scores.cpu().sort(descending=True).values.unflatten(1, (-1, page))
    assert ranks.best.cpu().equal(by_page[..., 0])
    assert ranks.least.cpu().equal(by_page[..., -1])
    got = kept_positions(scores, ranks, pages, page, int(pages.sum()))
    assert got.cpu().equal(_stable(scores, pages, page))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_scores_many_of_them_equal(data):
    page = data.draw(st.sampled_from([1, 2, 8]))
    heads = data.draw(st.integers(1, 14))
    most = data.draw(st.integers(1, 6))
    values = st.sampled_from([-torch.inf, -1e30, -1.0, -0.0, 0.0, 1e-38, 2.0, 1e30, 3e30])
    row = st.lists(values, min_size=most * page, max_size=most * page)
    scores = torch.tensor(data.draw(st.lists(row, min_size=heads, max_size=heads)))
    counts = torch.tensor(data.draw(st.lists(st.integers(0, most), min_size=heads, max_size=heads)))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    _check(scores.to(device), counts.to(device), page)
    assert kept_positions_reference(scores, counts, page).equal(_stable(scores, counts, page))


@pytest.mark.parametrize("page", [8, 16, 32, 64])
@pytest.mark.parametrize("total", [64, 2048, 2112, 5056])
@pytest.mark.parametrize("kinds", [1, 3, 40, None], ids=["all equal", "3", "40", "all different"])
def test_rows_longer_than_a_tile(device, page, total, kinds):
    """Ties lie on both sides of where a tile ends."""
    torch.manual_seed(total)
    rows = 7
    scores = torch.rand(rows, total, device=device)
    if kinds:
        scores = (scores * kinds).floor()
    pages = torch.randint(0, total // page + 1, (rows,), device=device)
    pages[0], pages[1] = 0, total // page
    _check(scores, pages, page)


@pytest.mark.parametrize("page", [8, 16])
def test_protected_positions_and_padded_rows(device, page):
    """As `sgl_kvc` lifts sinks and recent keys, and as rows of fewer keys begin with -inf."""
    total, rows = 40 * page, 4
    scores = torch.rand(rows, total, device=device) ** 8
    held = torch.tensor([40, 3, 1, 17]) * page
    rank = torch.arange(total)
    for row, count in enumerate(held.tolist()):
        scores[row, -16:] = 1e30 * (1 + rank[-16:] / total)
        scores[row, total - count : total - count + 4] = 1e30 * (3 - rank[:4] / total)
        scores[row, : total - count] = -torch.inf
    for pages in ([1, 1, 1, 1], [40, 3, 1, 17], [5, 2, 0, 3], [40, 40, 40, 40], [0, 0, 0, 9]):
        _check(scores, torch.tensor(pages, device=device), page)


def test_nan_ranks_first_and_leaves_no_hole(device):
    scores = torch.rand(3, 64, device=device)
    scores[0, 5:20] = torch.nan
    scores[1, 3:9] = -torch.tensor(torch.nan)
    scores[2] = torch.nan
    pages = torch.tensor([1, 2, 3], device=device)
    got = kept_positions(scores, rank_pages(scores, 8), pages, 8, 6)
    assert got.cpu().equal(_stable(scores, pages, 8))
    scores[0, 40] = torch.inf  # as good as NaN, and behind it
    got = kept_positions(scores, rank_pages(scores, 8), pages, 8, 6)
    assert got[:8].tolist() == list(range(5, 13))


def test_many_rows_are_ranked_in_parts(device):
    scores = torch.randint(0, 9, (50, 16), device=device).float()
    _check(scores, torch.randint(0, 3, (50,), device=device), 8)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_is_at_most_three_times_the_scores(device):
    """A prompt of 32,768 tokens at rate 4 in a model of 32 layers of 8 heads."""
    scores = torch.rand(256, 32768, device=device)
    pages = torch.full((256,), 32768 // 16 // 4, device=device)
    size, before = scores.numel() * scores.itemsize, torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept_positions(scores, rank_pages(scores, 16), pages, 16, int(pages.sum()))
    assert size + torch.cuda.max_memory_allocated() - before <= 3 * size


def test_nothing_kept(device):
    scores = torch.rand(3, 16, device=device)
    none = torch.zeros(3, dtype=torch.int64, device=device)
    assert kept_positions(scores, rank_pages(scores, 8), none, 8, 0).shape == (0,)


def test_what_does_not_fit_is_refused(device):
    scores = torch.rand(3, 16, device=device)
    pages = torch.ones(3, dtype=torch.int64, device=device)
    ranks = rank_pages(scores, 8)
    with pytest.raises(ValueError, match="not pages of"):
        rank_pages(scores, 5)
    with pytest.raises(ValueError, match="other scores"):
        kept_positions(scores[:2], ranks, pages, 8, 3)
    with pytest.raises(ValueError, match="pages is"):
        kept_positions(scores, ranks, pages.int(), 8, 3)
    with pytest.raises(ValueError, match="contiguous float32"):
        kept_positions(scores.T.contiguous().T, ranks, pages, 8, 3)
