"""Attention over segment and tail in Triton: nothing waits for the device, CUDA graphs hold it.

Decode reads F, S and page starts on the device by request row, so a captured step serves any
mixture of compressed and uncompressed requests. Row 0, which pads graphs, is never compressed.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from kvc_kernels.gpu.decode import decode
from kvc_kernels.gpu.extend import extend
from kvc_kernels.gpu.layout import Cache

from sgl_kvc.attention.base import KvcAttentionBackend

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """The new tokens of a prefill.

    Attributes
    ----------
    start : int64 [B + 1], where each request's begin; on the device.
    most_new : the most a request has.
    spans : of every request being prefilled its row, its KVs before, and its new ones; empty
        where nothing is scored.
    """

    start: torch.Tensor
    most_new: int
    spans: list[tuple[int, int, int]]


class TritonAttentionBackend(KvcAttentionBackend):
    """With device lengths throughout; also what runs in Triton's interpreter."""

    def __init__(self, model_runner: ModelRunner):
        super().__init__(model_runner)
        pool, segments = self.pool, self.segments
        self.cache = Cache(
            pool.arena_k.view(pool.dtype),
            pool.arena_v.view(pool.dtype),
            self.req_to_token,
            segments.segment_begin,
            segments.tail_begin,
            segments.page_start,
        )
        self._chunk: _Chunk | None = None

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Where the new tokens of a prefill lie; a decode step has nothing to prepare."""
        if forward_batch.forward_mode.is_decode_or_idle():
            return
        new = forward_batch.extend_seq_lens_cpu
        start = F.pad(forward_batch.extend_seq_lens.long().cumsum(0), (1, 0))
        # Decoding requests of a mixed batch come last, and are not among them.
        spans = zip(self.pool.prefilling, forward_batch.extend_prefix_lens_cpu, new, strict=False)
        self._chunk = _Chunk(start, max(new), list(spans) if self.pool.plans else [])

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing: kernels read the engine's own tensors."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Padding rows attend to one KV of SGLang's padding block."""
        return 1

    def attend_decode(
        self, query: torch.Tensor, layer: RadixAttention, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        counting = self.segments.counts()  # never while a graph is captured or replayed (compat)
        out, _ = decode(
            query,
            self.cache,
            layer.layer_id - self.pool.start_layer,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            layer.scaling,
            metric=self.pool.metric if counting else None,
            counted=self.segments.counted if counting else None,
        )
        return out

    def attend_extend(
        self,
        query: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        out, lse = self.attend_chunk(query, k, v, layer, forward_batch)
        first = 0
        for row, prefix, new in self._chunk.spans:
            mine = slice(first, first + new)
            self.observe(query[mine], row, prefix + new, layer, lse[mine])
            first += new
        return out

    def attend_chunk(
        self,
        query: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `attend_extend`, but nothing is scored: [t, Hq, Dv], and the natural log-sum-exp.

        The latter float32 [t, Hq]; None is allowed where no prompt is scored.
        """
        return extend(
            query,
            self.cache,
            layer.layer_id - self.pool.start_layer,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            self._chunk.start,
            self._chunk.most_new,
            layer.scaling,
        )
