"""Attention of new tokens to what compressed requests held before them, through FlashInfer.

Heads differ in length, so a row is one (request, KV head) with the queries of its group, as in
`kvc_kernels.gpu.flashinfer_decode`. FlashInfer plans on the host, where lengths are not known: it
plans for the most that a head can hold, and what it reads of lengths on the device is then written
layer by layer. Facts about FlashInfer are of 0.6.15.
"""

from __future__ import annotations

import dataclasses
import itertools

import torch

from kvc_kernels.batch import Batch
from kvc_kernels.gpu.flashinfer_decode import last_page_len
from kvc_kernels.gpu.tables import block_table

#: Queries of a work of FA3 by head dim (``cta_tile_q`` in ``PrefillSM90Plan``).
_TILES = {64: 192, 128: 128, 256: 128}


class PagedSegments:
    """What compressed requests held before a prefill: `plan` once a forward, `run` once a layer.

    FA2 finds the length of a row on the device and cuts its tiles at it, as in
    `kvc_kernels.gpu.flashinfer_decode`. FA3 finds it in its plan, a list of works on the device,
    each with the row it is of and the row's length (``PrefillSM90Plan`` in scheduler.cuh): there
    it is replaced.

    Parameters
    ----------
    workspace, query_heads, heads, head_dim, page_size, dtype, kv_dtype, scale, backend : as
        `kvc_kernels.gpu.flashinfer_prefill.PagedPrefill` has them.
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

        self.heads, self.group, self.head_dim = heads, query_heads // heads, head_dim
        self.page_size, self.dtype, self.kv_dtype, self.scale = page_size, dtype, kv_dtype, scale
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace, "HND", backend=backend
        )

    def plan(self, batch: Batch, before: list[int]) -> bool:
        """Plan the next `run` of every layer; waits for nothing.

        Parameters
        ----------
        batch : with `new`. Kept, and its tensors read by `run`.
        before : tokens that each request had before this forward, kept or not; 0 for requests
            whose prefix others read.

        Returns
        -------
        known : False if FlashInfer's plan is not as 0.6.15 makes it; it cannot be run then.
        """
        assert batch.new is not None
        device, tokens, rows = batch.request.device, sum(batch.new), len(before) * self.heads
        begins = [0, *itertools.accumulate(batch.new)]
        queries = [head * tokens + begin for head in range(self.heads) for begin in begins[:-1]]
        # Pages of spans are full and hold tokens of the prefix, so no head has more.
        pages = [-(-length // self.page_size) for length in before]
        self._width = width = max(pages)
        self._table = torch.zeros(rows, width, dtype=torch.int32, device=device)
        self._length = torch.empty(rows, dtype=torch.int32, device=device)
        known = torch.tensor(before).to(device, non_blocking=True)
        self._before = dataclasses.replace(batch, seq_len=known)
        bounds = torch.tensor(pages * self.heads, dtype=torch.int32)
        self._wrapper.plan(
            torch.tensor([*queries, self.heads * tokens], dtype=torch.int32),
            torch.arange(0, (rows + 1) * width, width, dtype=torch.int32),
            self._table.view(-1),  # kept, and filled layer by layer
            torch.full((rows,), self.page_size, dtype=torch.int32),
            self.group,
            1,
            self.head_dim,
            self.page_size,
            causal=False,
            sm_scale=self.scale,
            q_data_type=self.dtype,
            kv_data_type=self.kv_dtype,
            seq_lens=bounds * self.page_size,
            # Else FA2 wants more than the workspace for groups of 8.
            disable_split_kv=True,
        )
        self._works = None
        if self._wrapper._backend == "fa3":  # what "auto" is, a plan decides
            self._works = self._find_works(batch.new)
            return self._works is not None
        return True

    def _find_works(self, new: list[int]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Of the works that FA3 has planned the length of the row and the row: views of its plan.

        None if the plan is not as long as 0.6.15 makes it.
        """
        # PrefillPlanSM90Info::ToVector
        tiles, queries, _, _, lengths, _, _, owners, same_for_all_heads = self._wrapper._plan_info
        works = self.heads * sum(-(-count // _TILES[self.head_dim]) for count in new)
        works *= 1 if same_for_all_heads else self.group
        if queries - tiles != -(-4 * works // 16) * 16:
            return None
        numbers = self._wrapper._int_workspace_buffer.view(torch.int32)
        lengths, owners = lengths // 4, owners // 4
        return numbers[lengths : lengths + works], numbers[owners : owners + works]

    def run(self, layer: int, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of one layer's new tokens to what its heads held before them.

        Parameters
        ----------
        query : [t, H*G, D].

        Returns
        -------
        out : [t, H*G, D].
        lse : float32 [t, H*G], of base 2; -5e4 or less where there was nothing.
        """
        tokens = len(query)
        cache, owned = self._before.cache, (self._table, self._length)
        block_table(self._before, layer, self._width, owned, by_head=True)
        if self._works is not None:
            lengths, owners = self._works
            torch.index_select(self._length, 0, owners, out=lengths)
        else:
            found = self._wrapper._paged_kv_last_page_len_buf
            last_page_len(self._length, self._width, self.page_size, found)
        by_head = query.unflatten(1, (self.heads, self.group)).transpose(0, 1)
        flat = tuple(
            arena.view(-1, 1, *arena.shape[-2:]) for arena in (cache.arena_k, cache.arena_v)
        )
        # PDL: the kernel would read lengths before the one in front of it has written them.
        out, lse = self._wrapper.run(
            by_head.reshape(-1, self.group, self.head_dim), flat, return_lse=True, enable_pdl=False
        )
        return tuple(
            x.view(self.heads, tokens, self.group, *x.shape[2:]).transpose(0, 1).flatten(1, 2)
            for x in (out, lse)
        )
