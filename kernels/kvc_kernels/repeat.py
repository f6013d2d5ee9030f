"""Attention that keys would get if their text were read once more, and how alone they stand."""

from __future__ import annotations

import torch

from kvc_kernels.dispatch import use_triton
from kvc_kernels.score import block_elements


def repeat_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
    lse: torch.Tensor,
    *,
    block: int | None = None,
) -> torch.Tensor:
    """The most attention a key gets from any query that is asked again, behind the keys.

    KVzip (arXiv 2505.23416) reads a prompt a second time, part by part, and keeps what that
    reading attends to. Here the first reading's queries stand for the second's: every one sees
    all keys of its part, before and after it, and besides what it attended to the first time::

        a[i, j] = exp(l[i, j] - logaddexp(logsumexp of l[i] over the keys, lse[i]))

    Parameters
    ----------
    queries : [c, H*G, D], rotated to where they are asked again.
    keys : [n, H, D].
    scale : factor on the logits.
    lse : float32 [c, H*G], natural log-sum-exp of what else every query sees.
    block : logits held at a time; on a GPU there are never that many.

    Returns
    -------
    scores : float32 [H, n] in [0, 1], the maximum over queries and the query group.
    """
    n, heads, dim = keys.shape
    if use_triton(keys):
        from kvc_kernels.gpu import repeat as gpu

        return gpu.repeat_parts(queries, keys, scale, lse, len(queries), n)
    by_head = keys.float().permute(1, 2, 0)  # [H, D, n]
    best = torch.full((heads, n), float("-inf"), device=keys.device)
    step = max(1, (block or block_elements(keys)) // (n * queries.shape[1]))
    for some, known in zip(queries.split(step), lse.split(step), strict=True):
        rows = (some.float() * scale).view(len(some), heads, -1, dim).permute(1, 2, 0, 3)
        logits = rows.reshape(heads, -1, dim) @ by_head  # [H, G*b, n]
        sums = known.view(len(some), heads, -1).permute(1, 2, 0).reshape(heads, -1)
        sums = torch.logaddexp(logits.logsumexp(dim=-1), sums)
        best = best.maximum(logits.sub_(sums[..., None]).amax(dim=1))
    return best.exp()


def repeat_parts(
    queries: torch.Tensor, keys: torch.Tensor, scale: float, lse: torch.Tensor, part: int
) -> torch.Tensor:
    """`repeat_attention` of every `part` tokens by themselves; on a GPU two launches for all.

    Parameters
    ----------
    queries, lse, keys : of the same tokens.

    Returns
    -------
    scores : float32 [H, n].
    """
    if use_triton(keys):
        from kvc_kernels.gpu import repeat as gpu

        return gpu.repeat_parts(queries, keys, scale, lse, part, part)
    parts = zip(queries.split(part), keys.split(part), lse.split(part), strict=True)
    return torch.cat([repeat_attention(q, k, scale, sums) for q, k, sums in parts], dim=1)


def repeat_attention_reference(
    queries: torch.Tensor, keys: torch.Tensor, scale: float, lse: torch.Tensor
) -> torch.Tensor:
    """`repeat_attention`, one query and head at a time."""
    n, heads = keys.shape[:2]
    group = queries.shape[1] // heads
    scores = torch.zeros(heads, n)
    for i in range(len(queries)):
        for lane in range(queries.shape[1]):
            logits = keys[:, lane // group].float() @ queries[i, lane].float() * scale
            total = logits.exp().sum() + lse[i, lane].exp()
            scores[lane // group] = scores[lane // group].maximum(logits.exp() / total)
    return scores


def leverage(keys: torch.Tensor, ridge: float = 0.01) -> torch.Tensor:
    """Statistical leverage of every key: float32 [H, n] in [0, 1].

    ``k (K'K + aI)^-1 k'``, `a` being `ridge` times the mean of K'K's diagonal: close to 1 for a
    key that the head's other keys cannot stand for, close to 0 where many point its way.

    Parameters
    ----------
    keys : [n, H, D].
    """
    by_head = keys.float().transpose(0, 1)  # [H, n, D]
    gram = by_head.transpose(1, 2) @ by_head
    least = ridge * gram.diagonal(dim1=1, dim2=2).mean(dim=-1)
    gram.diagonal(dim1=1, dim2=2).add_(least[:, None].clamp(min=1e-12))
    factor = torch.linalg.cholesky_ex(gram).L  # without waiting for the device
    solved = torch.linalg.solve_triangular(factor, by_head.transpose(1, 2), upper=False)
    return solved.square().sum(dim=1)


def leverage_reference(keys: torch.Tensor, ridge: float = 0.01) -> torch.Tensor:
    """`leverage`, one key and head at a time."""
    n, heads, dim = keys.shape
    scores = torch.zeros(heads, n)
    for head in range(heads):
        gram = torch.zeros(dim, dim, dtype=torch.float64)
        for i in range(n):
            gram += torch.outer(keys[i, head].double(), keys[i, head].double())
        inverse = (gram + ridge * gram.trace() / dim * torch.eye(dim)).inverse()
        for i in range(n):
            scores[head, i] = keys[i, head].double() @ inverse @ keys[i, head].double()
    return scores
