"""Every Triton operation on the device against its torch reference, at real sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from kvc_kernels.decode import decode as decode_reference
from kvc_kernels.extend import extend as extend_reference
from kvc_kernels.gpu.compact import compact
from kvc_kernels.gpu.decode import decode
from kvc_kernels.gpu.extend import extend
from kvc_kernels.gpu.score import window_attention
from kvc_kernels.gpu.select import kept_positions, rank_pages
from kvc_kernels.gpu.store import store
from kvc_kernels.gpu.tables import block_table
from kvc_kernels.pages import head_pages
from kvc_kernels.score import causal_attention

from bench.gpu.batches import Ragged, build, shares
from bench.gpu.records import Records, Skipped

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@dataclasses.dataclass(frozen=True)
class Size:
    """Shapes that the checks run at; `tokens` is the longest request's."""

    layers: int
    heads: int
    group: int
    dim: int
    page: int
    requests: int
    tokens: int
    window: int


LLAMA = Size(layers=4, heads=8, group=4, dim=128, page=16, requests=16, tokens=4096, window=32)
SMOKE = Size(layers=2, heads=2, group=2, dim=16, page=8, requests=4, tokens=48, window=4)


@dataclasses.dataclass(frozen=True)
class Case:
    size: Size
    dtype: torch.dtype
    device: str

    def batch(self) -> Ragged:
        """Every fourth request is not compressed; tails begin and end around a page."""
        size = self.size
        tails = [1, size.page - 1, size.page, size.page + 1, size.tokens // 8]
        most = size.tokens // (2 * size.page)
        segments = [most * (i + 1) // size.requests if i % 4 else 0 for i in range(size.requests)]
        tail = [tails[i % 5] for i in range(size.requests)]
        tail[0] = size.tokens
        return build(
            segments, tail, layers=size.layers, heads=size.heads, page=size.page, dim=size.dim,
            dtype=self.dtype, device=self.device,
        )  # fmt: skip

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def query(self, tokens: int) -> torch.Tensor:
        return self.randn(tokens, self.size.heads * self.size.group, self.size.dim)

    @property
    def scale(self) -> float:
        return self.size.dim**-0.5


#: What an operation computed and what it should have, by name; exact if the dtype is integer.
Pairs = dict[str, tuple[torch.Tensor, torch.Tensor]]


def check_decode(case: Case) -> Pairs:
    """Attention, log-sum-exp and the metric, in the first and the last layer."""
    batch, size, pairs = case.batch(), case.size, {}
    pages = head_pages(batch.rows, size.layers, size.heads, size.page)
    query = case.query(size.requests)
    counted = torch.arange(size.requests, device=case.device) % 2 == 0
    flat_k, flat_v = (a.flatten(0, 2) for a in (batch.cache.arena_k, batch.cache.arena_v))
    for layer in (0, size.layers - 1):
        got = torch.zeros(batch.cache.arena_k.shape[:-1], device=case.device)
        expected = torch.zeros_like(got)
        out, lse = decode(
            query, batch.cache, layer, batch.request, batch.seq_len, case.scale,
            metric=got, counted=counted,
        )  # fmt: skip
        owners = counted.repeat_interleave(size.heads)
        wanted, wanted_lse = decode_reference(
            query, flat_k, flat_v, pages[layer], case.scale, expected.flatten(0, 2), owners
        )
        pairs |= {
            f"out {layer}": (out, wanted),
            f"lse {layer}": (lse, wanted_lse),
            f"metric {layer}": (got, expected),
        }
    return pairs


def check_extend(case: Case) -> Pairs:
    """The last tokens of every tail as a chunk of a prefill."""
    batch, size = case.batch(), case.size
    tails = (batch.seq_len - batch.rows.tail_begin).tolist()
    new = [min(tail, size.tokens // 8) for tail in tails]
    start = torch.tensor([0, *new], device=case.device).cumsum(0)
    query, layer = case.query(sum(new)), size.layers - 1
    out, _ = extend(
        query, batch.cache, layer, batch.request, batch.seq_len, start, max(new), case.scale
    )
    pages = head_pages(batch.rows, size.layers, size.heads, size.page)[layer]
    by_owner = pages.page.split(pages.count.tolist())
    held = batch.held[:, layer].flatten().tolist()
    flat_k, flat_v = (a.flatten(0, 2) for a in (batch.cache.arena_k, batch.cache.arena_v))
    expected = torch.empty_like(out, dtype=torch.float32)
    grouped = query.float().unflatten(1, (size.heads, size.group))
    target = expected.unflatten(1, (size.heads, size.group))
    first = start.tolist()
    for owner, (mine, length) in enumerate(zip(by_owner, held, strict=True)):
        request, head = divmod(owner, size.heads)
        keys, values = (
            flat[mine].flatten(0, 1)[:length, None].float() for flat in (flat_k, flat_v)
        )
        some = slice(first[request], first[request + 1])
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            target[some, head] = extend_reference(grouped[some, head], keys, values, case.scale)
    return {"out": (out, expected)}


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
    pages = shares(rows * length // size.page // 4, rows, skewed=True)
    pages = pages.clamp(max=length // size.page).to(case.device)
    ranks = rank_pages(scores, size.page)
    got = kept_positions(scores, ranks, pages, size.page, int(pages.sum()))
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    kept = torch.zeros_like(order, dtype=torch.bool)
    kept.scatter_(1, order, torch.arange(length, device=case.device) < pages[:, None] * size.page)
    return {
        "positions": (got, kept.nonzero()[:, 1]),
        "page scores": (ranks.best, ranked[:, :: size.page]),
    }


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt in two arenas, what its heads keep, and the blocks that are to hold it."""

    arena_k: torch.Tensor
    arena_v: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    pages: torch.Tensor
    target: torch.Tensor


def prompt(case: Case, rate: int = 8) -> Prompt:
    """`size.tokens` tokens of which every head keeps some pages of random positions."""
    size, device = case.size, case.device
    per_block, blocks = size.layers * size.heads, size.tokens // size.page
    kept = max(1, blocks // rate)
    shape = (1 + blocks + kept, size.layers, size.heads, size.page, size.dim)
    order = torch.randperm(shape[0] - 1, device=device) + 1
    slots = (order[:blocks, None] * size.page + torch.arange(size.page, device=device)).flatten()
    pages = shares(kept * per_block, per_block, skewed=True).to(device)
    number = kept * per_block * size.page
    positions = torch.randint(0, size.tokens, (number,), device=device)
    return Prompt(
        *(torch.empty(shape, dtype=case.dtype, device=device).normal_() for _ in range(2)),
        slots, positions, pages, order[blocks:].contiguous(),
    )  # fmt: skip


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


def compact_arguments(given: Prompt) -> dict:
    """Of `compact`."""
    return {
        "arena_k": given.arena_k,
        "arena_v": given.arena_v,
        "source_slots": given.slots,
        "positions": given.positions,
        "pages": given.pages,
        "target_blocks": given.target,
    }


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


def check_tables(case: Case) -> Pairs:
    """Pages and lengths of every row."""
    batch, size, layer = case.batch(), case.size, case.size.layers - 1
    pages = head_pages(batch.rows, size.layers, size.heads, size.page)[layer]
    most = int(pages.count.max())
    table, length = block_table(batch.cache, layer, batch.request, batch.seq_len, most)
    expected = torch.zeros_like(table)
    mine = torch.arange(most, device=case.device) < pages.count[:, None]
    expected[mine] = pages.page.int()
    return {
        "table": (table, expected),
        "length": (length, batch.held[:, layer].flatten().int()),
    }


def check_no_sync(case: Case) -> Pairs:
    """No operation of a decode step or a compression waits for the device."""
    _needs_gpu(case)
    batch, size, given = case.batch(), case.size, prompt(case)
    query, queries = case.query(size.requests), case.query(size.window)
    layer_k = given.arena_k[:, 0]
    new = case.randn(size.requests, size.heads, size.dim)
    total = len(given.target) * size.layers * size.heads
    slots = given.slots[: size.requests]
    # A skewed head could be given more pages than there are.
    equal = torch.full_like(given.pages, len(given.target))

    def everything() -> None:
        decode(query, batch.cache, 0, batch.request, batch.seq_len, case.scale)
        store(layer_k, given.arena_v[:, 0], slots, new, new)
        block_table(batch.cache, 0, batch.request, batch.seq_len, size.tokens)
        scores = window_attention(queries, layer_k, given.slots, case.scale)
        scores = scores.repeat(size.layers, 1)
        kept_positions(scores, rank_pages(scores, size.page), equal, size.page, total)
        compact(**compact_arguments(given))

    everything()  # compiles, which may wait
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {}


def check_graph(case: Case) -> Pairs:
    """A decode captured in a CUDA graph and replayed for other lengths gives what eager does."""
    _needs_gpu(case)
    batch = case.batch()
    query = case.query(case.size.requests)
    lengths = torch.maximum(batch.seq_len - 37, batch.rows.tail_begin)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        return decode(query, batch.cache, 1, batch.request, lengths, case.scale)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()
    lengths.copy_(batch.seq_len)
    graph.replay()
    expected = step()
    return {"out": (out, expected[0]), "lse": (lse, expected[1])}


def _needs_gpu(case: Case) -> None:
    if case.device == "cpu":
        raise Skipped("needs a GPU")


CHECKS: dict[str, Callable[[Case], Pairs]] = {
    "decode": check_decode,
    "extend": check_extend,
    "score": check_score,
    "select": check_select,
    "compact": check_compact,
    "store": check_store,
    "tables": check_tables,
    "no sync": check_no_sync,
    "graph": check_graph,
}


def run(records: Records, only: list[str] | None = None, *, smoke: bool) -> None:
    """A record for every check and dtype."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    for name in only or CHECKS:
        for dtype, tolerance in TOLERANCE.items():
            with records.attempt(name, dtype=str(dtype)[6:], tolerance=tolerance) as found:
                torch.manual_seed(0)
                case = Case(SMOKE if smoke else LLAMA, dtype, device)
                with torch.inference_mode():
                    pairs = CHECKS[name](case)
                if device == "cuda":
                    torch.cuda.synchronize()
                errors = {key: distance(*pair, tolerance) for key, pair in pairs.items()}
                found["max_abs_error"] = {key: error for key, (error, _) in errors.items()}
                found["status"] = "ok" if all(fits for _, fits in errors.values()) else "failed"


def distance(
    got: torch.Tensor, expected: torch.Tensor, tolerance: float
) -> tuple[float | None, bool]:
    """Largest absolute difference (None if there is a NaN), and whether all are tolerable."""
    if got.shape != expected.shape:
        raise AssertionError(f"{list(got.shape)} where {list(expected.shape)} was expected")
    if not got.dtype.is_floating_point:
        differs = (got != expected).sum().item()
        return float(differs), differs == 0
    got, expected = got.float(), expected.float()
    difference = torch.where(got == expected, 0, (got - expected).abs())
    fits = (difference <= tolerance * (1 + expected.abs())).all().item()
    largest = difference.max().item() if difference.numel() else 0.0
    return (None if largest != largest else largest), fits
