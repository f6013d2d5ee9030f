"""Attention of new tokens through FlashInfer, for requests whose cache is not compressed.

The new tokens attend causally to themselves, straight from the projection (ragged), and to all of
the prefix in the cache (paged); the two are merged by their log-sum-exp. A prefix that is
compressed differs in length from head to head: that is `kvc_kernels.gpu.extend`, not this.
Facts about FlashInfer are of 0.6.15.
"""

from __future__ import annotations

import functools
import itertools
import math

import torch

from kvc_kernels.gpu.extend import extend
from kvc_kernels.gpu.layout import Cache

#: How far two kernels of 16 bits may differ.
_AGREE = 2e-2


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

        self.shape, self.page_size = (query_heads, heads, head_dim), page_size
        self.dtype, self.kv_dtype, self.scale = dtype, kv_dtype, scale
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
        query_heads, heads, head_dim = self.shape
        common = {"q_data_type": self.dtype, "sm_scale": self.scale}
        self._new.plan(
            indptr, indptr, query_heads, heads, head_dim, causal=True,
            kv_data_type=self.dtype, **common,
        )  # fmt: skip
        self._any_prefix = any(prefix_lens)
        if self._any_prefix:
            pages = prefix_pages(req_to_token, request, prefix_lens, self.page_size)
            self._prefix.plan(
                indptr, *pages, query_heads, heads, head_dim, self.page_size, causal=False,
                kv_data_type=self.kv_dtype, **common,
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


def try_out(plan: PrefillPlan, device: torch.device) -> None:
    """Prefill a few random tokens by `plan` and by `kvc_kernels.gpu.extend`.

    FlashInfer compiles its kernels here if they are not there yet; that may take minutes.

    Raises
    ------
    AssertionError : if the two disagree.
    Exception : whatever FlashInfer raises where it cannot be compiled or launched.
    """
    query_heads, heads, dim = plan.shape
    page, prefix, new = plan.page_size, [plan.page_size + 3, 0], [5, 7]
    drawn = functools.partial(
        torch.randn, generator=torch.Generator(device).manual_seed(0), device=device
    )
    # Two layers, so that the strides of a layer show; a block for padding, and three a request.
    arenas = [drawn(7, 2, heads, page, dim).to(plan.kv_dtype) for _ in "kv"]
    slots = torch.arange(page, 7 * page, dtype=torch.int32, device=device).view(2, -1)
    nothing = torch.zeros(2, dtype=torch.int64, device=device)
    starts = torch.zeros(2, 2 * heads + 1, dtype=torch.int64, device=device)
    query = drawn(sum(new), query_heads, dim).to(plan.dtype)
    fresh = [drawn(sum(new), heads, dim).to(plan.kv_dtype) for _ in "kv"]
    at = torch.cat([
        row[before : before + count]
        for row, before, count in zip(slots, prefix, new, strict=True)
    ]).long()  # fmt: skip
    for arena, tokens in zip(arenas, fresh, strict=True):
        arena[at // page, 1, :, at % page] = tokens
    request = torch.arange(2, device=device)
    plan.plan(slots, request, prefix, new)
    got = plan.run(1, query, *(x.to(plan.dtype) for x in fresh), *arenas, with_lse=True)
    expected = extend(
        query,
        Cache(*arenas, slots, nothing, nothing, starts),
        1,
        request,
        torch.tensor(prefix, device=device) + torch.tensor(new, device=device),
        torch.tensor([0, *itertools.accumulate(new)], device=device),
        max(new),
        plan.scale,
    )
    torch.testing.assert_close(got, expected, atol=_AGREE, rtol=_AGREE)


def natural(lse: torch.Tensor) -> torch.Tensor:
    """A natural log-sum-exp from FlashInfer's, which is of base 2."""
    return lse * math.log(2)
