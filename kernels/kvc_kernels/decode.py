"""Attention of one query per request over its segment and tail."""

from __future__ import annotations

import torch

from kvc_kernels.pages import HeadPages


def decode(
    query: torch.Tensor,
    arena_k: torch.Tensor,
    arena_v: torch.Tensor,
    pages: HeadPages,
    scale: float,
    metric: torch.Tensor | None = None,
    counted: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over head pages; work and memory follow the pages there are, no padding.

    Parameters
    ----------
    query : [B, H*G, D].
    arena_k, arena_v : flat views [num_pages, P, D] and [num_pages, P, Dv].
    pages : what each of the ``B * H`` owners reads.
    scale : factor on the logits.
    metric : float32 [num_pages, P]; squared attention, summed over the query group, is added
        to the KVs of owners that are `counted` (arXiv 2410.00161, eq. 20).
    counted : bool [B * H].

    Returns
    -------
    out : float32 [B, H*G, Dv]; zero for an owner without KVs.
    lse : float32 [B, H*G], natural log of the sum of exponentials; -inf without KVs.
    """
    owners = len(pages.count)
    grouped = query.reshape(owners, -1, query.shape[-1]).float()
    group = grouped.shape[1]
    logits = torch.bmm(grouped[pages.owner], arena_k.index_select(0, pages.page).float().mT) * scale
    absent = torch.arange(arena_k.shape[1], device=query.device) >= pages.length[:, None]
    logits.masked_fill_(absent[:, None], float("-inf"))

    by_owner = pages.owner[:, None].expand(-1, group)
    largest = logits.new_full((owners, group), float("-inf"))
    largest.scatter_reduce_(0, by_owner, logits.amax(-1), "amax")
    weights = logits.sub_(largest[pages.owner][..., None]).exp_()
    total = logits.new_zeros(owners, group).index_add_(0, pages.owner, weights.sum(-1))
    out = logits.new_zeros(owners, group, arena_v.shape[-1])
    out.index_add_(0, pages.owner, torch.bmm(weights, arena_v.index_select(0, pages.page).float()))
    if metric is not None:
        mine = counted[pages.owner].nonzero().squeeze(1)
        attention = weights[mine] / total[pages.owner[mine]][..., None]
        metric.index_add_(0, pages.page[mine], attention.square_().sum(1))
    out /= total.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    return out.view(query.shape[0], -1, arena_v.shape[-1]), (largest + total.log()).view(
        query.shape[0], -1
    )


def decode_reference(
    query: torch.Tensor,
    arena_k: torch.Tensor,
    arena_v: torch.Tensor,
    pages: HeadPages,
    scale: float,
    metric: torch.Tensor | None = None,
    counted: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`decode`, one request and head at a time."""
    owners = len(pages.count)
    grouped = query.reshape(owners, -1, query.shape[-1]).float()
    out = torch.zeros(*grouped.shape[:2], arena_v.shape[-1])
    lse = torch.full(grouped.shape[:2], float("-inf"))
    for owner in range(owners):
        mine = (pages.owner == owner).nonzero().flatten().tolist()
        if not mine:
            continue
        spans = [(int(pages.page[i]), int(pages.length[i])) for i in mine]
        keys = torch.cat([arena_k[page, :length] for page, length in spans]).float()
        values = torch.cat([arena_v[page, :length] for page, length in spans]).float()
        logits = grouped[owner] @ keys.T * scale
        out[owner] = logits.softmax(-1) @ values
        lse[owner] = logits.logsumexp(-1)
        if metric is not None and counted[owner]:
            squares = (logits.softmax(-1) ** 2).sum(0)
            for (page, length), part in zip(
                spans, squares.split([length for _, length in spans]), strict=True
            ):
                metric[page, :length] += part
    return out.view(query.shape[0], -1, arena_v.shape[-1]), lse.view(query.shape[0], -1)
