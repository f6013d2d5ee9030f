"""From scores and pages per head to the positions that are kept: cf. `kvc_kernels.select`.

There the order of every key is kept until the pages are known. Here only the best and the least
score of every page are: the least of the last page kept says, reading the scores once more, which
keys are. Memory at its peak, with scores of 4 bytes as the unit::

    rank_pages       1 scores, 2 / P ranks, 52 / 4 of the sixteenth of the rows sorted at a time
    kept_positions   1 scores, 2 / P ranks, 8 / 4 / rate positions

so 2.1 while ranking at P = 8, and from rate 1.15 on less than 3 at any time. Fewer than 32 rows are
sorted one by one: 1.25 + 10 / R. The 52 bytes of a key being sorted: its score without NaN (4), its
sorted score and order (12), the sorted score of the part before (4), and what torch takes at most
to sort few long rows (32: order twice, keys, buffers of the radix sort; read in SortStable.cu).
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

#: The part of the rows that is sorted at a time.
_PARTS = 16

#: Positions of a row that a program reads at a time.
_TILE = 2048


@dataclasses.dataclass(frozen=True)
class PageRanks:
    """The pages of every head when its keys are sorted by score, best first.

    Attributes
    ----------
    best, least : float32 [R, S / P], the best and the least score in each page, descending.
    """

    best: torch.Tensor
    least: torch.Tensor


def rank_pages(scores: torch.Tensor, page_size: int) -> PageRanks:
    """Sort every head's keys by score and cut them into pages.

    Parameters
    ----------
    scores : float32 [R, S], one row per (layer, KV head); S is a multiple of `page_size`.
        NaN counts as infinite: sorts place it differently.

    Raises
    ------
    ValueError : if S is not a multiple of `page_size`.
    """
    rows, total = scores.shape
    if total % page_size:
        raise ValueError(f"scores of {total} positions are not pages of {page_size}")
    best, least = scores.new_empty(2, rows, total // page_size)
    at_once = max(1, rows // _PARTS)
    for first in range(0, rows, at_once):
        some = slice(first, first + at_once)
        part = torch.nan_to_num(scores[some], torch.inf, torch.inf, -torch.inf)
        ranked = part.sort(dim=-1, descending=True).values
        best[some] = ranked[:, ::page_size]
        least[some] = ranked[:, page_size - 1 :: page_size]
    return PageRanks(best, least)


@triton.jit
def _load_scores(scores, position, total):
    """Scores of a row; infinite for NaN, as it was ranked, and least behind the end."""
    score = tl.load(scores + position, mask=position < total, other=float("-inf"))
    return tl.where(score != score, float("inf"), score)


@triton.jit
def _kept_kernel(
    scores, least, pages, page_end, positions, total, P: tl.constexpr, TILE: tl.constexpr
):
    """One program writes one row's positions.

    Kept are all scores above the threshold, which is the least score kept, and of those equal to
    it as many as fill the pages, lowest positions first.
    """
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(pages + row)
    if count == 0:
        return
    threshold = tl.load(least + row * (total // P) + count - 1)
    scores += row * total
    positions += (tl.load(page_end + row) - count) * P
    each = tl.arange(0, TILE)

    above = tl.zeros([TILE], tl.int32)
    for start in range(0, total, TILE):
        above += (_load_scores(scores, start + each, total) > threshold).to(tl.int32)
    ties = (count * P).to(tl.int32) - tl.sum(above)

    written = 0
    tied = 0
    for start in range(0, total, TILE):
        position = start + each
        score = _load_scores(scores, position, total)
        equal = (score == threshold).to(tl.int32)  # behind the end too, but never among the first
        nth_equal = tied + tl.cumsum(equal)
        keep = ((score > threshold) | ((equal > 0) & (nth_equal <= ties))).to(tl.int32)
        nth = written + tl.cumsum(keep) - 1
        tl.store(positions + nth, position.to(tl.int64), mask=keep > 0)
        tied += tl.sum(equal)
        written += tl.sum(keep)


def kept_positions(
    scores: torch.Tensor, ranks: PageRanks, pages: torch.Tensor, page_size: int, total: int
) -> torch.Tensor:
    """The kept positions of every head, ascending, heads one after the other.

    Of equal scores the lower positions are kept: what a stable sort puts first.

    Parameters
    ----------
    scores : float32 [R, S], contiguous, as `rank_pages` saw them.
    ranks : what it returned.
    pages : int64 [R], pages each head keeps, at most S / page_size.
    total : the sum of `pages`; the device is not asked.

    Returns
    -------
    positions : int64 [total * page_size]; head r's run starts at
        ``sum(pages[:r]) * page_size``.

    Raises
    ------
    ValueError : on shapes or types that do not fit together.
    """
    rows, length = scores.shape
    if scores.dtype != torch.float32 or not scores.is_contiguous():
        raise ValueError(f"scores are {scores.dtype}; contiguous float32 is needed")
    if ranks.least.shape != (rows, length // page_size):
        raise ValueError(f"ranks are of other scores than {list(scores.shape)}")
    if pages.dtype != torch.int64 or pages.shape != (rows,) or not pages.is_contiguous():
        raise ValueError(f"pages is {pages.dtype} {list(pages.shape)}, not int64 [{rows}]")
    positions = torch.empty(total * page_size, dtype=torch.int64, device=scores.device)
    if total:
        _kept_kernel[(rows,)](
            scores, ranks.least, pages, pages.cumsum(0), positions, length,
            P=page_size, TILE=_TILE,
        )  # fmt: skip
    return positions
