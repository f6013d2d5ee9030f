"""SGLang's paged allocator with its two Triton kernels written in torch, for the CPU."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator


class TorchPagedAllocator(PagedTokenToKVPoolAllocator):
    """`PagedTokenToKVPoolAllocator`, with `alloc_extend` and `alloc_decode` in torch."""

    free_pages: torch.Tensor  # SGLang's: page ids in the order they are taken

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        """Slots for tokens [prefix, seq) of every request: int64 [extend_num_tokens].

        The last prefix page is filled up first (it ends at `last_loc`, [B]); None when
        the free pages do not suffice, and then nothing was taken.
        """
        slots, pages = extend_slots(
            prefix_lens, seq_lens, last_loc, self.free_pages, self.page_size
        )
        if slots is None:
            return None
        self.free_pages = self.free_pages[pages:]
        return slots

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """One slot per request, for position ``seq_lens - 1``: int64 [B], or None."""
        return self.alloc_extend(
            seq_lens - 1, seq_lens_cpu - 1, seq_lens, seq_lens_cpu, last_loc, len(seq_lens)
        )


def extend_slots(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    page_size: int,
) -> tuple[torch.Tensor | None, int]:
    """Slots of positions [prefix, seq) of every request, and how many pages they take.

    Parameters
    ----------
    prefix_lens, seq_lens, last_loc : [B] integers; `last_loc` is the slot of position
        ``prefix - 1``, ignored where the prefix ends on a page boundary.
    free_pages : page ids in the order they are to be taken.

    Returns
    -------
    slots : int64 [sum(seq - prefix)], or None when `free_pages` is too short.
    pages : whole pages needed.
    """
    lens = seq_lens - prefix_lens
    opened = (prefix_lens + page_size - 1) // page_size  # pages the prefix already has
    new_pages = (seq_lens + page_size - 1) // page_size - opened
    total = int(new_pages.sum())
    if total > len(free_pages):
        return None, total
    request = torch.repeat_interleave(torch.arange(len(lens)), lens)
    starts = torch.cumsum(lens, 0) - lens
    position = torch.arange(len(request)) - starts[request] + prefix_lens[request]
    nth_new = position // page_size - opened[request]
    first_page = torch.cumsum(new_pages, 0) - new_pages
    page = (first_page[request] + nth_new).clamp(min=0)
    fresh = free_pages[page.clamp(max=max(len(free_pages) - 1, 0))] if len(free_pages) else page
    in_last = last_loc[request] + 1 + position - prefix_lens[request]
    slots = torch.where(nth_new < 0, in_last, fresh * page_size + position % page_size)
    return slots.to(torch.int64), total
