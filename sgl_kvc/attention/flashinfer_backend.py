"""Prefill by FlashInfer, and decode by one of its kernels.

What FlashInfer does not do stays with Triton: few new tokens behind a compressed context, and
decode steps that add to the metric of compression in decode.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from kvc_kernels.batch import Batch
from kvc_kernels.gpu.decode_buffers import DecodeBuffers
from kvc_kernels.gpu.flashinfer_decode import PagedDecode, supported
from kvc_kernels.gpu.flashinfer_prefill import PagedPrefill, try_out, warm_up
from sglang.srt.layers.radix_attention import RadixAttention

from sgl_kvc.attention.backend import Forward, KvcAttentionBackend
from sgl_kvc.attention.support import UnsupportedError

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

_WORKSPACE_BYTES = 128 << 20


class FlashInferAttentionBackend(KvcAttentionBackend):
    """`KvcAttentionBackend` with FlashInfer where it can take over.

    Prefill is tried out once, and apart from it that of what is behind a compressed context: where
    FlashInfer cannot be compiled or does not agree with Triton, Triton does it.

    Parameters
    ----------
    kernels : "fa2", "xqa" or "trtllm" for decode; None leaves it to Triton.

    Raises
    ------
    UnsupportedError : if these kernels cannot serve this model on this GPU, and why.
    """

    def __init__(self, model_runner: ModelRunner, kernels: str | None):
        super().__init__(model_runner)
        self.kernels, self.dtype = kernels, model_runner.dtype
        layers = (x for x in model_runner.model.modules() if isinstance(x, RadixAttention))
        first = next(layers)
        self.query_heads, self.scale = first.tp_q_head_num, first.scaling
        reason = kernels and self._unsupported(kernels)
        if reason:
            raise UnsupportedError(f"--kvc-decode {kernels}: {reason}")
        self._decode: PagedDecode | None = None
        self._by_batch: dict[int, PagedDecode] = {}
        self._buffers: DecodeBuffers | None = None
        self._captured = 0  # requests up to which graphs hold the buffers they were captured with
        self._prefill: PagedPrefill | None = None
        self._prefills = self._tried_prefill()

    def _tried_prefill(self) -> PagedPrefill | None:
        """None where FlashInfer cannot prefill this model here; the log says why."""
        reason = self._unsupported("fa2")
        if reason is None:
            arena = self.cache.arena_k
            try:
                prefill = PagedPrefill(
                    self._bytes(),
                    query_heads=self.query_heads,
                    heads=self.cache.heads,
                    head_dim=arena.shape[-1],
                    page_size=self.cache.page_size,
                    dtype=self.dtype,
                    kv_dtype=arena.dtype,
                    scale=self.scale,
                )
                try_out(prefill, arena.device)
                self._try_segments(prefill)
                warm_up(prefill, self.cache)
            except Exception as error:  # compilers, loaders and launches fail in many ways
                reason = f"{type(error).__name__}: {error}"
            else:
                return prefill
        logger.warning("Triton prefills, not FlashInfer: %s", reason)
        return None

    def _try_segments(self, prefill: PagedPrefill) -> None:
        """Leave compressed contexts to Triton if FlashInfer cannot read them; say who does."""
        try:
            try_out(prefill, self.cache.arena_k.device, segments=True)
        except Exception as error:
            prefill.segments = None
            logger.warning(
                "FlashInfer prefills; Triton reads compressed contexts, not FlashInfer: %s: %s",
                type(error).__name__, error,
            )  # fmt: skip
        else:
            logger.info("FlashInfer prefills, behind compressed contexts too")

    def _unsupported(self, kernels: str) -> str | None:
        arena = self.cache.arena_k
        if self.dtype not in (torch.float16, torch.bfloat16):
            return f"FlashInfer needs a model of 16-bit floats, not of {self.dtype}"
        return supported(
            kernels,
            torch.cuda.get_device_capability(arena.device),
            arena.shape[-1],
            self.cache.page_size,
            arena.dtype,
            self.query_heads // self.cache.heads,
        )

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        forward = self._of(forward_batch)
        if forward_batch.forward_mode.is_decode_or_idle():
            self._plan_decode(forward_batch, forward.batch)
            return
        self._prefill = None
        if self._prefills is not None and self._plan_prefill(forward_batch, forward):
            self._prefill = self._prefills

    def _plan_prefill(self, forward_batch: ForwardBatch, forward: Forward) -> bool:
        """Whether FlashInfer does it. A request that nobody knows could be compressed."""
        assert self._prefills is not None
        before = list(forward_batch.extend_prefix_lens_cpu)
        known = forward.requests or [None] * len(before)
        compressed = [
            nth
            for nth, each in enumerate(known)
            if each is None or each.row is None or each.segment is not None
        ]
        return self._prefills.plan(forward.batch, before, compressed)

    def init_forward_metadata_out_graph(
        self, forward_batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Before a decode step is captured, and before each replay."""
        super().init_forward_metadata_out_graph(forward_batch, in_capture)
        self._plan_decode(forward_batch, self._of(forward_batch).batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Buffers for all batch sizes that will be captured, the largest's."""
        if self.kernels is None:
            super().init_cuda_graph_state(max_bs, max_num_tokens)
            return
        self._by_batch, self._captured = {}, max_bs
        self._buffers = self._new_buffers(max_bs)

    def _new_buffers(self, requests: int) -> DecodeBuffers:
        assert self.kernels is not None
        max_pages = -(-self.req_to_token.shape[1] // self.cache.page_size)
        return DecodeBuffers(self.kernels, self.cache, requests, self.query_heads, max_pages)

    def _decode_of(self, requests: int) -> PagedDecode:
        """That of a batch size; kept.

        A batch that is larger than all before, and than what is captured, needs larger buffers.
        What was made for the smaller ones stays with the graphs and is let go of otherwise.
        """
        assert self.kernels is not None
        found = self._by_batch.get(requests)
        if found is not None:
            return found
        if self._buffers is None or requests * self.cache.heads > self._buffers.rows:
            room = min(1 << (requests - 1).bit_length(), len(self.req_to_token))
            self._buffers = self._new_buffers(max(requests, room))
            self._by_batch = {n: x for n, x in self._by_batch.items() if n <= self._captured}
        found = self._by_batch[requests] = PagedDecode(
            self.kernels,
            self.cache,
            requests,
            self.query_heads,
            self.dtype,
            self.scale,
            self._buffers,
        )
        return found

    def _plan_decode(self, forward_batch: ForwardBatch, batch: Batch) -> None:
        """Say what a step is about; one of no requests (an idle rank's) is Triton's: nothing."""
        self._decode = None
        requests, page_size = forward_batch.batch_size, self.cache.page_size
        if self.kernels is None or not requests:
            return
        decode = self._decode_of(requests)
        pages = None
        if self.kernels == "fa2":
            pages = [-(-max(0, int(length)) // page_size) for length in forward_batch.seq_lens_cpu]
        decode.plan(batch, pages)
        self._decode = decode

    def attend_decode(
        self, query: torch.Tensor, layer: RadixAttention, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        if self._decode is None or self.spans.tracks_attention():
            return super().attend_decode(query, layer, forward_batch)
        return self._decode.run(layer.layer_id - self.pool.start_layer, query)

    def attend_extend(
        self,
        query: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._prefill is None:
            return super().attend_extend(query, k, v, layer, forward_batch)
        return self._prefill.run(
            layer.layer_id - self.pool.start_layer,
            query,
            k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
            v.view(-1, layer.tp_v_head_num, layer.v_head_dim),
            self._of(forward_batch).scoring is not None,
        )

    def _bytes(self) -> torch.Tensor:
        """A workspace of prefill."""
        return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=self.req_to_token.device)
