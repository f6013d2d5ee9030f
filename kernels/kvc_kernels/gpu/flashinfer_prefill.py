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

from kvc_kernels.batch import Batch
from kvc_kernels.cache import KVCache, Spans
from kvc_kernels.gpu.extend import extend
from kvc_kernels.pages import page_ids

#: How far two kernels of 16 bits may differ.
_AGREE = 2e-2


def prefix_pages(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FlashInfer's page table of uncompressed prefixes; the device is not waited for.

    Returns
    -------
    indptr : int32 [B + 1] on the host; request b has pages ``indptr[b]`` to ``indptr[b + 1]``.
    indices : int32 [N] on the device, their blocks, in order.
    last_page_len : int32 [B] on the host, tokens in the last page; 0 without a prefix.
    """
    assert batch.rows is not None
    cache, lengths = batch.cache, [before for _, before, _ in batch.rows]
    counts = [-(-length // cache.page_size) for length in lengths]
    in_last = [(length - 1) % cache.page_size + 1 if length else 0 for length in lengths]
    indptr = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    total, device = sum(counts), cache.req_to_token.device
    # Made on the host and sent without waiting: `torch.tensor(..., device=...)` would wait.
    begin = indptr.to(device, non_blocking=True)
    each = torch.arange(len(counts), device=device)
    owner = torch.repeat_interleave(each, begin.diff(), output_size=total)
    nth = torch.arange(total, device=device) - begin[owner]
    # In an uncompressed request every head has its page in the same block.
    blocks = page_ids(cache, batch.request.long()[owner], 0, nth) // (cache.layers * cache.heads)
    return indptr, blocks.int(), torch.tensor(in_last, dtype=torch.int32)


class PagedPrefill:
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

    def plan(self, batch: Batch) -> None:
        """Plan the next `run` of every layer from lengths the host knows; waits for nothing.

        Parameters
        ----------
        batch : with `rows`, all of them uncompressed; this cannot be seen from here, so the
            caller sees to it. Kept, and its cache read by `run`.
        """
        assert batch.rows is not None
        self._cache = batch.cache
        new_lens = [new for _, _, new in batch.rows]
        indptr = torch.tensor([0, *itertools.accumulate(new_lens)], dtype=torch.int32)
        query_heads, heads, head_dim = self.shape
        common = {"q_data_type": self.dtype, "sm_scale": self.scale}
        self._new.plan(
            indptr, indptr, query_heads, heads, head_dim, causal=True,
            kv_data_type=self.dtype, **common,
        )  # fmt: skip
        self._any_prefix = any(before for _, before, _ in batch.rows)
        if self._any_prefix:
            self._prefix.plan(
                indptr, *prefix_pages(batch), query_heads, heads, head_dim, self.page_size,
                causal=False, kv_data_type=self.kv_dtype, **common,
            )  # fmt: skip

    def run(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        with_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of one layer's new tokens.

        Parameters
        ----------
        query, keys, values : [n, H*G, D] and [n, H, D], the new tokens of all requests, one after
            the other; the last dimension is contiguous. Whether they are in the cache already
            does not matter: they are not read there.

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
            of_layer = self._cache.arena_k[:, layer], self._cache.arena_v[:, layer]
            before, before_lse = self._prefix.run(query, of_layer, return_lse=True)
            out, lse = flashinfer.merge_state(out, lse, before, before_lse)
        return out, natural(lse) if with_lse else None


def try_out(prefill: PagedPrefill, device: torch.device) -> None:
    """Prefill a few random tokens by `prefill` and by `kvc_kernels.gpu.extend`.

    FlashInfer compiles its kernels here if they are not there yet; that may take minutes.

    Raises
    ------
    AssertionError : if the two disagree.
    Exception : whatever FlashInfer raises where it cannot be compiled or launched.
    """
    query_heads, heads, dim = prefill.shape
    page, before, new = prefill.page_size, [prefill.page_size + 3, 0], [5, 7]
    drawn = functools.partial(
        torch.randn, generator=torch.Generator(device).manual_seed(0), device=device
    )
    # Two layers, so that the strides of a layer show; a block for padding, and three a request.
    arenas = [drawn(7, 2, heads, page, dim).to(prefill.kv_dtype) for _ in "kv"]
    slots = torch.arange(page, 7 * page, dtype=torch.int32, device=device).view(2, -1)
    rows = list(zip(range(2), before, new, strict=True))
    batch = Batch(
        KVCache(arenas[0], arenas[1], slots, Spans.uncompressed(2, 2 * heads, device)),
        torch.arange(2, device=device),
        torch.tensor([sum(each) for each in zip(before, new, strict=True)], device=device),
        torch.tensor([0, *itertools.accumulate(new)], device=device),
        max(new),
        rows,
    )
    query = drawn(sum(new), query_heads, dim).to(prefill.dtype)
    fresh = [drawn(sum(new), heads, dim).to(prefill.kv_dtype) for _ in "kv"]
    at = torch.cat([slots[row, first : first + count] for row, first, count in rows]).long()
    for arena, tokens in zip(arenas, fresh, strict=True):
        arena[at // page, 1, :, at % page] = tokens
    prefill.plan(batch)
    keys, values = (x.to(prefill.dtype) for x in fresh)
    got = prefill.run(1, query, keys, values, with_lse=True)
    expected = extend(query, batch, 1, prefill.scale)
    torch.testing.assert_close(got, expected, atol=_AGREE, rtol=_AGREE)


def natural(lse: torch.Tensor) -> torch.Tensor:
    """A natural log-sum-exp from FlashInfer's, which is of base 2."""
    return lse * math.log(2)
