"""What SGLang's attention backends of ours share: the cache, and prompts that are scored."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sgl_kvc.attention.facts import read_facts
from sgl_kvc.attention.support import check_layer

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sgl_kvc.pool.arena import ArenaKVPool


logger = logging.getLogger(__name__)


class KvcAttentionBackend(AttentionBackend):
    """Attention for models whose layers are all plain multi-head (GQA, MQA, MHA)."""

    def __init__(self, model_runner: ModelRunner):
        super().__init__()
        self.pool: ArenaKVPool = model_runner.token_to_kv_pool
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.segments = self.pool.bind(model_runner.req_to_token_pool)
        self.pool.facts = read_facts(model_runner)
        if self.pool.facts.head_profile is None:
            logger.info(
                "the model has no head profile; `sgl-kvc profile` measures one, and the default "
                "policy is the better for it"
            )

    def attend_decode(
        self, query: torch.Tensor, layer: RadixAttention, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """Attention of one token per request, stored already: [B, Hq, D] -> [B, Hq, Dv]."""
        raise NotImplementedError

    def attend_extend(
        self,
        query: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        """Attention of the new tokens of every request, one request after the other.

        Prompts that will be compressed are scored on the way.

        Parameters
        ----------
        query : [t, Hq, D].
        k, v : [t, H * D] and [t, H * Dv], the new tokens'; they are stored already.

        Returns
        -------
        out : [t, Hq, Dv].
        """
        raise NotImplementedError

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs,
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
        **kwargs,
    ) -> torch.Tensor:
        """What SGLang calls for a prefill: [t, Hq * D] -> [t, Hq * Dv]."""
        self._store(k, v, layer, forward_batch, save_kv_cache, kwargs)
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        return self.attend_extend(query, k, v, layer, forward_batch).view(q.shape[0], -1)

    def observe(
        self,
        query: torch.Tensor,
        row: int,
        seq_len: int,
        layer: RadixAttention,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Let a prompt's plan see one layer of its chunk, which ends at `seq_len`.

        Parameters
        ----------
        query : [t, Hq, D].
        lse : float32 [t, Hq], if the attention kernel has told it.
        """
        plan = self.pool.plans.get(row)
        if plan is not None:
            slots = self.req_to_token[row, :seq_len]
            read = functools.partial(self.pool.read, layer.layer_id, slots)
            local = layer.layer_id - self.pool.start_layer
            plan.observe(local, query, seq_len, read, layer.scaling, lse)

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

    def support_triton(self) -> bool:
        """Whether SGLang may use its own Triton kernels beside this."""
        return self.req_to_token.is_cuda
