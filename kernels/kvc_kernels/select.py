"""From scores and pages per head to the positions that are kept (arXiv 2410.00161, alg. 1)."""

from __future__ import annotations

import torch


def rank_pages(scores: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort every head's keys by score and cut them into pages.

    Parameters
    ----------
    scores : float32 [R, S], one row per (layer, KV head); S is a multiple of `page_size`.

    Returns
    -------
    order : int64 [R, S], positions by descending score; equal scores by position.
    page_scores : float32 [R, S / page_size], the best score in each page, descending.
    """
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    return order, ranked[:, ::page_size].contiguous()


def kept_positions(order: torch.Tensor, pages: torch.Tensor, page_size: int) -> torch.Tensor:
    """The kept positions of every head, ascending, heads one after the other.

    Parameters
    ----------
    order : int64 [R, S] as `rank_pages` gives it.
    pages : int64 [R], pages each head keeps, at most S / page_size.

    Returns
    -------
    positions : int64 [sum(pages) * page_size]; head r's run starts at
        ``sum(pages[:r]) * page_size``.
    """
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
