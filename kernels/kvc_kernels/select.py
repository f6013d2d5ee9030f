"""From scores and pages per head to the positions that are kept (arXiv 2410.00161, alg. 1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvc_kernels.dispatch import use_triton

if TYPE_CHECKING:
    from kvc_kernels.gpu.select import PageRanks


def rank_pages(
    scores: torch.Tensor, page_size: int
) -> tuple[torch.Tensor | PageRanks, torch.Tensor]:
    """Sort every head's keys by score and cut them into pages.

    Parameters
    ----------
    scores : float32 [R, S], one row per (layer, KV head); S is a multiple of `page_size`.

    Returns
    -------
    order : for `kept_positions`: int64 [R, S], positions by descending score, equal scores by
        position; on a GPU what stands for it in less memory.
    page_scores : float32 [R, S / page_size], the best score in each page, descending.
    """
    if use_triton(scores):
        from kvc_kernels.gpu import select as gpu

        ranks = gpu.rank_pages(scores, page_size)
        return ranks, ranks.best
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    return order, ranked[:, ::page_size].contiguous()


def kept_positions(
    scores: torch.Tensor,
    order: torch.Tensor | PageRanks,
    pages: torch.Tensor,
    page_size: int,
    total: int,
) -> torch.Tensor:
    """The kept positions of every head, ascending, heads one after the other.

    Parameters
    ----------
    scores, order : what `rank_pages` was given and gave.
    pages : int64 [R], pages each head keeps, at most S / page_size.
    total : the sum of `pages`.

    Returns
    -------
    positions : int64 [total * page_size]; head r's run starts at
        ``sum(pages[:r]) * page_size``.
    """
    if use_triton(scores):
        from kvc_kernels.gpu import select as gpu

        assert isinstance(order, gpu.PageRanks)
        return gpu.kept_positions(scores, order, pages, page_size, total)
    assert isinstance(order, torch.Tensor)
    nth = torch.arange(order.shape[1], device=order.device)
    kept = torch.zeros_like(order, dtype=torch.bool)
    kept.scatter_(1, order, nth < pages[:, None] * page_size)
    return kept.nonzero()[:, 1]


def kept_positions_reference(
    scores: torch.Tensor, pages: torch.Tensor, page_size: int
) -> torch.Tensor:
    """`kept_positions` of the ranking of `scores`, one head at a time."""
    kept = []
    for row, count in zip(scores.tolist(), pages.tolist(), strict=True):
        best = sorted(range(len(row)), key=lambda position: (-row[position], position))
        kept += sorted(best[: count * page_size])
    return torch.tensor(kept, dtype=torch.int64)
