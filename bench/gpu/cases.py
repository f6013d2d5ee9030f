"""What the kernels are checked and measured on: sizes, a ragged batch, a prompt to compress."""

from __future__ import annotations

import dataclasses

import torch

from bench.gpu.batches import Ragged, build, shares
from bench.gpu.records import Skipped

#: What an operation computed and what it should have, by name; exact if the dtype is integer.
Pairs = dict[str, tuple[torch.Tensor, torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class Size:
    """Shapes that the checks run at; `tokens` is the longest request's."""

    layers: int
    heads: int
    group: int
    dim: int
    page: int
    requests: int
    tokens: int
    window: int

    def bytes_of(self, tokens: int, cache: torch.dtype) -> int:
        """That keys and values of so many tokens take in all layers and heads."""
        return 2 * tokens * self.layers * self.heads * self.dim * cache.itemsize

    def query(self, tokens: int, dtype: torch.dtype, device: str) -> torch.Tensor:
        """[tokens, H*G, D], random."""
        return torch.randn(tokens, self.heads * self.group, self.dim, device=device).to(dtype)


LLAMA = Size(layers=4, heads=8, group=4, dim=128, page=16, requests=16, tokens=4096, window=32)
SMOKE = Size(layers=2, heads=2, group=2, dim=16, page=8, requests=4, tokens=48, window=4)


@dataclasses.dataclass(frozen=True)
class Case:
    size: Size
    dtype: torch.dtype
    device: str

    def batch(self) -> Ragged:
        """Every fourth request is not compressed, others share a prompt's blocks.

        Tails begin and end around a page.
        """
        size = self.size
        tails = [1, size.page - 1, size.page, size.page + 1, size.tokens // 8]
        most = size.tokens // (2 * size.page)
        segments = [most * (i + 1) // size.requests if i % 4 else 0 for i in range(size.requests)]
        shared = [i % 4 if i % 4 > 1 else 0 for i in range(size.requests)]
        tail = [tails[i % 5] for i in range(size.requests)]
        tail[0] = size.tokens
        return build(
            segments, tail, shared, layers=size.layers, heads=size.heads, page=size.page,
            dim=size.dim, dtype=self.dtype, device=self.device,
        )  # fmt: skip

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def query(self, tokens: int) -> torch.Tensor:
        return self.size.query(tokens, self.dtype, self.device)

    @property
    def scale(self) -> float:
        return self.size.dim**-0.5


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt in two arenas, what its heads keep, and the blocks that are to hold it."""

    arena_k: torch.Tensor
    arena_v: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    pages: torch.Tensor
    target: torch.Tensor


def prompt(case: Case, rate: int = 8) -> Prompt:
    """`size.tokens` tokens of which every head keeps some pages of random positions."""
    size, device = case.size, case.device
    per_block, blocks = size.layers * size.heads, size.tokens // size.page
    kept = max(1, blocks // rate)
    shape = (1 + blocks + kept, size.layers, size.heads, size.page, size.dim)
    order = torch.randperm(shape[0] - 1, device=device) + 1
    slots = (order[:blocks, None] * size.page + torch.arange(size.page, device=device)).flatten()
    pages = shares(kept * per_block, per_block, 1.0).to(device)
    number = kept * per_block * size.page
    positions = torch.randint(0, size.tokens, (number,), device=device)
    return Prompt(
        *(torch.empty(shape, dtype=case.dtype, device=device).normal_() for _ in range(2)),
        slots, positions, pages, order[blocks:].contiguous(),
    )  # fmt: skip


def compact_arguments(given: Prompt) -> dict:
    """Of `compact`."""
    return {
        "arena_k": given.arena_k,
        "arena_v": given.arena_v,
        "source_slots": given.slots,
        "positions": given.positions,
        "pages": given.pages,
        "target_blocks": given.target,
    }


def needs_gpu(case: Case) -> None:
    """Raise Skipped on a CPU."""
    if case.device == "cpu":
        raise Skipped("needs a GPU")
