"""What a compression is made of, in Triton on the device, against torch at real sizes."""

from __future__ import annotations

import torch
from kvc_kernels.gpu.compact import compact
from kvc_kernels.gpu.score import window_attention
from kvc_kernels.gpu.select import compete, kept_positions
from kvc_kernels.gpu.store import store
from kvc_kernels.score import causal_attention

from bench.gpu.batches import shares
from bench.gpu.cases import Case, Pairs, compact_arguments, prompt


def check_score(case: Case) -> Pairs:
    """Both powers, sum and mean, with excluded neighbours, of a prompt in the arena."""
    size, device, pairs = case.size, case.device, {}
    blocks = size.tokens // size.page
    layer = case.randn(blocks + 1, size.layers, size.heads, size.page, size.dim)[:, -1]
    slots = torch.randperm(blocks * size.page, device=device)[: size.tokens - 3] + size.page
    keys = layer[slots // size.page, :, slots % size.page]
    queries = case.query(size.window)
    for power, group, excluded in ((1, "sum", 0), (2, "sum", 5), (2, "mean", 0)):
        options = {"group": group, "excluded": excluded}
        pairs[f"power {power}, {group}, {excluded} excluded"] = (
            window_attention(queries, layer, slots, case.scale, power, **options),
            window_reference(queries, keys, case.scale, power, group, excluded),
        )
    return pairs


def window_reference(
    queries: torch.Tensor, keys: torch.Tensor, scale: float, power: int, group: str, excluded: int
) -> torch.Tensor:
    """`window_attention` in float32; the one in `kvc_kernels.score` runs Triton on a GPU."""
    scores = torch.zeros(keys.shape[1], keys.shape[0], device=keys.device)
    for first, attention in causal_attention(queries, keys, scale):
        seen = attention.shape[-1]
        position = torch.arange(seen, device=keys.device)
        attention = attention.masked_fill(position > position[first:, None] - excluded, 0)
        if group == "mean":
            attention = attention.mean(dim=1, keepdim=True)
        scores[:, :seen] += attention.pow(power).sum(dim=(1, 2))
    return scores


def check_select(case: Case) -> Pairs:
    """Scores of which many are equal; exactly what a stable sort keeps."""
    size = case.size
    rows, length = size.layers * size.heads, size.tokens
    scores = (torch.rand(rows, length, device=case.device) * length).floor()
    pages = shares(rows * length // size.page // 4, rows, 1.0)
    pages = pages.clamp(max=length // size.page).to(case.device)
    got = kept_positions(scores, pages, size.page, int(pages.sum()))
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    won = compete(scores, size.page, int(pages.sum()) - rows, 1, 1, None, 0.0)
    contested = ranked[:, size.page :: size.page]
    best = contested.flatten().sort(descending=True, stable=True).indices // contested.shape[1]
    share = torch.ones_like(won).scatter_add_(
        0, best[: int(pages.sum()) - rows], torch.ones_like(best)
    )
    kept = torch.zeros_like(order, dtype=torch.bool)
    kept.scatter_(1, order, torch.arange(length, device=case.device) < pages[:, None] * size.page)
    return {
        "positions": (got, kept.nonzero()[:, 1]),
        "pages": (won, share),
    }


def check_compact(case: Case) -> Pairs:
    """Bit by bit what indexing gives, and nothing else written."""
    given, size = prompt(case), case.size
    per_block = size.layers * size.heads
    head = torch.arange(per_block, device=case.device).repeat_interleave(given.pages * size.page)
    slots = given.slots[given.positions]
    page = slots // size.page * per_block + head
    expected = []
    for arena in (given.arena_k, given.arena_v):
        wanted = arena.clone()
        moved = arena.flatten(0, 2)[page, slots % size.page]
        wanted[given.target] = moved.view(-1, *arena.shape[1:])
        expected.append(wanted)
    compact(**compact_arguments(given))
    return {"keys": (given.arena_k, expected[0]), "values": (given.arena_v, expected[1])}


def check_store(case: Case) -> Pairs:
    """Keys and values of as many tokens as there are requests; the metric begins at zero."""
    size, layer = case.size, case.size.layers - 1
    blocks = size.tokens // size.page
    arenas = [
        case.randn(blocks, size.layers, size.heads, size.page, size.dim)[:, layer] for _ in range(2)
    ]
    metric = torch.rand(blocks, size.layers, size.heads, size.page, device=case.device)
    slots = torch.randperm(blocks * size.page, device=case.device)[: size.requests]
    new = [case.randn(size.requests, size.heads, size.dim) for _ in range(2)]
    expected = [arena.clone() for arena in arenas]
    for arena, source in zip(expected, new, strict=True):
        arena[slots // size.page, :, slots % size.page] = source
    wanted = metric.clone()
    wanted[slots // size.page, layer, :, slots % size.page] = 0
    store(*arenas, slots, *new, metric[:, layer])
    return {
        "keys": (arenas[0], expected[0]),
        "values": (arenas[1], expected[1]),
        "metric": (metric, wanted),
    }
