"""Attention prompts' queries pay to their keys, read from the arena (`kvc_kernels.score`).

Two passes over the keys: the log-sum-exp of every query, then every key's attention with it. An
attention kernel that returns the former saves the first pass, and then all prompts of a batch are
one launch. Logits never leave a program.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvc_kernels.gpu.layout import INTERPRETED
from kvc_kernels.gpu.windows import COLUMNS, WindowScores, joined
from kvc_kernels.windows import Window

_LOG2_E = 1.4426950408889634
#: Programs that `window_lse` fills a GPU with, and tiles of keys below which it does not split.
_PROGRAMS, _TILES_OF_SPLIT = 512, 4


@triton.jit
def load_rows(base, row, valid, D: tl.constexpr, D_PAD: tl.constexpr, UPCAST: tl.constexpr):
    """Rows of D numbers, `row` elements behind `base`: [rows, D_PAD], zeros where not `valid`."""
    column = tl.arange(0, D_PAD)
    pointers = base + row[:, None] + column[None, :]
    if D == D_PAD:
        loaded = tl.load(pointers, mask=valid[:, None], other=0.0)
    else:
        loaded = tl.load(pointers, mask=valid[:, None] & (column < D)[None, :], other=0.0)
    return loaded.to(tl.float32) if UPCAST else loaded


@triton.jit
def _load_queries(
    queries, query, query_head, valid, query_stride, query_head_stride,
    D: tl.constexpr, D_PAD: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    row = query.to(tl.int64) * query_stride + query_head * query_head_stride
    return load_rows(queries, row, valid, D, D_PAD, UPCAST)


@triton.jit
def _load_keys(
    layer_k, slots, position, valid, head, block_stride, head_stride, token_stride,
    P: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    slot = tl.load(slots + position, mask=valid, other=0)
    row = (slot // P).to(tl.int64) * block_stride + head * head_stride + slot % P * token_stride
    return load_rows(layer_k, row, valid, D, D_PAD, UPCAST)


@triton.jit(do_not_specialize=["n", "window", "share"])
def _lse(
    part, queries, layer_k, slots, log2_scale, n, window, share,
    query_stride, query_head_stride, block_stride, head_stride, token_stride,
    GROUP: tl.constexpr, P: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Natural log-sum-exp `part` [splits, w, H*G] over one split of ``share`` keys."""
    head, heads, split = tl.program_id(1), tl.num_programs(1), tl.program_id(2)
    begin = tl.program_id(0) * ROWS
    row = begin + tl.arange(0, ROWS)
    mine = row < window * GROUP
    query, query_head = row // GROUP, head * GROUP + row % GROUP
    q = _load_queries(
        queries, query, query_head, mine, query_stride, query_head_stride, D, D_PAD, UPCAST
    )
    own = n - window + query
    # Finite, so that a query that sees nothing of this split yields no NaN.
    largest = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    low = split * share
    last_query = tl.minimum((begin + ROWS - 1) // GROUP, window - 1)
    high = tl.minimum(low + share, n - window + last_query + 1)
    for at in range(low, high, TILE):
        position = at + tl.arange(0, TILE)
        keys = _load_keys(
            layer_k, slots, position, position < high, head,
            block_stride, head_stride, token_stride, P, D, D_PAD, UPCAST,
        )  # fmt: skip
        logits = tl.dot(q, tl.trans(keys.to(q.dtype)), input_precision="ieee") * log2_scale
        # Keys past `high` are past every own position too: a split is whole tiles.
        logits = tl.where(position[None, :] <= own[:, None], logits, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(logits, 1))
        total = total * tl.exp2(largest - new_largest)
        total += tl.sum(tl.exp2(logits - new_largest[:, None]), 1)
        largest = new_largest
    line = (split * window + query).to(tl.int64) * (heads * GROUP) + query_head
    tl.store(part + line, (largest + tl.log2(total)) * 0.6931471805599453, mask=mine)


@triton.jit(
    do_not_specialize=["n", "window", "excluded"],
    do_not_specialize_on_alignment=["slots", "lse"],
)
def _window_attention(
    scores, queries, layer_k, slots, lse, prompts, log2_scale, n, window, excluded,
    lse_stride, lse_head_stride,
    query_stride, query_head_stride, block_stride, head_stride, token_stride,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, MEAN: tl.constexpr, POWER: tl.constexpr,
    P: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """`scores` [H, n] of one tile of one head's keys: logits are [TILE, ROWS], keys first.

    A row is a query and a member of the group, ``query * GROUP_PAD + member``. `prompts` is None
    for one prompt, else a table of `gpu.windows` for all.
    """
    head = tl.program_id(1)
    if prompts is not None:
        prompts += tl.program_id(2) * COLUMNS
        n, window = tl.load(prompts).to(tl.int32), tl.load(prompts + 1).to(tl.int32)
        if tl.program_id(0) * TILE >= n:
            return
        scores += tl.load(prompts + 2)
        queries += tl.load(prompts + 3) * query_stride
        lse += tl.load(prompts + 4) * lse_stride
        slots += tl.load(prompts + 5)
    position = tl.program_id(0) * TILE + tl.arange(0, TILE)
    valid = position < n
    keys = _load_keys(
        layer_k, slots, position, valid, head,
        block_stride, head_stride, token_stride, P, D, D_PAD, UPCAST,
    )  # fmt: skip
    keys = keys if UPCAST else keys.to(queries.dtype.element_ty)
    total = tl.zeros([TILE], tl.float32)
    # No earlier query counts for any of these keys.
    first = tl.maximum(tl.program_id(0) * TILE + excluded - (n - window), 0)
    for begin in range(first * GROUP_PAD, window * GROUP_PAD, ROWS):
        row = begin + tl.arange(0, ROWS)
        query, member = row // GROUP_PAD, row % GROUP_PAD
        query_head = head * GROUP + member
        mine = (query < window) & (member < GROUP)
        q = _load_queries(
            queries, query, query_head, mine, query_stride, query_head_stride, D, D_PAD, UPCAST
        )
        place = query.to(tl.int64) * lse_stride + query_head * lse_head_stride
        log2_sum = tl.load(lse + place, mask=mine, other=0.0) * 1.4426950408889634
        logits = tl.dot(keys, tl.trans(q), input_precision="ieee") * log2_scale
        # With `excluded` >= 0 this is the causal mask too.
        counts = position[:, None] <= (n - window + query - excluded)[None, :]
        attention = tl.exp2(logits - log2_sum[None, :])
        attention = tl.where(counts & mine[None, :], attention, 0.0)
        if MEAN:
            by_query = tl.reshape(attention, [TILE, ROWS // GROUP_PAD, GROUP_PAD])
            attention = tl.sum(by_query, 2) / GROUP
        if POWER == 2:
            attention = attention * attention
        total += tl.sum(attention, 1)
    tl.store(scores + head.to(tl.int64) * n + position, total, mask=valid)


def window_lse(
    queries: torch.Tensor, layer_k: torch.Tensor, slots: torch.Tensor, scale: float
) -> torch.Tensor:
    """Log-sum-exp of every query's causal logits; arguments as in `window_attention`.

    Returns
    -------
    lse : float32 [w, H*G], natural.
    """
    queries = _checked(queries, layer_k, slots)
    (window, query_heads, _), heads, n = queries.shape, layer_k.shape[1], len(slots)
    group = query_heads // heads
    tile = blocks(queries)
    row_tiles = triton.cdiv(window * group, tile["ROWS"])
    wanted = triton.cdiv(_PROGRAMS, row_tiles * heads)
    tiles = triton.cdiv(n, tile["TILE"])
    share = max(_TILES_OF_SPLIT, triton.cdiv(tiles, wanted)) * tile["TILE"]
    splits = triton.cdiv(n, share)
    part = torch.empty(splits, window, query_heads, dtype=torch.float32, device=queries.device)
    _lse[(row_tiles, heads, splits)](
        part, queries, layer_k, slots, scale * _LOG2_E, n, window, share,
        *queries.stride()[:2], *layer_k.stride()[:3],
        GROUP=group, P=layer_k.shape[2], **tile, UPCAST=INTERPRETED, num_warps=4,
    )  # fmt: skip
    return part[0] if splits == 1 else part.logsumexp(0)


def window_attention(
    queries: torch.Tensor,
    layer_k: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    power: int = 1,
    *,
    group: str = "sum",
    excluded: int = 0,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """`window_attentions` of one prompt: float32 [H, n]."""
    window = Window(queries, slots, lse)
    (scores,) = window_attentions(
        [window], layer_k, scale, power, group=group, excluded=excluded
    ).unbind()
    return scores


def window_attentions(
    windows: Sequence[Window],
    layer_k: torch.Tensor,
    scale: float,
    power: int = 1,
    *,
    group: str = "sum",
    excluded: int = 0,
    tables: dict | None = None,
) -> WindowScores:
    """`kvc_kernels.score.window_attention` of prompts of a batch, their keys read by slot.

    Parameters
    ----------
    windows : the prompts'. Where all know their log-sum-exp this is one launch, and another for
        queries that do not lie in one tensor.
    layer_k : [num_blocks, H, P, D], a layer of the arena, ``arena_k[:, layer]``.
    scale : factor on the logits.
    power, group, excluded : see there.
    tables : keeps from layer to layer what the device is told of several prompts.
    """
    if group not in ("sum", "mean") or power not in (1, 2) or excluded < 0:
        raise ValueError(f"group {group!r}, power {power!r} or excluded {excluded!r} is unknown")
    checked = [_checked(each.queries, layer_k, each.slots) for each in windows]
    sums = [
        window_lse(each.queries, layer_k, each.slots, scale) if each.lse is None else each.lse
        for each in windows
    ]
    for each, lse in zip(windows, sums, strict=True):
        if lse.shape != each.queries.shape[:2] or lse.dtype != torch.float32:
            raise ValueError(f"lse {lse.dtype} {tuple(lse.shape)}: not float32 of every query")
    queries, query_begins = joined(checked)
    lse, lse_begins = joined(sums)
    slots, slot_begins = joined([each.slots for each in windows])
    heads, size = layer_k.shape[1], queries.shape[1] // layer_k.shape[1]
    found = WindowScores.empty(windows, heads, (query_begins, lse_begins, slot_begins), tables)
    # A mean needs all of a query's group in one tile, so there it is padded to a power of two.
    padded = triton.next_power_of_2(size) if group == "mean" else size
    tile = blocks(queries)
    if group == "mean":
        tile["ROWS"] = max(tile["ROWS"], padded)
    _window_attention[(triton.cdiv(max(found.lengths), tile["TILE"]), heads, len(windows))](
        found.flat, queries, layer_k, slots, lse, found.table, scale * _LOG2_E,
        found.lengths[0], found.own[0], excluded,
        *lse.stride(), *queries.stride()[:2], *layer_k.stride()[:3],
        GROUP=size, GROUP_PAD=padded, MEAN=group == "mean", POWER=power,
        P=layer_k.shape[2], COLUMNS=COLUMNS, **tile, UPCAST=INTERPRETED, num_warps=4,
    )  # fmt: skip
    return found


def _checked(queries: torch.Tensor, layer_k: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The queries in a type that holds the keys' values too; raises where shapes do not fit."""
    (window, query_heads, dim), (_, heads, _, key_dim) = queries.shape, layer_k.shape
    if dim != key_dim or query_heads % heads:
        raise ValueError(f"queries {tuple(queries.shape)}: not for {heads} heads of {key_dim}")
    if slots.dim() != 1 or not 1 <= window <= len(slots):
        raise ValueError(f"{window} queries for slots {tuple(slots.shape)}")
    if queries.stride(2) != 1 or layer_k.stride(3) != 1 or slots.stride(0) != 1:
        raise ValueError("queries, keys or slots are not dense in their last dimension")
    if layer_k.dtype.itemsize == 1:  # every other type has all values of an 8-bit one
        return queries
    return queries.to(torch.promote_types(queries.dtype, layer_k.dtype))


def blocks(queries: torch.Tensor) -> dict[str, int]:
    """Rows of queries and keys of a tile, such that a few tiles fit in shared memory.

    The same for every window, so that none has to be compiled when it is first asked for. Float32
    has no tensor cores, and with more than 16 rows its registers spill (sm_90, compiled).
    """
    dim = queries.shape[2]
    padded = max(16, triton.next_power_of_2(dim))
    size = padded * queries.dtype.itemsize
    max_rows = 16 if queries.dtype == torch.float32 else min(64, 16384 // size)
    return {
        "D": dim,
        "D_PAD": padded,
        "ROWS": max(16, max_rows),
        "TILE": 64 if size <= 512 else 16,
    }
