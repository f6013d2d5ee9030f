"""Which spans the KVs of each request row lie in, as tensors that attention reads by row.

They are derived: `SpanTable.install` writes what a `Segment` says, and nobody reads them back.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import fields

import torch
from kvc_kernels.cache import Spans

from sgl_kvc.pool.segment import Segment

_SHARED, _OWN, _TAIL = range(3)


class SpanTable:
    """The spans of every request row (`kvc_kernels.cache.Spans` has the addressing rule).

    Parameters
    ----------
    rows : rows of ``req_to_token``; row 0 pads CUDA graphs and is never compressed.
    heads : layers times KV heads.

    Attributes
    ----------
    spans : the tensors; all zero for an uncompressed row.
    tracked : int32 [rows], the power of attention that decode adds to the metric of the row's KVs;
        0 for none.
    """

    def __init__(self, rows: int, heads: int, device: str | torch.device):
        self.spans = Spans.uncompressed(rows, heads, device)
        self.tracked = torch.zeros(rows, dtype=torch.int32, device=device)
        self._tensors = tuple(getattr(self.spans, each.name) for each in fields(Spans))
        self._canonical = torch.arange(heads, dtype=torch.int32, device=device)
        # On the host, so that nothing has to ask the device.
        self._segments: dict[int, Segment] = {}
        self._tracked: dict[int, int] = {}
        self._whatever = False

    def install(self, row: int, segment: Segment) -> None:
        """Have `row` read `segment`, behind the canonical blocks before ``segment.begin``."""
        spans, heads = self.spans, len(self._canonical)
        spans.begin[row, _OWN] = segment.row_begin
        spans.begin[row, _TAIL] = segment.end
        spans.first[row, _SHARED] = self._canonical
        spans.count[row, _SHARED] = segment.begin // segment.page_size
        spans.stride[row, _SHARED] = heads
        ends = segment.pages.cumsum(0)
        spans.first[row, _OWN] = (ends - segment.pages).to(torch.int32)
        spans.count[row, _OWN] = segment.pages.to(torch.int32)
        spans.stride[row, _OWN] = 1
        self._segments[row] = segment

    def is_compressed(self, row: int) -> bool:
        """Whether a segment is installed in `row`."""
        return row in self._segments

    def track(self, row: int, power: int) -> None:
        """Have decode add attention, to a `power` of 1 or 2, to the metric of `row`'s KVs."""
        self.tracked[row] = power
        self._tracked[row] = power

    def tracks_attention(self, row: int | None = None) -> bool:
        """Whether decode adds to the metric of `row`'s KVs, or of any row's."""
        if row is not None:
            return row in self._tracked
        return self._whatever or bool(self._tracked)

    @contextlib.contextmanager
    def tracking_whatever_is(self) -> Iterator[None]:
        """A step in here is one that adds to the metric of the rows that will be tracked then."""
        self._whatever = True
        try:
            yield
        finally:
            self._whatever = False

    def clear(self, row: int) -> None:
        """Make `row` uncompressed again."""
        if self._tracked.pop(row, None) is not None:
            self.tracked[row] = 0
        if self._segments.pop(row, None) is not None:
            for tensor in self._tensors:
                tensor[row] = 0

    def reset(self) -> None:
        """Make every row uncompressed."""
        for tensor in (*self._tensors, self.tracked):
            tensor.zero_()
        self._segments.clear()
        self._tracked.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError unless every row holds what its segment says, and zeros else."""
        left = torch.stack([each.flatten(1).any(1) for each in self._tensors]).any(0).tolist()
        for row, tracked in enumerate(self.tracked.tolist()):
            assert tracked == self._tracked.get(row, 0), f"row {row}: tracked"
            segment = self._segments.get(row)
            if segment is None:
                assert not left[row], f"row {row}: state left"
                continue
            begin, first, count, stride = (each[row].tolist() for each in self._tensors)
            page, heads = segment.page_size, len(self._canonical)
            shared = segment.begin // page
            assert segment.begin % page == segment.end % page == 0, f"row {row}: not aligned"
            assert segment.begin <= segment.row_begin <= segment.end, f"row {row}: overlap"
            assert begin == [0, segment.row_begin, segment.end], f"row {row}: {begin}"
            assert stride == [heads, 1], f"row {row}: {stride}"
            assert first[_SHARED] == list(range(heads)), f"row {row}: shared pages"
            assert count[_SHARED] == [shared] * heads, f"row {row}: shared pages"
            assert sum(count[_OWN]) == segment.blocks * heads, f"row {row}: pages"
            assert not segment.blocks or min(count[_OWN]) >= 1, f"row {row}: a head without a page"
            ends = itertools.accumulate(count[_OWN][:-1], initial=0)
            assert first[_OWN] == list(ends), f"row {row}: pages overlap"
            assert segment.page_bounds.tolist() == [min(count[_OWN]), max(count[_OWN])]
