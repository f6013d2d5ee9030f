"""Attention of new tokens through FlashInfer, for requests whose cache is not compressed.

The new tokens attend causally to themselves, straight from the projection (ragged), and to all of
the prefix in the cache (paged); the two are merged by their log-sum-exp. A prefix that is
compressed differs in length from head to head: that is `kvc_kernels.gpu.extend`, not this.
Facts about FlashInfer are of 0.6.15.
"""

from __future__ import annotations

import itertools
import math

import torch


def prefix_pages(
    req_to_token: torch.Tensor, request: torch.Tensor, prefix_lens: list[int], page_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FlashInfer's page table of uncompressed prefixes; the device is not waited for.

    Parameters
    ----------
    req_to_token : int32 [rows, max_context], the slot of every position of every request.
    request : integer [B], rows of it.
    prefix_lens : tokens each request has in the cache.

    Returns
    -------
    indptr : int32 [B + 1] on the host; request b has pages ``indptr[b]`` to ``indptr[b + 1]``.
    indices : int32 [N] on the device, their blocks, in order.
    last_page_len : int32 [B] on the host, tokens in the last page; 0 without a prefix.
    """
    counts = [-(-length // page_size) for length in prefix_lens]
    in_last = [(length - 1) % page_size + 1 if length else 0 for length in prefix_lens]
    indptr = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    total, device = sum(counts), req_to_token.device
    # Made on the host and sent without waiting: `torch.tensor(..., device=...)` would wait.
    begin = indptr.to(device, non_blocking=True)
    each = torch.arange(len(counts), device=device)
    owner = torch.repeat_interleave(each, begin.diff(), output_size=total)
    position = (torch.arange(total, device=device) - begin[owner]) * page_size
    indices = req_to_token[request[owner], position] // page_size
    return indptr, indices.int(), torch.tensor(in_last, dtype=torch.int32)


class PrefillPlan:
    """Prefill of uncompressed requests: `plan` once a forward, `run` once a layer.

    Not for CUDA graphs: what is launched depends on lengths.

    Parameters
    ----------
    workspace : uint8 on the device, 128 MiB or more, used while `run` runs and by nobody else
        then. FlashInfer raises if it is too small.
    query_heads, heads, head_dim, page_size : ``H * G``, ``H``, ``D``, ``P``.
    dtype : type of queries, new keys and values, and results; float16 or bfloat16.
    kv_dtype : type of the cache.
    scale : factor on the logits.
    backend : "auto" lets FlashInfer choose FA3 on Hopper, else FA2. What models "fa2" serves says
        `flashinfer_decode.supported`.
    """

    def __init__(
        self,
        workspace: torch.Tensor,
        *,
        query_heads: int,
        heads: int,
        head_dim: int,
        page_size: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        scale: float,
        backend: str = "auto",
    ) -> None:
        import flashinfer

        self._shape, self._page_size = (query_heads, heads, head_dim), page_size
        self._dtype, self._kv_dtype, self._scale = dtype, kv_dtype, scale
        self._new = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
            workspace, "NHD", backend=backend
        )
        self._prefix = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace, "HND", backend=backend
        )

    def plan(
        self,
        req_to_token: torch.Tensor,
        request: torch.Tensor,
        prefix_lens: list[int],
        new_lens: list[int],
    ) -> None:
        """Plan the next `run` of every layer from lengths the host knows; waits for nothing.

        Parameters
        ----------
        req_to_token, request : as `prefix_pages` takes them. Requests must be uncompressed (an
            empty segment); this cannot be seen from here, so the caller sees to it.
        prefix_lens, new_lens : per request, tokens in the cache and tokens of this forward.
        """
        indptr = torch.tensor([0, *itertools.accumulate(new_lens)], dtype=torch.int32)
        query_heads, heads, head_dim = self._shape
        common = {"q_data_type": self._dtype, "sm_scale": self._scale}
        self._new.plan(
            indptr, indptr, query_heads, heads, head_dim, causal=True,
            kv_data_type=self._dtype, **common,
        )  # fmt: skip
        self._any_prefix = any(prefix_lens)
        if self._any_prefix:
            pages = prefix_pages(req_to_token, request, prefix_lens, self._page_size)
            self._prefix.plan(
                indptr, *pages, query_heads, heads, head_dim, self._page_size, causal=False,
                kv_data_type=self._kv_dtype, **common,
            )  # fmt: skip

    def run(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        arena_k: torch.Tensor,
        arena_v: torch.Tensor,
        with_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of one layer's new tokens.

        Parameters
        ----------
        query, keys, values : [n, H*G, D] and [n, H, D], the new tokens of all requests, one after
            the other; the last dimension is contiguous. Whether they are in the cache already
            does not matter: they are not read there.
        arena_k, arena_v : [num_blocks, L, H, P, D].

        Returns
        -------
        out : [n, H*G, D].
        lse : float32 [n, H*G], natural, for scorers; None unless `with_lse`.
        """
        import flashinfer

        if not (self._any_prefix or with_lse):
            return self._new.run(query, keys, values), None
        out, lse = self._new.run(query, keys, values, return_lse=True)
        if self._any_prefix:
            # Views with the arena's strides: [num_blocks, H, P, D] of this layer.
            of_layer = arena_k[:, layer], arena_v[:, layer]
            before, before_lse = self._prefix.run(query, of_layer, return_lse=True)
            out, lse = flashinfer.merge_state(out, lse, before, before_lse)
        return out, natural(lse) if with_lse else None


def natural(lse: torch.Tensor) -> torch.Tensor:
    """A natural log-sum-exp from FlashInfer's, which is of base 2."""
    return lse * math.log(2)
