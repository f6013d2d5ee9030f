"""Attention of one query per request over all that it holds."""

from __future__ import annotations

import torch

from kvc_kernels.batch import Batch, head_kvs_reference, head_pages_reference
from kvc_kernels.dispatch import use_triton


def decode(
    query: torch.Tensor,
    batch: Batch,
    layer: int,
    scale: float,
    *,
    metric: torch.Tensor | None = None,
    tracked: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one layer in a decode step.

    Parameters
    ----------
    query : [B, H*G, D], dense but for its first stride.
    batch : its requests; their new KVs are in the cache already.
    layer : of the arena.
    scale : factor on the logits.
    metric : float32 [num_blocks, L, H, P], written: a power of attention, summed over the query
        group, is added to the KVs of `tracked` requests (arXiv 2410.00161, eq. 20), but for those
        of shared spans, which belong to others.
    tracked : int32 [rows], by request row: the power, 1 or 2; 0 for none. Needed with `metric`.

    Returns
    -------
    out : [B, H*G, Dv] in the query's dtype; zero for a head without KVs.
    lse : float32 [B, H*G], natural log of the sum of exponentials; -inf without KVs.

    Raises
    ------
    ValueError : if the query does not fit the cache.
    """
    check_query(query, batch)
    if use_triton(query):
        from kvc_kernels.gpu import decode as gpu

        return gpu.decode(query, batch, layer, scale, metric=metric, tracked=tracked)
    return decode_torch(query, batch, layer, scale, metric=metric, tracked=tracked)


def decode_torch(
    query: torch.Tensor,
    batch: Batch,
    layer: int,
    scale: float,
    *,
    metric: torch.Tensor | None = None,
    tracked: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`decode` in torch, on any device; work and memory follow the pages there are."""
    cache, pages = batch.cache, batch.head_pages[layer]
    requests, query_heads, dim = query.shape
    owners, group = requests * cache.heads, query_heads // cache.heads
    grouped = query.reshape(owners, group, dim).float()
    keys = cache.flat_k.index_select(0, pages.page).float()
    logits = torch.bmm(grouped.index_select(0, pages.owner), keys.mT) * scale
    del keys  # its memory is still in the processor's cache, for the values
    logits.masked_fill_(pages.absent[:, None], float("-inf"))

    by_owner = pages.owner[:, None].expand(-1, group)
    largest = logits.new_full((owners, group), float("-inf"))
    largest.scatter_reduce_(0, by_owner, logits.amax(-1), "amax")
    weights = logits.sub_(largest.index_select(0, pages.owner)[..., None]).exp_()
    total = logits.new_zeros(owners, group).index_add_(0, pages.owner, weights.sum(-1))
    out = logits.new_zeros(owners, group, cache.flat_v.shape[-1])
    values = cache.flat_v.index_select(0, pages.page).float()
    out.index_add_(0, pages.owner, torch.bmm(weights, values))
    if metric is not None:
        assert tracked is not None
        mine = batch.tracked_pages(tracked)[layer]
        page, owner = (each.index_select(0, mine) for each in (pages.page, pages.owner))
        attention = weights.index_select(0, mine).div_(total.index_select(0, owner)[..., None])
        power = tracked.index_select(0, batch.request.long()).index_select(0, owner // cache.heads)
        attention.pow_(power[:, None, None])
        metric.flatten(0, 2).index_add_(0, page, attention.sum(1))
    out /= total.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    lse = largest + total.log()
    shape = requests, query_heads
    return out.view(*shape, out.shape[-1]).to(query.dtype), lse.view(shape)


def decode_reference(
    query: torch.Tensor,
    batch: Batch,
    layer: int,
    scale: float,
    *,
    metric: torch.Tensor | None = None,
    tracked: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`decode`, one request and head at a time; `out` is float32."""
    cache = batch.cache
    grouped = query.unflatten(1, (cache.heads, -1)).float()
    out = torch.zeros(*grouped.shape[:3], cache.flat_v.shape[-1])
    lse = torch.zeros(grouped.shape[:3])
    for request, row in enumerate(batch.request.tolist()):
        for head in range(cache.heads):
            keys, values = head_kvs_reference(batch, request, layer, head)
            logits = grouped[request, head] @ keys.T * scale
            out[request, head] = logits.softmax(-1) @ values
            lse[request, head] = logits.logsumexp(-1)
            if metric is None:
                continue
            assert tracked is not None
            if not tracked[row]:
                continue
            pages = head_pages_reference(batch, request, layer, head)
            paid = (logits.softmax(-1) ** int(tracked[row])).sum(0)
            paid = paid.split([length for _, length, _ in pages])
            for (page, length, span), part in zip(pages, paid, strict=True):
                if span:
                    metric.flatten(0, 2)[page, :length] += part
    return out.flatten(1, 2), lse.flatten(1, 2)


def check_query(query: torch.Tensor, batch: Batch) -> None:
    """Raise ValueError unless `query` [n, H*G, D] is dense and fits the batch's cache."""
    heads, dim = batch.cache.heads, batch.cache.arena_k.shape[-1]
    dense = query.is_contiguous() or query[:1].is_contiguous()
    if query.shape[1] % heads or query.shape[2] != dim or not dense:
        raise ValueError(f"query {tuple(query.shape)} does not fit {heads} KV heads of {dim}")
