"""The KV pool whose blocks are bags of head pages.

One allocation for all layers, ``[num_blocks, L, H, P, D]`` for keys and one for values. To
SGLang it is an ordinary paged pool (slot = block * P + offset); a block that a compressed
request owns holds the same ``L * H`` head pages in another order (docs/design.md).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from kvc_kernels.cache import KVCache
from kvc_kernels.dispatch import use_triton
from kvc_kernels.store import store
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

from sgl_kvc.policy.facts import ModelFacts
from sgl_kvc.policy.kvs import PromptKVs
from sgl_kvc.pool.metric import made_at_start
from sgl_kvc.pool.spans import SpanTable


class ArenaKVPool(MHATokenToKVPool):
    """SGLang's multi-head KV pool in the arena's layout.

    Attributes
    ----------
    arena_k, arena_v : [num_blocks, L, H, P, D] and [num_blocks, L, H, P, Dv]; fp8 as bytes.
    flat_k, flat_v : the same memory by head page, [num_blocks * L * H, P, D], fp8 as such.
    spans, cache : where the KVs of every request row lie, and the view of it all that attention
        reads; made by `bind`.
    requests : those that hold memory, by SGLang's request id: the radix cache's
        `sgl_kvc.cache.request.Request`, which attention asks for by the ids of a batch.
    facts : about the model, for the policies; set by the attention backend.
    metric_at_start : whether `metric` is there from the beginning, for captured decode steps.
    """

    spans: SpanTable
    cache: KVCache
    metric_at_start: bool

    def __init__(self, *args, kv_cache_layout: str | None = None, **kwargs):
        super().__init__(*args, kv_cache_layout="head_pages", **kwargs)
        self.requests: dict[str, Any] = {}
        self.facts = ModelFacts()

    def bind(self, req_to_token_pool: ReqToTokenPool) -> KVCache:
        """Make the span table for the rows of `req_to_token_pool`, once per engine.

        Returns
        -------
        What attention reads: arenas, rows and spans.
        """
        self.spans = SpanTable(
            rows=req_to_token_pool.req_to_token.shape[0],
            heads=self.layer_num * self.head_num,
            device=self.device,
        )
        self.cache = KVCache(
            self.arena_k.view(self.dtype),
            self.arena_v.view(self.dtype),
            req_to_token_pool.req_to_token,
            self.spans.spans,
        )
        return self.cache

    @functools.cached_property
    def metric(self) -> torch.Tensor:
        """float32 [num_blocks, L, H, P]: what each KV counts for when decode compresses again.

        Made with the pool on a GPU (`sgl_kvc.pool.metric`), else by the first request that needs
        it; 4 bytes a KV of a head.
        """
        return torch.zeros(self.arena_k.shape[:-1], device=self.arena_k.device)

    def reset_metric(self, slots: torch.Tensor) -> None:
        """Zero the metric of every layer and head at `slots` ([n]) of canonical blocks."""
        self.metric[slots // self.page_size, :, :, slots % self.page_size] = 0

    @property
    def block_bytes(self) -> int:
        """Bytes one block takes, keys and values of all layers and heads."""
        return (self.arena_k[0].numel() + self.arena_v[0].numel()) * self.store_dtype.itemsize

    def _create_buffers(self) -> None:
        if self.post_capture_active:
            raise ValueError("sgl-kvc: SGLANG_ENABLE_POST_CAPTURE_KV_SIZING is not supported")
        blocks, rest = divmod(self.size + self.page_size, self.page_size)
        if rest:
            raise ValueError(f"pool size {self.size} is not a multiple of page size")
        shape = (blocks, self.layer_num, self.head_num, self.page_size)
        with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE):
            self.arena_k = torch.zeros(
                *shape, self.head_dim, dtype=self.store_dtype, device=self.device
            )
            self.arena_v = torch.zeros(
                *shape, self.v_head_dim, dtype=self.store_dtype, device=self.device
            )
        self.flat_k = self.arena_k.view(self.dtype).view(-1, self.page_size, self.head_dim)
        self.flat_v = self.arena_v.view(self.dtype).view(-1, self.page_size, self.v_head_dim)
        self.k_buffer = list(self.arena_k.unbind(1))
        self.v_buffer = list(self.arena_v.unbind(1))
        self.metric_at_start = self.arena_k.is_cuda and made_at_start()
        if self.metric_at_start:
            _ = self.metric

    def _store_kv_layer(
        self, layer_idx: int, loc: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor
    ) -> None:
        keys, values = self.k_buffer[layer_idx], self.v_buffer[layer_idx]
        if use_triton(loc):
            from kvc_kernels.gpu import store as triton_store

            metric = self.metric[:, layer_idx] if self.spans.tracks_attention() else None
            triton_store.store(keys, values, loc, cache_k, cache_v, metric)
            return
        store(keys, loc, cache_k)
        store(values, loc, cache_v)

    def read(self, layer_id: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values at `slots` ([n]) of canonical blocks: [n, H, D] and [n, H, Dv].

        Of an fp8 cache in float16, which holds every number of either fp8 type.
        """
        kvs = self.prompt(layer_id, slots)
        return kvs.keys, kvs.values

    def prompt(self, layer_id: int, slots: torch.Tensor) -> PromptKVs:
        """What `read` gives, for whom may not ask for it. Kernels read keys where they lie."""
        layer = layer_id - self.start_layer

        def read(buffer: torch.Tensor) -> torch.Tensor:
            found = buffer[slots.long() // self.page_size, :, slots.long() % self.page_size]
            return found.view(self.dtype).half() if self.dtype.itemsize == 1 else found

        keys, values = self.k_buffer[layer], self.v_buffer[layer]
        kvs = PromptKVs(
            len(slots), self.head_num, keys.device, lambda: read(keys), lambda: read(values)
        )
        if use_triton(keys):
            kvs = dataclasses.replace(kvs, layer_k=keys.view(self.dtype), slots=slots)
        return kvs

    def read_pages(self, pages: torch.Tensor) -> torch.Tensor:
        """Keys of head pages, ids [R, C] in the flat view: [R, C * P, D]. fp8 as `read` has it."""
        keys = self.arena_k.flatten(0, 2)[pages].view(self.dtype).flatten(1, 2)
        return keys.half() if self.dtype.itemsize == 1 else keys

    def read_head(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one head's pages, ids [C] in the flat view: [C * P, D] and Dv."""
        keys, values = self.flat_k[pages].flatten(0, 1), self.flat_v[pages].flatten(0, 1)
        return (keys.half(), values.half()) if self.dtype.itemsize == 1 else (keys, values)

    # What assumes one contiguous [slots, H, D] buffer per layer would read the wrong bytes.

    def get_contiguous_buf_infos(self):
        raise NotImplementedError("sgl-kvc: KV transfer (disaggregation) is not supported")

    def get_cpu_copy(self, indices, mamba_indices=None):
        raise NotImplementedError("sgl-kvc: KV offload to the host is not supported")

    def load_cpu_copy(self, kv_cache_cpu, indices, mamba_indices=None):
        raise NotImplementedError("sgl-kvc: KV offload to the host is not supported")

    def move_kv_cache(self, tgt_loc, src_loc):
        raise NotImplementedError("sgl-kvc: speculative decoding is not supported")

    def set_kv_buffer_prefix_valid(self, *args, **kwargs):
        raise NotImplementedError("sgl-kvc: speculative decoding is not supported")
