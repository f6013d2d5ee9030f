"""A segment: what compression kept of a run of tokens, as a value."""

from __future__ import annotations

import dataclasses
import functools

import torch

from sgl_kvc.pool.host_copy import HostCopy
from sgl_kvc.spec import CompressionSpec


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """Blocks filled with packed head pages. Never changed: compressing again makes another one.

    Attributes
    ----------
    begin, end : the tokens it stands for, positions of a prompt or a request; block boundaries.
    slots : int64 [n * P], the slots of its blocks, in order.
    pages : int64 [L * H], whole pages of every head; they fill the blocks in canonical order of
        the heads, so they sum to ``n * L * H``.
    page_size : KVs of a page.
    spec : the knob that shaped it.
    bitmap : which positions every head kept (`Selection.bitmap`); None unless a knob asked for it.
    """

    begin: int
    end: int
    slots: torch.Tensor
    pages: torch.Tensor
    page_size: int
    spec: CompressionSpec
    bitmap: HostCopy | None = None

    @property
    def blocks(self) -> int:
        """Blocks it takes."""
        return len(self.slots) // self.page_size

    @property
    def row_begin(self) -> int:
        """Where its blocks begin in a request's row: they lie right before `end`."""
        return self.end - len(self.slots)

    @functools.cached_property
    def page_counts(self) -> HostCopy:
        """`pages`."""
        return HostCopy(self.pages)

    @functools.cached_property
    def page_bounds(self) -> HostCopy:
        """The fewest and the most pages of a head."""
        return HostCopy(torch.stack(self.pages.aminmax()))
