"""Causal attention of new tokens over what a request already holds."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def extend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """The new tokens are the last of `keys`; each sees every key up to its own.

    Parameters
    ----------
    query : [q, Hq, D], the new tokens.
    keys, values : [n, H, D] and [n, H, Dv], prefix then new tokens, n >= q.

    Returns
    -------
    out : [q, Hq, Dv] in the query's dtype.
    """
    new, total = query.shape[0], keys.shape[0]
    mask = None
    if 1 < new < total:
        last_visible = torch.arange(total - new, total, device=query.device)
        mask = torch.arange(total, device=query.device) <= last_visible[:, None]
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys.to(query.dtype).transpose(0, 1)[None],
        values.to(query.dtype).transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=new == total,
        scale=scale,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    return out[0].transpose(0, 1)


def extend_compressed(
    query: torch.Tensor,
    segment_keys: list[torch.Tensor],
    segment_values: list[torch.Tensor],
    tail_keys: torch.Tensor,
    tail_values: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """`extend` when the prefix is compressed: every head has a segment of its own length.

    Parameters
    ----------
    query : [q, H*G, D].
    segment_keys, segment_values : per KV head, [n_h, D] and [n_h, Dv]; all visible.
    tail_keys, tail_values : [t, H, D] and [t, H, Dv], the tail with the new tokens last.

    Returns
    -------
    out : [q, H*G, Dv] in the query's dtype.
    """
    heads = tail_keys.shape[1]
    grouped = query.view(query.shape[0], heads, -1, query.shape[-1])
    out = [
        extend(
            grouped[:, head],
            torch.cat([segment_keys[head], tail_keys[:, head]])[:, None],
            torch.cat([segment_values[head], tail_values[:, head]])[:, None],
            scale,
        )
        for head in range(heads)
    ]
    return torch.stack(out, dim=1).reshape(query.shape[0], -1, tail_values.shape[-1])


def extend_reference(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """`extend`, one token and head at a time, in float32."""
    new, total = query.shape[0], keys.shape[0]
    group = query.shape[1] // keys.shape[1]
    out = torch.zeros(new, query.shape[1], values.shape[-1])
    for token in range(new):
        visible = total - new + token + 1
        for head in range(query.shape[1]):
            logits = keys[:visible, head // group].float() @ query[token, head].float() * scale
            out[token, head] = logits.softmax(0) @ values[:visible, head // group].float()
    return out
