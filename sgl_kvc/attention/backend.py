"""SGLang's attention backend of ours: attention over spans, and prompts that are scored.

Prefill writes KVs to ordinary slots and, while a chunk's queries are in hand, has every prompt
that will be compressed scored. Decode reads the spans of the whole batch at once; an uncompressed
request is one that has nothing but a tail. The kernels are torch's on a CPU and Triton's on a GPU
(`kvc_kernels.dispatch`); there nothing waits for the device, so CUDA graphs hold a decode step for
any mixture of compressed and uncompressed requests.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

import torch
from kvc_kernels.batch import Batch
from kvc_kernels.decode import decode
from kvc_kernels.dispatch import use_triton
from kvc_kernels.extend import extend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention

from sgl_kvc.attention.facts import read_facts
from sgl_kvc.attention.scoring import PromptScoring
from sgl_kvc.attention.support import check_layer
from sgl_kvc.cache.request import Request

if TYPE_CHECKING:
    from kvc_kernels.gpu.schedule import Schedule
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sgl_kvc.pool.arena import ArenaKVPool


logger = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class Forward:
    """What all layers of one forward share.

    Attributes
    ----------
    lengths : the forward's ``seq_lens``, by which it is known: where SGLang replays a graph of a
        prefill, layers are given another ForwardBatch than `init_forward_metadata` was.
    batch : what attention reads.
    requests : of a prefill, what sgl-kvc knows of each; None for those it does not know.
    scoring : its prompts that are scored; None if none is.
    """

    lengths: torch.Tensor
    batch: Batch
    requests: list[Request | None] = dataclasses.field(default_factory=list)
    scoring: PromptScoring | None = None


class KvcAttentionBackend(AttentionBackend):
    """Attention for models whose layers are all plain multi-head (GQA, MQA, MHA)."""

    def __init__(self, model_runner: ModelRunner):
        super().__init__()
        self.pool: ArenaKVPool = model_runner.token_to_kv_pool
        self.cache = self.pool.bind(model_runner.req_to_token_pool)
        self.req_to_token = self.cache.req_to_token
        self.spans = self.pool.spans
        self.pool.facts = read_facts(model_runner)
        self._forward: Forward | None = None
        self._model_runner = model_runner
        self._schedule: Schedule | None = None
        if self.pool.facts.head_profile is None:
            logger.info(
                "the model has no head profile; `sgl-kvc profile` measures one, and the default "
                "policy is the better for it"
            )

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Gather what all layers of this forward share."""
        self._forward = self._new_forward(forward_batch)
        if self.spans.tracks_attention() and not use_triton(self.req_to_token):
            self._reset_metric(forward_batch)  # the Triton kernel that stores KVs does it

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Make the tensors that captured decode steps go by."""
        if not use_triton(self.req_to_token):
            return
        from kvc_kernels.gpu.decode import new_schedule

        model_runner = self._model_runner
        layer = next(x for x in model_runner.model.modules() if isinstance(x, RadixAttention))
        self._schedule = new_schedule(self.cache, max_bs, layer.tp_q_head_num, model_runner.dtype)

    def init_forward_metadata_out_graph(
        self, forward_batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Before a decode step is captured, and before each replay: what all layers go by.

        Not inside the graph: SGLang says that a step has read rows and spans before it replays the
        graph (`DecodeCudaGraphRunner.execute`, ``war_fastpath_read_done_event``), and changes them
        from then on. The step reads only the snapshot made here.
        """
        self._forward = self._new_forward(forward_batch)
        if self._schedule is not None:
            self._schedule.update(self._forward.batch)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Padding rows attend to one KV of SGLang's padding block."""
        return 1

    def support_triton(self) -> bool:
        """Whether SGLang may use its own Triton kernels beside this."""
        return self.req_to_token.is_cuda

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """What SGLang calls for a decode step: [B, Hq * D] -> [B, Hq * Dv]."""
        self._store(k, v, layer, forward_batch, save_kv_cache, kwargs)
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        return self.attend_decode(query, layer, forward_batch).view(q.shape[0], -1)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """What SGLang calls for a prefill: [t, Hq * D] -> [t, Hq * Dv].

        Prompts that will be compressed are scored on the way.
        """
        self._store(k, v, layer, forward_batch, save_kv_cache, kwargs)
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out, lse = self.attend_extend(query, k, v, layer, forward_batch)
        self._observe(query, lse, layer, forward_batch)
        return out.view(q.shape[0], -1)

    def attend_decode(
        self, query: torch.Tensor, layer: RadixAttention, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """Attention of one token per request, stored already: [B, Hq, D] -> [B, Hq, Dv]."""
        tracks = self.spans.tracks_attention()  # never in a CUDA graph (compat)
        out, _ = decode(
            query,
            self._of(forward_batch).batch,
            layer.layer_id - self.pool.start_layer,
            layer.scaling,
            metric=self.pool.metric if tracks else None,
            tracked=self.spans.tracked if tracks else None,
        )
        return out.to(query.dtype)

    def attend_extend(
        self,
        query: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of the new tokens of every request, one request after the other.

        Parameters
        ----------
        query : [t, Hq, D].
        k, v : [t, H * D] and [t, H * Dv], the new tokens'; they are stored already.

        Returns
        -------
        out : [t, Hq, Dv].
        lse : float32 [t, Hq], natural log-sum-exp of every query's logits; None if unknown.
        """
        local = layer.layer_id - self.pool.start_layer
        return extend(query, self._of(forward_batch).batch, local, layer.scaling)

    def _of(self, forward_batch: ForwardBatch) -> Forward:
        """What `init_forward_metadata` prepared; made now where SGLang has not called it."""
        if self._forward is None or self._forward.lengths is not forward_batch.seq_lens:
            self._forward = self._new_forward(forward_batch)
        return self._forward

    def _new_forward(self, forward_batch: ForwardBatch) -> Forward:
        forward = Forward(forward_batch.seq_lens, self._new_batch(forward_batch))
        if forward_batch.forward_mode.is_decode_or_idle():
            return forward
        forward.requests = self.requests(forward_batch)
        if any(each is not None and each.scores is not None for each in forward.requests):
            lens = zip(
                forward.requests,
                forward_batch.extend_prefix_lens_cpu,
                forward_batch.extend_seq_lens_cpu,
                strict=False,  # a batch may be padded
            )
            forward.scoring = PromptScoring(self.pool, self.req_to_token, lens)
        return forward

    def _new_batch(self, forward_batch: ForwardBatch) -> Batch:
        request, seq_len = forward_batch.req_pool_indices, forward_batch.seq_lens
        if forward_batch.forward_mode.is_decode_or_idle():
            return Batch(self.cache, request, seq_len)
        new, rows = list(forward_batch.extend_seq_lens_cpu), None
        if not request.is_cuda:
            before = forward_batch.extend_prefix_lens_cpu
            rows = list(zip(request.tolist(), before, new, strict=True))
        return Batch(self.cache, request, seq_len, new, rows)

    def requests(self, forward_batch: ForwardBatch) -> list[Request | None]:
        """What sgl-kvc knows of the requests of a batch, in its order."""
        return [self.pool.requests.get(rid) for rid in forward_batch.rids or ()]

    def _observe(
        self,
        query: torch.Tensor,
        lse: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
    ) -> None:
        """Let the scores of every prompt in the batch see one layer of its chunk."""
        scoring = self._of(forward_batch).scoring
        if scoring is not None:
            scoring.observe(query, lse, layer)

    def _reset_metric(self, forward_batch: ForwardBatch) -> None:
        """Start the metric of new KVs at zero, of requests whose attention is tracked."""
        new = forward_batch.out_cache_loc
        tracked = self.spans.tracked[forward_batch.req_pool_indices.long()] > 0
        if not forward_batch.forward_mode.is_decode_or_idle():
            tracked = tracked.repeat_interleave(forward_batch.extend_seq_lens, output_size=len(new))
        self.pool.reset_metric(new[tracked])

    def _store(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
        extras: dict,
    ) -> None:
        """Write the new tokens' KVs to their slots."""
        check_layer(layer, extras)
        if save_kv_cache and k is not None:
            self.pool.set_kv_buffer(
                layer,
                forward_batch.out_cache_loc,
                k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
                v.view(-1, layer.tp_v_head_num, layer.v_head_dim),
            )
