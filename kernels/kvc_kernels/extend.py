"""Causal attention of new tokens over what their requests hold, compressed or not."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvc_kernels.batch import Batch, head_kvs_reference
from kvc_kernels.decode import check_query
from kvc_kernels.dispatch import use_triton


def extend(
    query: torch.Tensor, batch: Batch, layer: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of one layer in a prefill (chunk).

    Every new token sees all of its request's spans, and the tail up to itself.

    Parameters
    ----------
    query : [t, H*G, D], the new tokens of all requests one after the other, dense but for its
        first stride.
    batch : their requests, with `new`, on a CPU with `rows`. The new tokens are the last of
        every tail, and their KVs are in the cache already.
    layer : of the arena.
    scale : factor on the logits.

    Returns
    -------
    out : [t, H*G, Dv] in the query's dtype.
    lse : float32 [t, H*G], natural log of the sum of exponentials; None where torch does not
        tell it (`attend`).

    Raises
    ------
    ValueError : if the query does not fit the cache.
    """
    check_query(query, batch)
    if use_triton(query):
        from kvc_kernels.gpu import extend as gpu

        return gpu.extend(query, batch, layer, scale)
    return extend_torch(query, batch, layer, scale)


def extend_torch(
    query: torch.Tensor, batch: Batch, layer: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`extend` in torch, on any device."""
    assert batch.rows is not None
    cache, page_size = batch.cache, batch.cache.page_size
    group = query.shape[1] // cache.heads
    out = query.new_empty(*query.shape[:2], cache.flat_v.shape[-1])
    lse: torch.Tensor | None = query.new_empty(query.shape[:2], dtype=torch.float32)
    first = first_page = 0
    for (_, _, new), held in zip(batch.rows, batch.held[layer], strict=True):
        tokens = slice(first, first + new)
        first += new
        # Heads that hold equally many KVs take one step together.
        together = cache.heads if len(set(held)) == 1 else 1
        for head in range(0, cache.heads, together):
            count = together * -(-held[head] // page_size)
            pages = batch.head_pages[layer].page[first_page : first_page + count]
            first_page += count
            if not new:
                continue
            keys, values = (
                flat.index_select(0, pages).view(together, -1, flat.shape[-1])[:, : held[head]]
                for flat in (cache.flat_k, cache.flat_v)
            )
            lanes = slice(head * group, (head + together) * group)
            out[tokens, lanes], sums = attend(query[tokens, lanes], keys, values, scale)
            if lse is not None and sums is not None:
                lse[tokens, lanes] = sums
            else:
                lse = None
    return out, lse


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Causal attention of one request in torch.

    Parameters
    ----------
    query : [q, H*G, D], the last of the tokens of `keys` [H, n, D] and `values` [H, n, Dv].

    Returns
    -------
    out : [q, H*G, Dv] in the query's dtype.
    lse : float32 [q, H*G], natural. On a CPU, torch's kernel has it at hand, if D is Dv; elsewhere
        None.
    """
    new, total = query.shape[0], keys.shape[1]
    mask, causal, group = None, new == total, query.shape[1] // keys.shape[0]
    if 1 < new < total:
        last_visible = torch.arange(total - new, total, device=query.device)
        hidden = torch.arange(total, device=query.device) > last_visible[:, None]
        mask = torch.zeros_like(hidden, dtype=query.dtype).masked_fill_(hidden, float("-inf"))
    rows = query.transpose(0, 1)[None]
    keys, values = keys.to(query.dtype)[None], values.to(query.dtype)[None]
    if query.device.type == "cpu" and query.shape[-1] == values.shape[-1]:
        # What scaled_dot_product_attention calls here, and drops the log-sum-exp of.
        keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            rows, keys, values, 0.0, causal, attn_mask=mask, scale=scale
        )
        return out[0].transpose(0, 1), lse[0].transpose(0, 1)
    out = F.scaled_dot_product_attention(
        rows, keys, values, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=group > 1
    )
    return out[0].transpose(0, 1), None


def extend_reference(
    query: torch.Tensor, batch: Batch, layer: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`extend`, one request and head at a time; `out` is float32."""
    assert batch.rows is not None
    cache = batch.cache
    grouped = query.unflatten(1, (cache.heads, -1))
    out = torch.zeros(*grouped.shape[:3], cache.flat_v.shape[-1])
    lse = torch.zeros(grouped.shape[:3])
    first = 0
    for request, (_, _, new) in enumerate(batch.rows):
        mine = slice(first, first + new)
        first += new
        for head in range(cache.heads):
            keys, values = head_kvs_reference(batch, request, layer, head)
            out[mine, head], lse[mine, head] = attend_reference(
                grouped[mine, head], keys[:, None], values[:, None], scale
            )
    return out.flatten(1, 2), lse.flatten(1, 2)


def attend_reference(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention in float32, one token and head at a time.

    Parameters
    ----------
    query : [q, H*G, D], the last of the `keys` [n, H, D] and `values` [n, H, Dv].

    Returns
    -------
    out, lse : float32 [q, H*G, Dv] and [q, H*G].
    """
    new, total = query.shape[0], keys.shape[0]
    group = query.shape[1] // keys.shape[1]
    out = torch.zeros(new, query.shape[1], values.shape[-1])
    lse = torch.zeros(new, query.shape[1])
    for token in range(new):
        visible = total - new + token + 1
        for head in range(query.shape[1]):
            logits = keys[:visible, head // group].float() @ query[token, head].float() * scale
            out[token, head] = logits.softmax(0) @ values[:visible, head // group].float()
            lse[token, head] = logits.logsumexp(0)
    return out, lse
