"""Attention of the last queries of a prompt over its keys: the score of window policies."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def window_attention(
    queries: torch.Tensor, keys: torch.Tensor, scale: float, power: int
) -> torch.Tensor:
    """Attention every key receives from the window, summed over queries and their group.

    Parameters
    ----------
    queries : [w, H*G, D], the last ``w`` queries of the prompt, rotated; query head
        ``h*G + g`` reads KV head ``h``.
    keys : [n, H, D], all keys of the prompt, the last ``w`` of them the window's own.
    scale : factor on the logits.
    power : 1 sums attention (SnapKV, arXiv 2404.14469), 2 sums its square (KV-Compress,
        arXiv 2410.00161, eq. 8).

    Returns
    -------
    scores : float32 [H, n]; query ``i`` of the window sees keys up to ``n - w + i``.
    """
    window, heads, n = queries.shape[0], keys.shape[1], keys.shape[0]
    grouped = queries.float().view(window, heads, -1, queries.shape[-1])
    logits = torch.einsum("whgd,nhd->hgwn", grouped, keys.float()) * scale
    last_visible = torch.arange(n - window, n, device=keys.device)
    hidden = torch.arange(n, device=keys.device) > last_visible[:, None]
    attention = logits.masked_fill_(hidden, float("-inf")).softmax(dim=-1)
    return attention.pow_(power).sum(dim=(1, 2)) if power != 1 else attention.sum(dim=(1, 2))


def max_pool(scores: torch.Tensor, width: int) -> torch.Tensor:
    """Every score becomes the largest of the `width` scores around it. [H, n] -> [H, n].

    `width` is odd. Keeps the neighbours of a key that matters (SnapKV, section 4.2).
    """
    if width == 1:
        return scores
    return F.max_pool1d(scores[None], width, stride=1, padding=width // 2)[0]


def window_attention_reference(
    queries: torch.Tensor, keys: torch.Tensor, scale: float, power: int
) -> torch.Tensor:
    """`window_attention`, one query and head at a time."""
    window, heads, n = queries.shape[0], keys.shape[1], keys.shape[0]
    group = queries.shape[1] // heads
    scores = torch.zeros(heads, n, dtype=torch.float32)
    for i in range(window):
        visible = n - window + i + 1
        for head in range(heads):
            for member in range(group):
                query = queries[i, head * group + member].float()
                logits = keys[:visible, head].float() @ query * scale
                scores[head, :visible] += logits.softmax(0) ** power
    return scores
