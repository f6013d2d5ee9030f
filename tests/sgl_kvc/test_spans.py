"""The span table says what segments say, row by row."""

from __future__ import annotations

import pytest
import torch

from sgl_kvc.pool.segment import Segment
from sgl_kvc.pool.spans import SpanTable
from sgl_kvc.spec import OFF

ROWS, HEADS, PAGE = 4, 3, 4


def segment(begin: int, end: int, *pages: int) -> Segment:
    """Of as many blocks as `pages` fill."""
    blocks = sum(pages) // HEADS
    slots = torch.arange(40, 40 + blocks * PAGE)
    return Segment(begin, end, slots, torch.tensor(pages), PAGE, OFF)


@pytest.fixture
def table() -> SpanTable:
    """Row 1 keeps two blocks of tokens 8 to 20, row 2 one of 0 to 12; both are tracked."""
    table = SpanTable(ROWS, HEADS, "cpu")
    table.install(1, segment(8, 20, 1, 3, 2))
    table.install(2, segment(0, 12, 1, 1, 1))
    table.track(1, 2)
    table.track(2, 1)
    table.check_integrity()
    return table


def state(table: SpanTable, row: int) -> list[list]:
    """Everything that the tensors hold of a row."""
    spans = table.spans
    rows = spans.begin, spans.first, spans.count, spans.stride, table.tracked
    return [each[row].tolist() for each in rows]


COMPRESSED = [
    [0, 12, 20],  # the segment's two blocks lie right before its end
    [[0, 1, 2], [0, 1, 4]],
    [[2, 2, 2], [1, 3, 2]],
    [HEADS, 1],
    2,
]
UNCOMPRESSED = [[0, 0, 0], [[0, 0, 0]] * 2, [[0, 0, 0]] * 2, [0, 0], 0]


def test_a_row_says_where_its_segment_lies(table):
    assert state(table, 1) == COMPRESSED
    assert state(table, 0) == state(table, 3) == UNCOMPRESSED
    assert [table.is_compressed(row) for row in range(ROWS)] == [False, True, True, False]
    assert [table.tracks_attention(row) for row in range(ROWS)] == [False, True, True, False]
    assert table.tracks_attention()


def test_a_segment_is_replaced_by_a_later_one(table):
    table.install(1, segment(8, 28, 4, 1, 1))
    assert state(table, 1) == [
        [0, 20, 28], [[0, 1, 2], [0, 4, 5]], [[2, 2, 2], [4, 1, 1]], [HEADS, 1], 2
    ]  # fmt: skip
    table.check_integrity()


def test_clearing_a_row_leaves_the_others(table):
    table.clear(2)
    assert state(table, 2) == UNCOMPRESSED
    assert state(table, 1) == COMPRESSED
    assert not table.is_compressed(2)
    assert not table.tracks_attention(2)
    table.check_integrity()


@pytest.mark.parametrize("row", [0, 3])
def test_clearing_an_uncompressed_row_does_nothing(table, row):
    """Every request that ends is cleared, compressed or not, and other rows are being read."""
    before = [tensor.clone() for tensor in (*table._tensors, table.tracked)]
    version = [tensor._version for tensor in (*table._tensors, table.tracked)]
    table.clear(row)
    after = (*table._tensors, table.tracked)
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert [tensor._version for tensor in after] == version, "not a kernel was launched"
    assert state(table, 1) == COMPRESSED
    assert table.is_compressed(1)
    assert table.is_compressed(2)


def test_clearing_a_row_that_is_not_tracked(table):
    table.install(3, segment(0, 8, 1, 1, 1))
    table.clear(3)
    assert state(table, 3) == UNCOMPRESSED
    assert table.tracks_attention(1)
    assert table.tracks_attention(2)
    table.clear(1)
    table.clear(2)
    assert not table.tracks_attention()


def test_a_tracked_row_without_a_segment_is_cleared(table):
    """A request that is compressed later is tracked first."""
    table.track(3, 1)
    table.clear(3)
    assert state(table, 3) == UNCOMPRESSED
    table.check_integrity()


def test_reset(table):
    table.reset()
    for row in range(ROWS):
        assert state(table, row) == UNCOMPRESSED
        assert not table.is_compressed(row)
    assert not table.tracks_attention()
    table.check_integrity()


@pytest.mark.parametrize("row", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "where",
    [("begin", 0), ("begin", 1), ("begin", 2), ("stride", 0), ("stride", 1)]
    + [(name, span, head) for name in ("first", "count") for span in (0, 1) for head in range(3)],
    ids=str,
)
def test_every_wrong_number_is_found(table, row, where):
    """Integrity is what the stateful test asks for after every step."""
    name, *index = where
    getattr(table.spans, name)[(row, *index)] += 1
    with pytest.raises(AssertionError, match=f"row {row}|^assert"):
        table.check_integrity()


@pytest.mark.parametrize("row", range(ROWS))
def test_a_wrong_power_is_found(table, row):
    table.tracked[row] += 1
    with pytest.raises(AssertionError, match=f"row {row}: tracked"):
        table.check_integrity()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (segment(8, 18, 1, 3, 2), "not aligned"),
        (segment(6, 20, 1, 3, 2), "not aligned"),
        (segment(16, 20, 1, 3, 2), "overlap"),
        (segment(8, 20, 0, 4, 2), "a head without a page"),
    ],
)
def test_a_segment_that_cannot_be_is_found(wrong, said):
    table = SpanTable(ROWS, HEADS, "cpu")
    table.install(1, wrong)
    with pytest.raises(AssertionError, match=f"row 1: {said}"):
        table.check_integrity()


def test_a_segment_without_blocks():
    """Nothing is compressed yet, but what follows may be."""
    table = SpanTable(ROWS, HEADS, "cpu")
    table.install(1, segment(8, 8, 0, 0, 0))
    table.check_integrity()
    assert state(table, 1)[0] == [0, 8, 8]
