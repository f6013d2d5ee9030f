"""Attention a prompt's queries pay to its keys, in blocks of queries: what scorers add up.

Queries are [w, H*G, D] and keys [n, H, D]: the queries are those of the last ``w`` positions,
query head ``h*G + g`` reads KV head ``h``, and query ``i`` sees keys up to ``n - w + i``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from kvc_kernels.dispatch import use_triton

#: `put_first` scales scores of [1e-12, 1e7] to [1e9, 1e28]: above every other score, below what
#: selection itself protects. A factor, so that small scores keep their order.
_FIRST, _MIN, _MAX = 1e21, 1e-12, 1e7
#: What zero counts where scores are multiplied as logarithms.
_LEAST = 1e-36


def block_elements(like: torch.Tensor) -> int:
    """Elements to compute at a time in float32: 2 MiB stay in a CPU's cache, a GPU gets 64."""
    return 1 << 19 if like.device.type == "cpu" else 1 << 24


def causal_logits(
    queries: torch.Tensor, keys: torch.Tensor, scale: float, *, block: int | None = None
) -> Iterator[tuple[int, torch.Tensor]]:
    """Logits of as many queries at a time as `block` elements hold, at least one.

    Yields
    ------
    first : position of the block's first query.
    logits : float32 [H, G, b, m], of its ``b`` queries over the ``m`` keys that its last one
        sees; -inf for keys behind a query. The caller may overwrite it.
    """
    window, (n, heads, dim) = queries.shape[0], keys.shape
    group = queries.shape[1] // heads
    by_head = keys.float().permute(1, 2, 0)  # [H, D, n]
    step = max(1, (block or block_elements(keys)) // (n * heads * group))
    for begin in range(0, window, step):
        chosen = queries[begin : begin + step].float() * scale
        size, first = chosen.shape[0], n - window + begin
        seen = first + size
        rows = chosen.view(size, heads, group, dim).permute(1, 2, 0, 3)
        logits = (rows.reshape(heads, -1, dim) @ by_head[..., :seen]).view(heads, group, size, seen)
        positions = torch.arange(seen, device=keys.device)
        yield first, logits.masked_fill_(positions > positions[first:, None], float("-inf"))


def causal_lse(
    queries: torch.Tensor, keys: torch.Tensor, scale: float, *, block: int | None = None
) -> torch.Tensor:
    """float32 [w, H*G], natural log-sum-exp of every query's logits over the keys it sees.

    For prefills whose attention kernel does not tell it; costs as much as their logits do.
    """
    if use_triton(keys):
        from kvc_kernels.gpu import score as gpu

        slots = torch.arange(len(keys), dtype=torch.int32, device=keys.device)
        return gpu.window_lse(queries, keys[:, :, None], slots, scale)
    parts = [
        logits.logsumexp(dim=-1).permute(2, 0, 1).flatten(1)
        for _, logits in causal_logits(queries, keys, scale, block=block)
    ]
    return torch.cat(parts)


def causal_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
    *,
    lse: torch.Tensor | None = None,
    block: int | None = None,
) -> Iterator[tuple[int, torch.Tensor]]:
    """`causal_logits` after the softmax: zero for keys behind a query.

    Parameters
    ----------
    lse : float32 [w, H*G], natural log-sum-exp of every query's logits, if they are known.
    """
    for first, logits in causal_logits(queries, keys, scale, block=block):
        if lse is None:
            yield first, logits.softmax(dim=-1)
            continue
        heads, group, size = logits.shape[:3]
        begin = first - (keys.shape[0] - queries.shape[0])
        sums = lse[begin : begin + size].view(size, heads, group).permute(1, 2, 0)
        yield first, logits.sub_(sums[..., None]).exp_()


def window_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
    power: int = 1,
    *,
    group: str = "sum",
    excluded: int = 0,
    lse: torch.Tensor | None = None,
    block: int | None = None,
) -> torch.Tensor:
    """Attention every key receives from the queries, summed over them and their group.

    Parameters
    ----------
    power : 1 sums attention (SnapKV, arXiv 2404.14469), 2 sums its square (KV-Compress,
        arXiv 2410.00161, eq. 8).
    group : "sum" adds the powers of a group's heads; "mean" takes the power of their mean.
    excluded : a query does not count for the keys less than this many positions before it
        (KV-Compress, eq. 19).
    lse : float32 [w, H*G], natural log-sum-exp of every query's logits, if attention has been
        computed already; it saves a pass over the keys.
    block : elements of logits at a time; on a GPU there are never that many.

    Returns
    -------
    scores : float32 [H, n].
    """
    if use_triton(keys):
        from kvc_kernels.gpu import score as gpu

        slots = torch.arange(len(keys), dtype=torch.int32, device=keys.device)
        pages = keys[:, :, None]  # of one key each
        return gpu.window_attention(
            queries, pages, slots, scale, power, group=group, excluded=excluded, lse=lse
        )
    scores = torch.zeros(keys.shape[1], keys.shape[0], device=keys.device)
    for first, attention in causal_attention(queries, keys, scale, lse=lse, block=block):
        seen = attention.shape[-1]
        if excluded:
            positions = torch.arange(seen, device=keys.device)
            attention.masked_fill_(positions > positions[first:, None] - excluded, 0)
        if group == "mean":
            attention = attention.mean(dim=1, keepdim=True)
        if power != 1:
            attention = attention.pow_(power)
        scores[:, :seen] += attention.sum(dim=(1, 2))
    return scores


