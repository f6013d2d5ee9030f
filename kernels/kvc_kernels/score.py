"""Attention a prompt's queries pay to its keys, in blocks of queries: what scorers add up.

Queries are [w, H*G, D] and keys [n, H, D]: the queries are those of the last ``w`` positions,
query head ``h*G + g`` reads KV head ``h``, and query ``i`` sees keys up to ``n - w + i``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from kvc_kernels.dispatch import use_triton
from kvc_kernels.windows import Window, WindowOptions

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
    if use_triton(scores):
        return smooth(scores, pool=width, pooling=how)
    if how == "max":
        return F.max_pool1d(scores[None], width, stride=1, padding=width // 2)[0]
    # Sums of shifted rows: on a CPU ten times as fast as avg_pool1d.
    padded, n = F.pad(scores, (width // 2, width // 2)), scores.shape[1]
    total = padded[:, :n].clone()
    for shift in range(1, width):
        total += padded[:, shift : shift + n]
    return total / width


def fade_to_neighbours(
    scores: torch.Tensor, half_life: float, half_lives: torch.Tensor | None = None
) -> torch.Tensor:
    """Every score becomes the largest around it, halved every `half_life` positions away.

    ``max over j of scores[j] * 2 ** (-|i - j| / half_life)``, [..., n] -> [..., n]: a pool over
    neighbours without a width. With much room far neighbours of a key that matters are kept
    too, with little room only near ones. Two cumulative maxima of logarithms.

    Parameters
    ----------
    scores : at least 0.
    half_life : in positions, above 0.
    half_lives : float64 [R] for scores [R, n], each row's own instead, none above `half_life`.
    """
    if use_triton(scores):
        rows = scores.reshape(scores.shape[:-1].numel(), scores.shape[-1])
        return smooth(rows, half_life=half_life, half_lives=half_lives).view_as(scores)
    slope = torch.arange(scores.shape[-1], device=scores.device, dtype=torch.float64)
    slope = slope * (math.log(2) / (half_life if half_lives is None else half_lives[:, None]))
    logs = scores.double().clamp(min=_LEAST).log()
    before = (logs + slope).cummax(dim=-1).values - slope
    after = (logs - slope).flip(-1).cummax(dim=-1).values.flip(-1) + slope
    return torch.maximum(before, after).exp().to(scores.dtype)


def smooth(
    scores: torch.Tensor,
    own: int = 0,
    *,
    pool: int = 1,
    pooling: str = "max",
    half_life: float = 0.0,
    half_lives: torch.Tensor | None = None,
) -> torch.Tensor:
    """`pool_neighbours` of all but the last `own` keys, then `fade_to_neighbours` of all.

    On a GPU one launch. [R, n] -> [R, n]; the argument may be overwritten.

    Parameters
    ----------
    pool, pooling : width, 1 is none, and how.
    half_life, half_lives : 0 is off.
    """
    if pool == 1 and not half_life:
        return scores
    if use_triton(scores):
        from kvc_kernels.gpu import neighbours

        return neighbours.smooth(scores, own, pool, pooling, half_life, half_lives)
    before = scores.shape[1] - own
    scores[:, :before] = pool_neighbours(scores[:, :before], pool, pooling)
    return fade_to_neighbours(scores, half_life, half_lives) if half_life else scores


def window_scores(
    windows: Sequence[Window],
    layer_k: torch.Tensor,
    scale: float,
    how: WindowOptions,
    tables: dict | None = None,
) -> list[torch.Tensor]:
    """`window_attention` of prompts of a batch, then `smooth`; on a GPU alone, in two launches.

    Parameters
    ----------
    windows : the prompts'.
    layer_k : [num_blocks, H, P, D], a layer of the arena, which slots lie in.
    scale : factor on the logits.
    tables : an empty dict, the same for all layers: what the device is told but once.

    Returns
    -------
    scores : float32 [H, n] of every prompt.
    """
    from kvc_kernels.gpu import neighbours
    from kvc_kernels.gpu import score as gpu

    found = gpu.window_attentions(
        windows, layer_k, scale, how.power,
        group=how.group, excluded=how.excluded, tables=tables,
    )  # fmt: skip
    if how.pool > 1 or how.half_life:
        found = neighbours.smooth_all(
            found, how.pool, how.pooling, how.half_life, how.half_lives
        )
    return found.unbind()


def put_first(scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """`scores` (>= 0) in which the `chosen` keys rank above all others and keep their order.

    Above those of other heads and layers too, so that any apportioner sees it.
    """
    return torch.where(chosen, scores.clamp(_MIN, _MAX) * _FIRST, scores)


def put_last_first(scores: torch.Tensor, count: int) -> torch.Tensor:
    """`put_first` for the last `count` keys."""
    n = scores.shape[-1]
    return put_first(scores, torch.arange(n, device=scores.device) >= n - count)
