"""How fast memory is read: a copy, decode steps of ragged and of equal heads, a compression."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from kvc_kernels.gpu.decode import decode, new_schedule

from bench.gpu import dense, served
from bench.gpu.batches import Ragged, build
from bench.gpu.cases import Case, Size
from bench.gpu.records import Records, Skipped, median_ms

#: Llama-3.1-8B; `window` is not used.
LLAMA = Size(layers=32, heads=8, group=4, dim=128, page=16, requests=0, tokens=0, window=32)
SMOKE = Size(layers=2, heads=2, group=2, dim=16, page=8, requests=0, tokens=0, window=4)
#: Requests of a step, and the KVs a head would have on average in 16 bits: 6,000 tokens at rates 64
#: and 8. A pool of 8 bits has twice as many in the same bytes.
REQUESTS, KVS = (16, 64, 256, 1024), (94, 750)
#: Of the logarithms of heads' lengths.
SIGMAS = (0.0, 0.7, 1.2)
FP8 = torch.float8_e4m3fn
#: What building a batch needs at its peak, over the arenas.
_HEADROOM = 1.15


def run(records: Records, *, smoke: bool) -> None:
    """All records; points that the memory does not hold are skipped."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size, dtype = (SMOKE if smoke else LLAMA), torch.bfloat16
    if device == "cpu":
        dtype = torch.float16  # the interpreter's
    requests, kvs = ((2,), (24,)) if smoke else (REQUESTS, KVS)
    broken: set[str] = set()
    with torch.inference_mode():
        measure_copy(records, device, 1 << 16 if smoke else 4 << 30)
        for count in requests:
            with records.attempt("schedule", requests=count, layers=size.layers) as found:
                found |= measure_schedule(size, count, dtype, device)
        for count in requests:
            for length in kvs:
                for cache, sigma in _pools(dtype, device):
                    facts = _facts(count, length, cache) | {"sigma": sigma}
                    with records.attempt("decode step", backend="triton", **facts) as found:
                        found |= measure_step(size, count, length, sigma, dtype, cache, device)
                for backend in dense.BACKENDS:
                    for cache in (dtype, FP8):
                        facts = _facts(count, length, cache)
                        with records.attempt("decode step", backend=backend, **facts) as found:
                            if (key := f"{backend} {cache}") in broken:  # it might compile anew
                                raise Skipped("it failed before")
                            found |= dense.measure(
                                backend, size, count, in_bytes_of(length, cache), dtype, cache,
                                device,
                            )  # fmt: skip
                        broken |= {key} if found["status"] == "error" else set()
        served.run(records, Case(size, dtype, device), smoke=smoke)


def _pools(dtype: torch.dtype, device: str) -> Iterator[tuple[torch.dtype, float]]:
    """Cache types that a GPU has, and how unequal heads are."""
    e4m3 = device == "cpu" or torch.cuda.get_device_capability() >= (8, 9)
    for cache in (dtype, FP8) if e4m3 else (dtype,):
        for sigma in SIGMAS:
            yield cache, sigma


def _facts(requests: int, kvs: int, cache: torch.dtype) -> dict:
    return {"requests": requests, "kvs": kvs, "bits": 8 * cache.itemsize}


def in_bytes_of(kvs: int, cache: torch.dtype) -> int:
    """KVs of a cache that take the bytes of so many in 16 bits."""
    return kvs * 2 // cache.itemsize


def measure_copy(records: Records, device: str, size: int) -> None:
    """A copy on the device: bytes read and bytes written."""
    with records.attempt("copy", bytes=size) as found:
        source = torch.zeros(size, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        found |= median_ms(lambda: target.copy_(source), device)
        found["gb_per_s"] = 2 * size / found["ms"] / 1e6


def compressed(
    size: Size, requests: int, kvs: int, sigma: float, cache: torch.dtype, device: str
) -> Ragged:
    """Compressed requests in one pool of all layers, a page of tail each.

    Heads hold `kvs` in 16 bits on average, or what takes their bytes. Raises Skipped where it does
    not fit.
    """
    held = in_bytes_of(kvs, cache)
    needed = size.bytes_of(requests * (held + size.page), cache) * _HEADROOM
    if device == "cuda" and needed > torch.cuda.mem_get_info()[0]:
        raise Skipped(f"{needed / 1e9:.0f} GB do not fit")
    return build(
        [max(1, held // size.page - 1)] * requests, [size.page] * requests,
        layers=size.layers, heads=size.heads, page=size.page, dim=size.dim,
        dtype=cache, device=device, sigma=sigma,
    )  # fmt: skip


def measure_step(
    size: Size,
    requests: int,
    kvs: int,
    sigma: float,
    dtype: torch.dtype,
    cache: torch.dtype,
    device: str,
) -> dict:
    """Attention of a decode step, all layers and their schedule; of its keys and values the bytes.

    `programs` share a layer.
    """
    made = compressed(size, requests, kvs, sigma, cache, device)
    query = size.query(requests, dtype, device)
    schedule = new_schedule(made.batch.cache, requests, query.shape[1], dtype)

    def step() -> None:
        schedule.update(made.batch)
        for layer in range(size.layers):
            decode(query, made.batch, layer, size.dim**-0.5)

    found = median_ms(step, device)
    found["longest"], found["programs"] = made.held.max().item(), schedule.programs
    found["bytes"] = 2 * made.held.sum().item() * size.dim * cache.itemsize
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