def window_attention_reference(
    queries: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
    power: int = 1,
    *,
    group: str = "sum",
    excluded: int = 0,
) -> torch.Tensor:
    """`window_attention`, one query and head at a time."""
    window, heads, n = queries.shape[0], keys.shape[1], keys.shape[0]
    size = queries.shape[1] // heads
    scores = torch.zeros(heads, n, dtype=torch.float32)
    for i in range(window):
        position = n - window + i
        counted = max(0, position + 1 - excluded)
        for head in range(heads):
            members = []
            for member in range(size):
                query = queries[i, head * size + member].float()
                logits = keys[: position + 1, head].float() @ query * scale
                members.append(logits.softmax(0)[:counted])
            rows = torch.stack(members)
            rows = rows.mean(0, keepdim=True) if group == "mean" else rows
            scores[head, :counted] += (rows**power).sum(0)
    return scores


def pool_neighbours(scores: torch.Tensor, width: int, how: str = "max") -> torch.Tensor:
    """Every score becomes the largest or the mean of the `width` around it. [R, n] -> [R, n].

    `width` is odd; beyond the ends there are zeros for the mean, nothing for the maximum.
    Keeps the neighbours of a key that matters (SnapKV, section 4.2).
    """
    if width == 1 or not scores.shape[-1]:
        return scores
    if how == "max":
        return F.max_pool1d(scores[None], width, stride=1, padding=width // 2)[0]
    # Sums of shifted rows: on a CPU ten times as fast as avg_pool1d.
    padded, n = F.pad(scores, (width // 2, width // 2)), scores.shape[1]
    total = padded[:, :n].clone()
    for shift in range(1, width):
        total += padded[:, shift : shift + n]
    return total / width


def fade_to_neighbours(scores: torch.Tensor, half_life: float | torch.Tensor) -> torch.Tensor:
    """Every score becomes the largest around it, halved every `half_life` positions away.

    ``max over j of scores[j] * 2 ** (-|i - j| / half_life)``, [..., n] -> [..., n]: a pool over
    neighbours without a width. With much room far neighbours of a key that matters are kept
    too, with little room only near ones. Two cumulative maxima of logarithms.

    Parameters
    ----------
    scores : at least 0.
    half_life : in positions, above 0; a tensor [..., 1] has one for every row.
    """
    slope = torch.arange(scores.shape[-1], device=scores.device, dtype=torch.float64)
    slope = slope * (math.log(2) / half_life)
    logs = scores.double().clamp(min=_LEAST).log()
    before = (logs + slope).cummax(dim=-1).values - slope
    after = (logs - slope).flip(-1).cummax(dim=-1).values.flip(-1) + slope
    return torch.maximum(before, after).exp().to(scores.dtype)


def put_first(scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """`scores` (>= 0) in which the `chosen` keys rank above all others and keep their order.

    Above those of other heads and layers too, so that any apportioner sees it.
    """
    return torch.where(chosen, scores.clamp(_MIN, _MAX) * _FIRST, scores)


def put_last_first(scores: torch.Tensor, count: int) -> torch.Tensor:
    """`put_first` for the last `count` keys."""
    n = scores.shape[-1]
    return put_first(scores, torch.arange(n, device=scores.device) >= n - count)


def projected_norm(
    values: torch.Tensor, projection: torch.Tensor, *, block: int = 1 << 18
) -> torch.Tensor:
    """L1 norm of every value after the output projection, averaged over its query heads.

    How far the value can move the layer's output (CriticalKV, arXiv 2502.03805).

    Parameters
    ----------
    values : [n, H, Dv].
    projection : [hidden, H*G*Dv].
    block : elements projected at a time; such that they stay in a CPU's cache.

    Returns
    -------
    norms : float32 [H, n].
    """
    heads, dim = values.shape[1:]
    hidden = projection.shape[0]
    group = projection.shape[1] // (heads * dim)
    by_head = projection.float().view(hidden, heads, group, dim).permute(1, 3, 2, 0).flatten(2)
    norms = []
    for part in values.split(max(1, block // (heads * group * hidden))):
        projected = part.float().transpose(0, 1) @ by_head  # [H, b, G*hidden]
        norms.append(projected.abs().sum(dim=-1) / group)
    return torch.cat(norms, dim=1)


def projected_norm_reference(values: torch.Tensor, projection: torch.Tensor) -> torch.Tensor:
    """`projected_norm`, one value and head at a time."""
    n, heads, dim = values.shape
    group = projection.shape[1] // (heads * dim)
    norms = torch.zeros(heads, n)
    for head in range(heads):
        for member in range(head * group, (head + 1) * group):
            columns = projection[:, member * dim : (member + 1) * dim].float()
            for i in range(n):
                norms[head, i] += (columns @ values[i, head].float()).abs().sum() / group
    return norms
