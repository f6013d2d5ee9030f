"""Attention of new tokens through FlashInfer.

The new tokens attend causally to themselves, straight from the projection (ragged), and to all of
the prefix in the cache (paged); the two are merged by their log-sum-exp. A prefix that is
compressed differs in length from head to head: `flashinfer_segments` reads it for many new tokens,
`kvc_kernels.gpu.extend` for few. Facts about FlashInfer are of 0.6.15.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection

import torch

from kvc_kernels.batch import Batch
from kvc_kernels.cache import KVCache, Spans
from kvc_kernels.gpu.extend import add_prefix, extend
from kvc_kernels.gpu.flashinfer_segments import PagedSegments
from kvc_kernels.gpu.tables import prefix_blocks

#: How far two kernels of 16 bits may differ.
_AGREE = 2e-2
#: New tokens of compressed requests from which on FlashInfer's kernels are worth the eight launches
#: that they take; with fewer Triton's kernel reads the prefix. Not measured.
_MANY = 256
_NEVER = 1 << 62


def prefix_pages(
    batch: Batch, before: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FlashInfer's page table of uncompressed prefixes; the device is not waited for.

    Parameters
    ----------
    before : tokens of every prefix.

    Returns
    -------
    indptr : int32 [B + 1] on the host; request b has pages ``indptr[b]`` to ``indptr[b + 1]``.
    indices : int32 [N] on the device, their blocks, in order.
    last_page_len : int32 [B] on the host, tokens in the last page; 0 without a prefix.
    """
    page_size = batch.cache.page_size
    in_last = [(length - 1) % page_size + 1 if length else 0 for length in before]
    # In an uncompressed request every head has its page in the same block.
    indptr, blocks = prefix_blocks(batch, [-(-length // page_size) for length in before])
    return indptr, blocks, torch.tensor(in_last, dtype=torch.int32)


class PagedPrefill:
    """Prefill: `plan` once a forward, `run` once a layer.

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

    Attributes
    ----------
    segments : who reads compressed prefixes for many new tokens; None leaves them to Triton.
    reads_segments : whether it does in the forward that was planned last.
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
        self.segments: PagedSegments | None = PagedSegments(
            workspace, query_heads=query_heads, heads=heads, head_dim=head_dim,
            page_size=page_size, dtype=dtype, kv_dtype=kv_dtype, scale=scale, backend=backend,
        )  # fmt: skip
        # Whom Triton reads compressed prefixes for, in the forward that was planned.
        self._by_triton: torch.Tensor | None = None
        self.reads_segments = False

    def plan(
        self,
        batch: Batch,
        before: list[int],
        compressed: Collection[int] = (),
        *,
        many: int | None = None,
    ) -> bool:
        """Plan the next `run` of every layer from lengths the host knows; waits for nothing.

        Parameters
        ----------
        batch : with `new`. Kept, and its cache read by `run`.
        before : tokens that each request had before this forward, kept or not.
        compressed : which requests of the batch are compressed, or may be.
        many : new tokens of these together from which on `segments` reads their prefixes; 256 if
            None.

        Returns
        -------
        worthwhile : False if Triton would do as well, and nothing is planned: all requests are
            compressed, and have few new tokens.
        """
        assert batch.new is not None
        self._batch = batch
        many = _MANY if many is None else many
        compressed = [nth for nth in compressed if before[nth]]
        self.reads_segments, self._by_triton = False, None
        if self.segments and compressed and sum(batch.new[nth] for nth in compressed) >= many:
            theirs = [length if nth in compressed else 0 for nth, length in enumerate(before)]
            self.reads_segments = self.segments.plan(batch, theirs)
        if not self.reads_segments and len(compressed) == len(before):
            return False
        if not self.reads_segments and compressed:
            chosen = torch.tensor(compressed)
            self._by_triton = chosen.to(batch.request.device, non_blocking=True)
        indptr = torch.tensor([0, *itertools.accumulate(batch.new)], dtype=torch.int32)
        query_heads, heads, head_dim = self.shape
        common = {"q_data_type": self.dtype, "sm_scale": self.scale}
        self._new.plan(
            indptr, indptr, query_heads, heads, head_dim, causal=True,
            kv_data_type=self.dtype, **common,
        )  # fmt: skip
        plain = [0 if nth in compressed else length for nth, length in enumerate(before)]
        self._any_prefix = any(plain)
        if self._any_prefix:
            self._prefix.plan(
                indptr, *prefix_pages(batch, plain), query_heads, heads, head_dim, self.page_size,
                causal=False, kv_data_type=self.kv_dtype, **common,
            )  # fmt: skip
        return True

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

        alone = not (self._any_prefix or self.reads_segments) and self._by_triton is None
        if alone and not with_lse:
            return self._new.run(query, keys, values), None
        out, lse = self._new.run(query, keys, values, return_lse=True)
        cache = self._batch.cache
        if self._any_prefix:
            # Views with the arena's strides: [num_blocks, H, P, D] of this layer.
            of_layer = cache.arena_k[:, layer], cache.arena_v[:, layer]
            before, before_lse = self._prefix.run(query, of_layer, return_lse=True)
            out, lse = flashinfer.merge_state(out, lse, before, before_lse)
        if self.reads_segments:
            assert self.segments is not None
            before, before_lse = self.segments.run(layer, query)
            out, lse = flashinfer.merge_state(out, lse, before, before_lse)
        if with_lse or self._by_triton is not None:
            lse = natural(lse)
        if self._by_triton is not None:
            add_prefix(query, self._batch, layer, self.scale, self._by_triton, out, lse)
        return out, lse if with_lse else None


def try_out(prefill: PagedPrefill, device: torch.device, *, segments: bool = False) -> None:
    """Prefill a few random tokens by `prefill` and by `kvc_kernels.gpu.extend`.

    One of three requests is compressed. FlashInfer compiles its kernels here if they are not there
    yet; that may take minutes.

    Parameters
    ----------
    segments : whether `prefill.segments` reads what is compressed, or Triton.

    Raises
    ------
    AssertionError : if the two disagree.
    Exception : whatever FlashInfer raises where it cannot be compiled or launched.
    """
    query_heads, heads, dim = prefill.shape
    page = prefill.page_size
    before, new = [page + 3, 0, 3 * page + 5], [5, 7, 200]
    drawn = functools.partial(
        torch.randn, generator=torch.Generator(device).manual_seed(0), device=device
    )
    longest = -(-(before[2] + new[2]) // page)
    # Two layers, so that the strides of a layer show; a block for padding.
    arenas = [drawn(1 + 3 * longest, 2, heads, page, dim).to(prefill.kv_dtype) for _ in "kv"]
    slots = torch.arange(page, (1 + 3 * longest) * page, dtype=torch.int32, device=device)
    slots = slots.view(3, -1)
    spans = Spans.uncompressed(3, 2 * heads, device)
    # Two blocks of a segment, which the heads have unequal parts of, behind a released one.
    pages = torch.tensor([3, 1] * heads)
    for tensor, given in (
        (spans.begin[2], torch.tensor([0, page, 3 * page])),
        (spans.first[2, 1], pages.cumsum(0) - pages),
        (spans.count[2, 1], pages),
        (spans.stride[2], torch.tensor([0, 1])),
    ):
        tensor.copy_(given)
    rows = list(zip(before, new, strict=True))
    batch = Batch(
        KVCache(arenas[0], arenas[1], slots, spans),
        torch.arange(3, device=device),
        torch.tensor([sum(each) for each in rows], device=device),
        new,
    )
    query = drawn(sum(new), query_heads, dim).to(prefill.dtype)
    fresh = [drawn(sum(new), heads, dim).to(prefill.kv_dtype) for _ in "kv"]
    at = torch.cat(
        [slots[row, first : first + count] for row, (first, count) in enumerate(rows)]
    ).long()
    for arena, tokens in zip(arenas, fresh, strict=True):
        arena[at // page, 1, :, at % page] = tokens
    prefill.plan(batch, before, [2], many=1 if segments else _NEVER)
    assert not segments or prefill.reads_segments, "FlashInfer plans in a way that is not known"
    keys, values = (x.to(prefill.dtype) for x in fresh)
    got = prefill.run(1, query, keys, values, with_lse=True)
    expected = extend(query, batch, 1, prefill.scale)
    torch.testing.assert_close(got, expected, atol=_AGREE, rtol=_AGREE)


def warm_up(prefill: PagedPrefill, cache: KVCache) -> None:
    """Have Triton compile what `prefill` launches for this cache.

    Three requests are prefilled in row 0, which pads batches; nothing is written.
    """
    query_heads, heads, dim = prefill.shape
    zeros = functools.partial(torch.zeros, device=cache.arena_k.device)
    row = zeros(3, dtype=torch.int64)
    query = zeros(3, query_heads, dim, dtype=prefill.dtype)
    fresh = zeros(3, heads, dim, dtype=prefill.dtype)
    batch, before = Batch(cache, row, row + cache.page_size + 1, [1] * 3), [cache.page_size] * 3
    for many in (1, _NEVER):
        prefill.plan(batch, before, [1, 2], many=many)
        prefill.run(0, query, fresh, fresh)


def natural(lse: torch.Tensor) -> torch.Tensor:
    """A natural log-sum-exp from FlashInfer's, which is of base 2."""
    return lse * math.log(2)
