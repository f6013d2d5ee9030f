"""From scores to pages per head and the positions that are kept (arXiv 2410.00161, alg. 1)."""

from __future__ import annotations

import functools

import torch

from kvc_kernels.dispatch import use_triton

#: Above every score; falls towards the end of the protected positions so that, should the
#: budget not hold them all, sinks outlive recent keys and newer keys outlive older ones.
PROTECTED = 1e30


class RankedPages:
    """Every head's keys by score, best first, cut into pages; a page ranks by its best score.

    Equal scores rank by position, equal pages by head and then by page; NaN is infinite. On a CPU
    all keys are sorted, once. On a GPU they are only if `page_scores` is asked for: what else is
    asked needs no more than the scores at which pages begin to be kept.

    Parameters
    ----------
    scores : float32 [R, S], contiguous, one row per (layer, KV head). Not changed while this is
        in use.
    page_size : divides S.

    Raises
    ------
    ValueError : on scores that are not as above.
    """

    def __init__(self, scores: torch.Tensor, page_size: int):
        if scores.dtype != torch.float32 or not scores.is_contiguous():
            raise ValueError(f"scores are {scores.dtype}; contiguous float32 is needed")
        if scores.dim() != 2 or scores.shape[1] % page_size:
            raise ValueError(f"scores {list(scores.shape)} are not rows of pages of {page_size}")
        self.scores, self.page_size = scores, page_size

    @property
    def pages(self) -> int:
        """Pages of a row, S / P."""
        return self.scores.shape[1] // self.page_size

    @functools.cached_property
    def page_scores(self) -> torch.Tensor:
        """float32 [R, S / P], the best score in each page, descending."""
        return self._sorted[0][:, :: self.page_size].contiguous()

    def above(self, score: float) -> torch.Tensor:
        """int64 [R], pages whose best key has more than `score`."""
        keys = (self.scores > score).sum(dim=1)
        return (keys + (self.page_size - 1)) // self.page_size

    def compete(
        self,
        won: int | torch.Tensor,
        safe: int | torch.Tensor,
        groups: int,
        weights: torch.Tensor | None = None,
        limit: float = torch.inf,
    ) -> torch.Tensor:
        """Pages of every row, of which `safe` are its own and the others the best of its group.

        Parameters
        ----------
        won, safe : pages that each group's rows compete for, and those that a row has before, its
            best; int64 [groups] or the same for all. There are that many.
        groups : the rows are so many groups of neighbours, of equal size.
        weights : float32 [R], above 0: scores above 0 are multiplied by that of their row before
            rows compete, those below divided. None is ones.
        limit : scores above it are not weighted, and weighted ones become no more.

        Returns
        -------
        pages : int64 [R].
        """
        if use_triton(self.scores):
            from kvc_kernels.gpu import select as gpu

            return gpu.compete(self.scores, self.page_size, won, safe, groups, weights, limit)
        scores = self.page_scores.nan_to_num(torch.inf, torch.inf, -torch.inf)
        contested = weighted(scores, weights, limit).view(groups, -1, self.pages)
        own = torch.as_tensor(safe).expand(groups)[:, None]
        taken = torch.arange(self.pages) < own[..., None]
        contested = contested.masked_fill(taken, -torch.inf)
        counts = torch.as_tensor(won).expand(groups)[:, None]
        if isinstance(won, int):
            least = contested.flatten(1).topk(max(1, won), dim=1, sorted=False).values.amin(dim=1)
        else:
            best = contested.flatten(1).sort(dim=1, descending=True).values
            least = best.gather(1, (counts - 1).clamp(min=0))[:, 0]
        least = least[:, None, None]
        more = ((contested > least) & ~taken).sum(dim=2)
        equal = ((contested == least) & ~taken).sum(dim=2)
        left = counts - more.sum(dim=1, keepdim=True) - equal.cumsum(dim=1) + equal
        pages = more + torch.minimum(left.clamp(min=0), equal)
        return torch.where(counts > 0, own + pages, own).flatten()

    def kept_positions(self, pages: torch.Tensor, total: int, begin: int = 0) -> torch.Tensor:
        """The kept positions of every row, ascending, rows one after the other.

        Parameters
        ----------
        pages : int64 [R], pages each row keeps, at most S / P.
        total : the sum of `pages`; a device is not asked.
        begin : the first score's position.

        Returns
        -------
        positions : int64 [total * P]; row r's run starts at ``sum(pages[:r]) * P``.
        """
        if use_triton(self.scores):
            from kvc_kernels.gpu import select as gpu

            return gpu.kept_positions(self.scores, pages, self.page_size, total, begin)
        order = self._sorted[1]
        nth = torch.arange(order.shape[1])
        kept = torch.zeros_like(order, dtype=torch.bool)
        kept.scatter_(1, order, nth < pages[:, None] * self.page_size)
        return kept.nonzero()[:, 1] + begin

    @functools.cached_property
    def _sorted(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.scores.sort(dim=-1, descending=True, stable=True)


def weighted(
    scores: torch.Tensor, weights: torch.Tensor | None, limit: float
) -> torch.Tensor:
    """Scores [R, n] by the weights [R] of their rows, as `RankedPages.compete` has it."""
    if weights is None:
        return scores
    weight = weights.to(scores)[:, None]
    product = torch.where(scores > 0, scores * weight, scores / weight).clamp(max=limit)
    return torch.where(scores > limit, scores, product)


def compete_reference(
    page_scores: torch.Tensor, won: list[int], safe: list[int], groups: int
) -> torch.Tensor:
    """`RankedPages.compete` of scores [R, C], a page at a time; weights are in the scores."""
    pages = []
    for group, count, least in zip(page_scores.tensor_split(groups), won, safe, strict=True):
        contested = [
            (-score, row, nth)
            for row, scores in enumerate(group.tolist())
            for nth, score in enumerate(scores)
            if nth >= least
        ]
        winners = [row for _, row, _ in sorted(contested)[:count]]
        pages += [least + winners.count(row) for row in range(len(group))]
    return torch.tensor(pages)


def kept_positions_reference(
    scores: torch.Tensor, pages: torch.Tensor, page_size: int
) -> torch.Tensor:
    """`RankedPages.kept_positions`, one head at a time."""
    kept = []
    for row, count in zip(scores.tolist(), pages.tolist(), strict=True):
        best = sorted(range(len(row)), key=lambda position: (-row[position], position))
        kept += sorted(best[: count * page_size])
    return torch.tensor(kept, dtype=torch.int64)


def protect(
    scores: torch.Tensor, sinks: int, recent: int, first: torch.Tensor | None = None
) -> None:
    """Lift the first `sinks` and the last `recent` positions above every score, in place.

    Attention sinks: arXiv 2309.17453. Recent ones: what was read just before the answer.

    Parameters
    ----------
    scores : float32 [L, H, S], contiguous.
    first : int64 [L * H], where each head's KVs begin; None is zeros.
    """
    if use_triton(scores):
        from kvc_kernels.gpu import select as gpu

        gpu.protect(scores.view(-1, scores.shape[-1]), sinks, recent, first, PROTECTED)
        return
    total = scores.shape[-1]
    rank = torch.arange(total, device=scores.device, dtype=scores.dtype)
    last = slice(max(0, total - max(0, recent)), total)
    protected = PROTECTED * (1 + rank[last] / total)
    if first is None:
        scores[..., last] = protected
        sinks = min(sinks, total)
        scores[..., :sinks] = PROTECTED * (3 - rank[:sinks] / total)
        return
    held = total - first.view(*scores.shape[:2], 1)
    nth = rank - (total - held)
    scores[..., last] = torch.where(nth[..., last] >= 0, protected, -torch.inf)
    torch.where(
        (nth >= 0) & (nth < sinks), PROTECTED * (3 - nth / total), scores, out=scores
    )
