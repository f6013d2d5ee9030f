"""Decode of what is not compressed, by the kernels that SGLang takes, in a pool as SGLang has it.

All heads hold the same; pools of 8 bits are what people use in the place of compression.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch

from bench.gpu.batches import random
from bench.gpu.cases import Size
from bench.gpu.records import Skipped, median_ms

#: By name, the module that has it.
BACKENDS = {"fa3": "sgl_kernel", "flashinfer": "flashinfer"}
#: Tokens of a page. SGLang's default is 1, which is no faster.
_PAGE = 16
_WORKSPACE = 512 << 20


def measure(
    backend: str,
    size: Size,
    requests: int,
    kvs: int,
    dtype: torch.dtype,
    cache: torch.dtype,
    device: str,
) -> dict:
    """Attention of a decode step, all layers, of requests of `kvs` tokens each.

    Parameters
    ----------
    dtype, cache : of queries, and of the pool.

    Raises
    ------
    Skipped : without a GPU, the backend, or the memory.
    """
    if device == "cpu":
        raise Skipped("needs a GPU")
    if importlib.util.find_spec(BACKENDS[backend]) is None:
        raise Skipped(f"{BACKENDS[backend]} is not installed")
    taken = size.bytes_of(requests * (kvs + _PAGE), cache)
    if taken > 0.9 * torch.cuda.mem_get_info()[0]:
        raise Skipped(f"{taken / 1e9:.0f} GB do not fit")
    pages = -(-kvs // _PAGE)
    shape = size.layers, requests * pages, _PAGE, size.heads, size.dim
    pool = [random(shape, cache, device) for _ in range(2)]
    table = torch.randperm(requests * pages, device=device).int().view(requests, pages)
    query = size.query(requests, dtype, device)
    make = {"fa3": _fa3, "flashinfer": _flashinfer}[backend]
    attend = make(query, table, kvs, size, cache)

    def step() -> None:
        for keys, values in zip(*pool, strict=True):
            attend(query, keys, values)

    found = median_ms(step, device)
    if cache == dtype:
        got = attend(query, pool[0][0], pool[1][0])
        found["difference"] = _difference(got, query, pool, table, kvs)
    found["bytes"] = size.bytes_of(requests * kvs, cache)
    return found | {"gb_per_s": found["bytes"] / found["ms"] / 1e6}


def _fa3(query, table, kvs: int, size: Size, cache: torch.dtype) -> Callable:
    """As SGLang's ``flashattention_backend.py`` calls it; with 8 bits the query is cast too."""
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    requests = len(query)
    lengths = torch.full((requests,), kvs, dtype=torch.int32, device=query.device)
    start = torch.arange(requests + 1, dtype=torch.int32, device=query.device)
    kwargs = {}
    if cache.itemsize == 1:
        ones = torch.ones(requests, size.heads, device=query.device)
        kwargs = {"q_descale": ones, "k_descale": ones, "v_descale": ones}

    def attend(query, keys, values):
        return flash_attn_with_kvcache(
            q=query.to(cache), k_cache=keys, v_cache=values, page_table=table,
            cache_seqlens=lengths, cu_seqlens_q=start, max_seqlen_q=1,
            softmax_scale=size.dim**-0.5, causal=True, **kwargs,
        )  # fmt: skip

    return attend


def _flashinfer(query, table, kvs: int, size: Size, cache: torch.dtype) -> Callable:
    """The FA2 tensor-core kernel, which SGLang takes for grouped queries."""
    import flashinfer

    device, (requests, pages) = query.device, table.shape
    workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    whole = torch.arange(requests + 1, dtype=torch.int32, device=device) * pages
    last = torch.full((requests,), kvs - (pages - 1) * _PAGE, dtype=torch.int32, device=device)
    wrapper.plan(
        whole, table.flatten(), last, size.heads * size.group, size.heads, size.dim, _PAGE,
        q_data_type=query.dtype, kv_data_type=cache,
    )  # fmt: skip
    return lambda query, keys, values: wrapper.run(query, (keys, values))


def _difference(got: torch.Tensor, query, pool, table, kvs: int) -> float:
    """Largest difference to the textbook's attention, of the first request in the first layer."""
    keys, values = (each[0][table[0].long()].flatten(0, 1)[:kvs].float() for each in pool)
    grouped = query[0].float().view(keys.shape[1], -1, keys.shape[-1])
    logits = torch.einsum("hgd,nhd->hgn", grouped, keys) * keys.shape[-1] ** -0.5
    expected = torch.einsum("hgn,nhd->hgd", logits.softmax(-1), values).flatten(0, 1)
    return (got[0].float().view_as(expected) - expected).abs().max().item()
