"""Attention over segment and tail in torch.

Prefill writes KVs to ordinary slots and, while the last chunk's queries are in hand, has
every prompt that will be compressed scored. Decode reads segment and tail of the whole
batch at once; an uncompressed request is one whose segment is empty.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from kvc_kernels.decode import decode
from kvc_kernels.extend import extend, extend_compressed
from kvc_kernels.pages import HeadPages, Rows, head_pages

from sgl_kvc.attention.base import KvcAttentionBackend

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class TorchAttentionBackend(KvcAttentionBackend):
    """In torch, vectorised over requests and heads; for CPUs."""

    def __init__(self, model_runner: ModelRunner):
        super().__init__(model_runner)
        self._pages: list[HeadPages] = []
        self._counted: torch.Tensor | None = None
        self._spans: list[tuple[int, int, int]] = []

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Gather what all layers of this forward share."""
        counting = self.segments.counts()
        self._counted = None
        if forward_batch.forward_mode.is_decode_or_idle():
            request = forward_batch.req_pool_indices.long()
            rows = Rows(
                req_to_token=self.req_to_token,
                request=request,
                seq_len=forward_batch.seq_lens.long(),
                segment_begin=self.segments.segment_begin[request],
                tail_begin=self.segments.tail_begin[request],
                page_start=self.segments.page_start[request],
            )
            self._pages = head_pages(
                rows, self.pool.layer_num, self.pool.head_num, self.pool.page_size
            )
            if counting:
                counted = self.segments.counted[request]
                self.pool.reset_metric(forward_batch.out_cache_loc[counted])
                self._counted = counted.repeat_interleave(self.pool.head_num)
        else:
            self._spans = list(
                zip(
                    forward_batch.req_pool_indices.tolist(),
                    forward_batch.extend_prefix_lens_cpu,
                    forward_batch.extend_seq_lens_cpu,
                    strict=True,
                )
            )
            first = 0
            for row, _, new in self._spans if counting else ():
                if self.segments.counts(row):
                    self.pool.reset_metric(forward_batch.out_cache_loc[first : first + new])
                first += new

    def attend_decode(
        self, query: torch.Tensor, layer: RadixAttention, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        out, _ = decode(
            query,
            self.pool.flat_k,
            self.pool.flat_v,
            self._pages[layer.layer_id - self.pool.start_layer],
            layer.scaling,
            None if self._counted is None else self.pool.metric.flatten(0, 2),
            self._counted,
        )
        return out.to(query.dtype)

    def attend_extend(
        self,
        query: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        out = query.new_empty(*query.shape[:2], layer.v_head_dim)
        first = 0
        for row, prefix, new in self._spans:
            mine = slice(first, first + new)
            out[mine] = self._extend(query[mine], row, prefix + new, layer)
            first += new
        return out

    def _extend(
        self, query: torch.Tensor, row: int, seq_len: int, layer: RadixAttention
    ) -> torch.Tensor:
        """Attention of one request's new tokens, the last of its `seq_len`."""
        if self.segments.begin(row) is not None:
            return self._extend_compressed(query, row, seq_len, layer)
        slots = self.req_to_token[row, :seq_len]
        keys, values = self.pool.read(layer.layer_id, slots)
        plan = self.pool.plans.get(row)
        if plan is not None:
            local = layer.layer_id - self.pool.start_layer
            plan.observe(local, query, seq_len, lambda: (keys, values), layer.scaling)
        return extend(query, keys, values, layer.scaling)

    def _extend_compressed(
        self, query: torch.Tensor, row: int, seq_len: int, layer: RadixAttention
    ) -> torch.Tensor:
        """The same over a compressed prefix (mixed prefill and decode batches)."""
        heads, layers, page_size = self.pool.head_num, self.pool.layer_num, self.pool.page_size
        local = layer.layer_id - self.pool.start_layer
        begin, end = self.segments.begin(row), int(self.segments.tail_begin[row])
        blocks = self.req_to_token[row, begin:end:page_size].long() // page_size
        per_block = layers * heads
        in_block = torch.arange(per_block, device=blocks.device)
        run = (blocks[:, None] * per_block + in_block).flatten()
        first = local * heads
        bounds = self.segments.page_start[row, first : first + heads + 1].tolist()
        pages = [run[a:b] for a, b in itertools.pairwise(bounds)]
        tail = self.req_to_token[row, end:seq_len]
        tail_keys, tail_values = self.pool.read(layer.layer_id, tail)
        return extend_compressed(
            query,
            [self.pool.flat_k[mine].flatten(0, 1).to(tail_keys.dtype) for mine in pages],
            [self.pool.flat_v[mine].flatten(0, 1).to(tail_keys.dtype) for mine in pages],
            tail_keys,
            tail_values,
            layer.scaling,
        )
