"""Which pages of its segment each head of each request owns.

The whole compression state of a request is three small tensors, indexed by its row in
``req_to_token``. Zeros mean uncompressed: an empty segment, everything is tail.
"""

from __future__ import annotations

import torch

from sgl_kvc.pool.host_copy import HostCopy


class SegmentTable:
    """Segment state of every request row.

    Parameters
    ----------
    rows : rows of ``req_to_token``; row 0 pads CUDA graphs and is never compressed.
    heads : layers times KV heads.

    Attributes
    ----------
    segment_begin, tail_begin : int64 [rows], the positions F and S.
    page_start : int64 [rows, heads + 1], first page of every head within the segment.
    counted : bool [rows], whether decode adds to the metric of the row's KVs.
    """

    def __init__(self, rows: int, heads: int, device: str | torch.device):
        self.segment_begin = torch.zeros(rows, dtype=torch.int64, device=device)
        self.tail_begin = torch.zeros(rows, dtype=torch.int64, device=device)
        self.page_start = torch.zeros(rows, heads + 1, dtype=torch.int64, device=device)
        self.counted = torch.zeros(rows, dtype=torch.bool, device=device)
        # Host copies, so that nothing has to ask the device.
        self._begin: dict[int, int] = {}  # segment_begin of compressed rows
        self._tail: dict[int, int] = {}  # tail_begin of compressed rows
        self._pages: dict[int, HostCopy] = {}  # least and most pages of a head, of compressed rows
        self._counted: set[int] = set()

    def set(self, row: int, segment_begin: int, tail_begin: int, pages: torch.Tensor) -> None:
        """Record that `row` is compressed.

        Parameters
        ----------
        segment_begin, tail_begin : F and S, multiples of the block size.
        pages : int64 [heads], whole pages each head owns, heads in canonical order.
        """
        self.segment_begin[row] = segment_begin
        self.tail_begin[row] = tail_begin
        self.page_start[row, 1:] = pages.cumsum(0)
        self._begin[row] = segment_begin
        self._tail[row] = tail_begin
        self._pages[row] = HostCopy(torch.stack(pages.aminmax()))

    def count(self, row: int) -> None:
        """Have decode add to the metric of `row`'s KVs until it is cleared."""
        self.counted[row] = True
        self._counted.add(row)

    def counts(self, row: int | None = None) -> bool:
        """Whether `row`, or any row, is counted."""
        return row in self._counted if row is not None else bool(self._counted)

    def tail(self, row: int) -> int:
        """S of a row, 0 of an uncompressed one; without asking the device."""
        return self._tail.get(row, 0)

    def pages(self, row: int) -> HostCopy | None:
        """The least and the most pages of a head, None of an uncompressed row."""
        return self._pages.get(row)

    def begin(self, row: int) -> int | None:
        """F of a compressed row, None for an uncompressed one; without asking the device."""
        return self._begin.get(row)

    def clear(self, row: int) -> None:
        """Make `row` uncompressed again."""
        if row in self._counted:
            self._counted.discard(row)
            self.counted[row] = False
        self._tail.pop(row, None)
        self._pages.pop(row, None)
        if self._begin.pop(row, None) is not None:
            self.segment_begin[row] = 0
            self.tail_begin[row] = 0
            self.page_start[row] = 0

    def reset(self) -> None:
        """Make every row uncompressed."""
        self.segment_begin.zero_()
        self.tail_begin.zero_()
        self.page_start.zero_()
        self.counted.zero_()
        for state in (self._begin, self._tail, self._pages, self._counted):
            state.clear()

    def check_integrity(self, page_size: int) -> None:
        """Raise AssertionError unless every row's state is one the addressing rule allows."""
        heads = self.page_start.shape[1] - 1
        for row in range(len(self.segment_begin)):
            begin, end = int(self.segment_begin[row]), int(self.tail_begin[row])
            pages = self.page_start[row].diff()
            assert bool(self.counted[row]) == (row in self._counted), f"row {row}: counted"
            assert self._tail.get(row, 0) == end, f"row {row}: S={end}"
            if row not in self._begin:
                assert begin == end == 0, f"row {row}: state without a segment"
                assert int(self.page_start[row].abs().max()) == 0, f"row {row}: pages left"
                continue
            assert self._begin[row] == begin < end, f"row {row}: F={begin}, S={end}"
            assert begin % page_size == end % page_size == 0, f"row {row}: not block aligned"
            assert int(pages.min()) >= 1, f"row {row}: a head without a page"
            bounds = [int(pages.min()), int(pages.max())]
            assert self._pages[row].tolist() == bounds, f"row {row}: pages on the host"
            assert int(pages.sum()) == (end - begin) // page_size * heads, f"row {row}: pages"
