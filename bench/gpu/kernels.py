"""Every Triton operation on the device against its torch reference, at real sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from kvc_kernels.decode import decode_torch
from kvc_kernels.extend import extend_torch
from kvc_kernels.gpu.compact import compact
from kvc_kernels.gpu.decode import decode, new_schedule
from kvc_kernels.gpu.extend import extend
from kvc_kernels.gpu.score import window_attention
from kvc_kernels.gpu.select import compete, kept_positions
from kvc_kernels.gpu.store import store
from kvc_kernels.gpu.tables import block_table

from bench.gpu.cases import LLAMA, SMOKE, Case, Pairs, compact_arguments, needs_gpu, prompt
from bench.gpu.compression import check_compact, check_score, check_select, check_store
from bench.gpu.records import Records

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def check_decode(case: Case) -> Pairs:
    """Attention, log-sum-exp and the metric, in the first and the last layer."""
    batch, size, pairs = case.batch().batch, case.size, {}
    query = case.query(size.requests)
    tracked = torch.arange(size.requests, dtype=torch.int32, device=case.device) % 3
    for layer in (0, size.layers - 1):
        got = torch.zeros(batch.cache.arena_k.shape[:-1], device=case.device)
        expected = torch.zeros_like(got)
        out, lse = decode(query, batch, layer, case.scale, metric=got, tracked=tracked)
        wanted, wanted_lse = decode_torch(
            query.float(), batch, layer, case.scale, metric=expected, tracked=tracked
        )
        pairs |= {
            f"out {layer}": (out, wanted),
            f"lse {layer}": (lse, wanted_lse),
            f"metric {layer}": (got, expected),
        }
    return pairs


def check_extend(case: Case) -> Pairs:
    """The last tokens of every tail as a chunk of a prefill."""
    batch, size = case.batch().batch, case.size
    tails = batch.seq_len - batch.cache.spans.begin[:, 2]
    new = tails.clamp(max=size.tokens // 8).tolist()
    before = (batch.seq_len - torch.tensor(new, device=case.device)).tolist()
    batch = dataclasses.replace(
        batch,
        new=new,
        rows=list(zip(range(size.requests), before, new, strict=True)),
    )
    query, layer = case.query(sum(new)), size.layers - 1
    out, _ = extend(query, batch, layer, case.scale)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected, _ = extend_torch(query.float(), batch, layer, case.scale)
    return {"out": (out, expected)}


def check_tables(case: Case) -> Pairs:
    """Pages and lengths of every row."""
    ragged, layer = case.batch(), case.size.layers - 1
    batch, held = ragged.batch, ragged.held[:, layer].flatten()
    count = (held + case.size.page - 1) // case.size.page
    most = int(count.max())
    table, length = block_table(batch, layer, most)
    expected = torch.zeros_like(table)
    mine = torch.arange(most, device=case.device) < count[:, None]
    expected[mine] = batch.head_pages[layer].page.int()
    return {"table": (table, expected), "length": (length, held.int())}


def check_no_sync(case: Case) -> Pairs:
    """No operation of a decode step or a compression waits for the device."""
    needs_gpu(case)
    batch, size, given = case.batch().batch, case.size, prompt(case)
    query, queries = case.query(size.requests), case.query(size.window)
    layer_k = given.arena_k[:, 0]
    new = case.randn(size.requests, size.heads, size.dim)
    total = len(given.target) * size.layers * size.heads
    slots = given.slots[: size.requests]
    # A skewed head could be given more pages than there are.
    equal = torch.full_like(given.pages, len(given.target))

    def everything() -> None:
        decode(query, dataclasses.replace(batch), 0, case.scale)  # and its schedule
        store(layer_k, given.arena_v[:, 0], slots, new, new)
        block_table(batch, 0, size.tokens)
        scores = window_attention(queries, layer_k, given.slots, case.scale)
        scores = scores.repeat(size.layers, 1)
        compete(scores, size.page, total - len(scores), 1, 1, None, 0.0)
        kept_positions(scores, equal, size.page, total)
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
    """A decode captured in a CUDA graph and replayed for other lengths gives what eager does.

    As SGLang does it: the schedule is made before a replay, and nothing else is as it was then.
    """
    needs_gpu(case)
    batch = case.batch().batch
    query = case.query(case.size.requests)
    lengths = torch.maximum(batch.seq_len - 37, batch.cache.spans.begin[:, 2])
    captured = dataclasses.replace(batch, seq_len=lengths)
    schedule = new_schedule(batch.cache, case.size.requests, query.shape[1], query.dtype)
    schedule.update(captured)
    decode(query, captured, 1, case.scale)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = decode(query, captured, 1, case.scale)
    expected = decode(query, batch, 1, case.scale)
    lengths.copy_(batch.seq_len)
    schedule.update(captured)
    for tensor in (lengths, batch.cache.req_to_token, *vars(batch.cache.spans).values()):
        tensor.zero_()
    graph.replay()
    return {"out": (out, expected[0]), "lse": (lse, expected[1])}


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
