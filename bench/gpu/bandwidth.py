"""How fast memory is read: a copy, decode over many shapes, FlashInfer, and a compression."""

from __future__ import annotations

import importlib.util

import torch
from kvc_kernels.gpu.compact import compact
from kvc_kernels.gpu.decode import decode, new_schedule
from kvc_kernels.gpu.schedule import schedule_of
from kvc_kernels.gpu.score import window_attention
from kvc_kernels.select import RankedPages

from bench.gpu.batches import Ragged, build
from bench.gpu.cases import Case, Prompt, Size, compact_arguments, prompt
from bench.gpu.records import Records, Skipped, median_ms

#: Rows are requests times KV heads of Llama-3.1-8B.
ROWS, LENGTHS = (8, 64, 512, 4096), (128, 1024, 8192, 32768)
LLAMA = Size(layers=32, heads=8, group=4, dim=128, page=16, requests=1, tokens=8192, window=32)
SMOKE = Size(layers=2, heads=2, group=2, dim=16, page=8, requests=1, tokens=64, window=4)
#: What building a batch needs at its peak, over the arenas.
_HEADROOM = 1.15


def run(records: Records, *, smoke: bool) -> None:
    """All records; points that the memory does not hold are skipped."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = SMOKE if smoke else LLAMA
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    broken = False
    rows, lengths = ((2, 4), (16, 40)) if smoke else (ROWS, LENGTHS)
    with torch.inference_mode():
        measure_copy(records, device, 1 << 16 if smoke else 4 << 30)
        for count in rows:
            for length in lengths:
                for skewed in (False, True):
                    facts = {"rows": count, "length": length, "skewed": skewed}
                    with records.attempt("decode", **facts) as found:
                        found |= measure_decode(size, count, length, skewed, dtype, device)
                with records.attempt("flashinfer", rows=count, length=length) as found:
                    if broken:  # each time it might compile for minutes
                        raise Skipped("it failed before")
                    found |= measure_flashinfer(size, count, length, dtype, device)
                broken |= found["status"] == "error"
        for requests in (1, 2) if smoke else (16, 128, 1024):
            with records.attempt("schedule", requests=requests, layers=size.layers) as found:
                found |= measure_schedule(size, requests, dtype, device)
        for rate in (2, 8):
            measure_compression(records, Case(size, dtype, device), rate)


def measure_copy(records: Records, device: str, size: int) -> None:
    """A copy on the device: bytes read and bytes written."""
    with records.attempt("copy", bytes=size) as found:
        source = torch.zeros(size, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        found |= median_ms(lambda: target.copy_(source), device)
        found["gb_per_s"] = 2 * size / found["ms"] / 1e6


def batch(
    size: Size, rows: int, length: int, skewed: bool, dtype: torch.dtype, device: str
) -> Ragged:
    """`rows` heads of `length` KVs each, on average if `skewed`; one layer, none compressed else.

    Raises Skipped where it does not fit.
    """
    requests = rows // size.heads
    needed = 2 * rows * (length + size.page) * size.dim * dtype.itemsize * _HEADROOM
    if device == "cuda" and needed > torch.cuda.mem_get_info()[0]:
        raise Skipped(f"{needed / 1e9:.0f} GB do not fit")
    tail = 1 if skewed else length
    return build(
        [(length - tail) // size.page if skewed else 0] * requests, [tail] * requests,
        layers=1, heads=size.heads, page=size.page, dim=size.dim, dtype=dtype, device=device,
    )  # fmt: skip


def measure_decode(
    size: Size, rows: int, length: int, skewed: bool, dtype: torch.dtype, device: str
) -> dict:
    """Our decode kernel; `bytes` are those of the keys and values it has to read.

    `programs` share a layer. The schedule is there: `measure_schedule` has what it takes.
    """
    made = batch(size, rows, length, skewed, dtype, device)
    query = _query(size, len(made.batch.request), dtype, device)
    found = median_ms(lambda: decode(query, made.batch, 0, size.dim**-0.5), device)
    held = made.held.sum().item()
    found["longest"] = made.held.max().item()
    schedule = schedule_of(made.batch)
    found["programs"] = schedule.programs if schedule else 0
    found["bytes"] = 2 * held * size.dim * dtype.itemsize
    return found | {"gb_per_s": found["bytes"] / found["ms"] / 1e6}


def measure_schedule(size: Size, requests: int, dtype: torch.dtype, device: str) -> dict:
    """What a step takes before its first layer, for all layers; every request has a segment."""
    made = build(
        [1] * requests, [size.page] * requests, layers=size.layers, heads=size.heads,
        page=size.page, dim=size.dim, dtype=dtype, device=device,
    )  # fmt: skip
    query_heads = size.heads * size.group
    schedule = new_schedule(made.batch.cache, requests, query_heads, dtype)
    return median_ms(lambda: schedule.update(made.batch), device)


def measure_flashinfer(size: Size, rows: int, length: int, dtype: torch.dtype, device: str) -> dict:
    """FlashInfer's dense decode over the same arena: one length and one table per request."""
    if device == "cpu":
        raise Skipped("needs a GPU")
    if importlib.util.find_spec("flashinfer") is None:
        raise Skipped("flashinfer is not installed")
    import flashinfer

    made = batch(size, rows, length, False, dtype, device)
    requests, pages = len(made.batch.request), -(-length // size.page)
    begins = torch.arange(pages, device=device) * size.page
    indices = made.batch.cache.req_to_token[:, begins] // size.page
    whole = torch.arange(requests + 1, dtype=torch.int32, device=device) * pages
    last = torch.full((requests,), length - (pages - 1) * size.page, dtype=torch.int32)
    workspace = torch.zeros(512 << 20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    wrapper.plan(
        whole, indices.flatten().int(), last.to(device), size.heads * size.group, size.heads,
        size.dim, size.page, q_data_type=dtype, kv_data_type=dtype,
    )  # fmt: skip
    query = _query(size, requests, dtype, device)
    cache = made.batch.cache
    arenas = cache.arena_k[:, 0], cache.arena_v[:, 0]
    out = wrapper.run(query, arenas)
    ours = decode(query, made.batch, 0, size.dim**-0.5)[0]
    found = median_ms(lambda: wrapper.run(query, arenas), device)
    found["difference_to_ours"] = (out - ours).abs().max().item()
    found["bytes"] = 2 * made.held.sum().item() * size.dim * dtype.itemsize
    return found | {"gb_per_s": found["bytes"] / found["ms"] / 1e6}


def measure_compression(records: Records, case: Case, rate: int) -> None:
    """What a prompt's compression takes: scores of every layer, selection, the copy."""
    size, given = case.size, None
    facts = {"tokens": size.tokens, "layers": size.layers, "rate": rate}
    with records.attempt("score", **facts) as found:
        given = prompt(case, rate)
        queries = case.query(size.window)
        layers = given.arena_k.unbind(1)

        def score() -> torch.Tensor:
            each = [window_attention(queries, k, given.slots, case.scale, 2) for k in layers]
            return torch.cat(each)

        scores = score()
        found |= median_ms(score, case.device)
    if given is None:
        return
    with records.attempt("select", **facts) as found:
        total = len(given.target) * size.layers * size.heads

        def select() -> tuple[torch.Tensor, torch.Tensor]:
            """The best pages of all heads together."""
            ranked = RankedPages(scores, size.page)
            pages = ranked.compete(total - len(scores), 1, groups=1)
            return pages, ranked.kept_positions(pages, total)

        pages, positions = select()
        found |= median_ms(select, case.device)
        given = Prompt(given.arena_k, given.arena_v, given.slots, positions, pages, given.target)
    with records.attempt("compact", **facts) as found:
        found |= median_ms(lambda: compact(**compact_arguments(given)), case.device)
        moved = 2 * len(given.positions) * size.dim * case.dtype.itemsize
        found["bytes"] = 2 * moved  # read and written
        found["gb_per_s"] = found["bytes"] / found["ms"] / 1e6


def _query(size: Size, requests: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.randn(requests, size.heads * size.group, size.dim, device=device).to(dtype)
