"""Memory of decode for batches that are captured, and how many requests it can be for.

Of FlashInfer's kernels (`gpu.flashinfer_decode`) as FlashInfer 0.6.15 uses it.
"""

from __future__ import annotations

import functools

import torch

from kvc_kernels.cache import KVCache
from kvc_kernels.gpu.schedule import schedule_sizes
from kvc_kernels.gpu.second_pass import second_pass_sizes

#: What FlashInfer's wrappers make themselves for plans.
_PLAN_BYTES = 8 << 20
#: More programs than any GPU holds of a kernel on one processor.
_MOST_PROGRAMS = 32


def workspace_bytes(backend: str, rows: int, group: int, head_dim: int, processors: int) -> int:
    """Bytes that a backend works in, for up to `rows` rows of `group` query heads.

    "fa2" in CUDA graphs keeps partial results of as many tiles of queries as there may be
    (``PrefillSplitQOKVIndptr`` and ``batch_prefill_tmp_v``, ``tmp_s`` in scheduler.cuh). The others
    take what they are given; 128 MiB is what FlashInfer recommends.

    Parameters
    ----------
    processors : of the GPU.
    """
    if backend != "fa2":
        return 128 << 20
    tile = 16 if group <= 16 else 64 if group <= 64 or head_dim >= 256 else 128
    tiles = max(2 * processors, -(-rows * group // tile) + rows - 1)
    return group * tiles * tile * (head_dim + 1) * 4 + 2 * 16  # both are aligned


def most_requests(backend: str, heads: int, tokens: int) -> int:
    """Requests of `heads` KV heads and up to `tokens` tokens that a backend can address."""
    return ((1 << 32) - 1) // (heads * tokens) if backend == "fa2" else 1 << 31


def decode_bytes(
    backend: str,
    *,
    requests: int,
    layers: int,
    heads: int,
    group: int,
    head_dim: int,
    page_size: int,
    tokens: int,
    processors: int,
) -> int:
    """Bytes of device memory that decode keeps for captured batches of up to `requests`.

    Parameters
    ----------
    backend : "triton", "fa2", "xqa" or "trtllm". The latter three have the schedule of Triton's
        beside their own buffers, for steps that add to the metric.
    tokens : that a row has room for. processors : of the GPU.
    """
    pages = -(-tokens // page_size)
    programs = _MOST_PROGRAMS * processors
    taken = 4 * sum(schedule_sizes(layers, heads, requests, pages, programs))
    taken += 4 * sum(second_pass_sizes(layers, heads, requests, programs))
    if backend != "triton":
        rows = requests * heads
        taken += 4 * (rows * (pages + 4) + 2)  # table, length, begin, indptr, last_page
        taken += workspace_bytes(backend, rows, group, head_dim, processors)
        taken += _PLAN_BYTES if backend == "fa2" else 0
    return taken


class DecodeBuffers:
    """What the decode steps of all batch sizes share, by turns: made once, for the largest.

    Parameters
    ----------
    backend, query_heads, max_pages : as `PagedDecode` has them.
    cache : where KVs are.
    requests : of the largest batch.

    Attributes
    ----------
    rows : ``requests * H``.
    table, length : what `block_table` writes, of so many rows.
    begin, indptr, last_page : FlashInfer's view of that, for "fa2".
    workspace, plan : FlashInfer's own, the latter for "fa2". "xqa" keeps semaphores in the first 8
        MiB of its workspace, which are zero between calls.
    """

    def __init__(
        self, backend: str, cache: KVCache, requests: int, query_heads: int, max_pages: int
    ):
        device = cache.arena_k.device
        self.rows, self.max_pages = requests * cache.heads, max_pages
        if requests > most_requests(backend, cache.heads, max_pages * cache.page_size):
            raise ValueError("fa2 counts tokens in 32 bits: batch * heads * max_pages * P")
        new = functools.partial(torch.zeros, dtype=torch.int32, device=device)
        self.table, self.length = new(self.rows, max_pages), new(self.rows)
        self.begin = new(self.rows + 1)
        torch.arange(self.rows + 1, out=self.begin)
        self.begin *= max_pages
        self.indptr, self.last_page = self.begin.clone(), torch.zeros_like(self.length)
        processors = 0
        if device.type == "cuda":
            processors = torch.cuda.get_device_properties(device).multi_processor_count
        group, dim = query_heads // cache.heads, cache.arena_k.shape[-1]
        size = workspace_bytes(backend, self.rows, group, dim, processors)
        self.workspace = torch.zeros(size, dtype=torch.uint8, device=device)
        plan = _PLAN_BYTES if backend == "fa2" else 0
        self.plan = torch.empty(plan, dtype=torch.uint8, device=device)
