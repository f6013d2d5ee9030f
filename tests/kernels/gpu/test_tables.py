"""Block tables against `head_pages`, and what lies behind a row's pages."""

from __future__ import annotations

import pytest
import torch
from kvc_kernels.gpu import tables
from kvc_kernels.gpu.layout import Cache
from kvc_kernels.gpu.tables import block_table
from kvc_kernels.pages import head_pages

from tests.kernels.batches import RAGGED, Batch, build

EDGES = {
    "edges of a page": ([None, [1] * 6, None, [1] * 6, None], [0, 0, 1, 7, 9]),
    "one head owns most": ([[1, 1, 7, 1, 1, 1], None], [8, 64]),
}


def cached(batch: Batch, device: str) -> Cache:
    rows = batch.rows
    state = rows.req_to_token, rows.segment_begin, rows.tail_begin, rows.page_start
    return Cache(*(tensor.to(device) for tensor in (batch.arena_k, batch.arena_v, *state)))


def drawn(case: str, layers: int, heads: int, page: int) -> Batch:
    """`case` for six heads a block, however they are shared between layers and heads."""
    segments, tails = (RAGGED | EDGES)[case]
    return build(
        segments, tails, layers=layers, heads=heads, page=page, dim=16, dtype=torch.float32
    )


def check(batch: Batch, device: str, spare: int) -> None:
    cache, rows = cached(batch, device), batch.rows
    for layer, pages in enumerate(head_pages(rows, cache.layers, cache.heads, cache.page_size)):
        most = int(pages.count.max()) + spare
        table, length = block_table(
            cache, layer, rows.request.to(device), rows.seq_len.to(device), most
        )
        held = torch.zeros(len(pages.count), dtype=torch.int64)
        held.index_add_(0, pages.owner, pages.length)
        assert length.tolist() == held.tolist()
        expected = [page.tolist() for page in pages.page.split(pages.count.tolist())]
        for row, mine in zip(table.tolist(), expected, strict=True):
            assert row == mine + [0] * (most - len(mine))


@pytest.mark.parametrize("case", RAGGED | EDGES)
@pytest.mark.parametrize(("layers", "heads", "page"), [(2, 3, 8), (6, 1, 16), (1, 6, 64)])
def test_tables_hold_the_pages_of_every_head(device, case, layers, heads, page):
    check(drawn(case, layers, heads, page), device, spare=2)


def test_rows_that_many_programs_write(device, monkeypatch):
    monkeypatch.setattr(tables, "_BLOCK", 2)
    check(drawn("one head owns most", 2, 3, 8), device, spare=0)
    check(drawn("mixed", 2, 3, 8), device, spare=5)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_rows_of_the_request_tables_in_any_order(device, index):
    batch = drawn("mixed", 2, 3, 8)
    cache, order = cached(batch, device), torch.tensor([3, 1], device=device)
    seq_len = batch.rows.seq_len.to(device)
    whole, lengths = block_table(cache, 1, batch.rows.request.to(device), seq_len, 9)
    table, length = block_table(cache, 1, order.to(index), seq_len[order].to(index), 9)
    rows = (order[:, None] * 3 + torch.arange(3, device=device)).flatten()
    assert table.equal(whole[rows])
    assert length.equal(lengths[rows])


def test_given_tensors_are_written_and_no_further_than_the_pages(device):
    batch = drawn("mixed", 2, 3, 8)
    cache, rows = cached(batch, device), batch.rows
    request, seq_len = rows.request.to(device), rows.seq_len.to(device)
    expected, lengths = block_table(cache, 0, request, seq_len, 9)
    out = torch.full_like(expected, 7), torch.full_like(lengths, 7)
    table, length = block_table(cache, 0, request, seq_len, 9, out)
    assert table is out[0]
    assert length is out[1]
    assert length.equal(lengths)
    mine = torch.arange(9, device=device) < -(-lengths[:, None] // 8)
    assert table.equal(torch.where(mine, expected, 7))


def test_what_does_not_fit_is_refused(device):
    batch = drawn("mixed", 2, 3, 8)
    cache = cached(batch, device)
    request, seq_len = batch.rows.request.to(device), batch.rows.seq_len.to(device)
    with pytest.raises(ValueError, match="3 lengths for 4 requests"):
        block_table(cache, 0, request, seq_len[1:], 9)
    with pytest.raises(ValueError, match="layer 2 of 2"):
        block_table(cache, 2, request, seq_len, 9)
    table, length = block_table(cache, 0, request, seq_len, 9)
    for out in (table.long(), length), (table[1:], length), (table, length[1:]):
        with pytest.raises(ValueError, match="contiguous int32"):
            block_table(cache, 0, request, seq_len, 9, out)
    empty, none = block_table(cache, 0, request[:0], seq_len[:0], 9)
    assert empty.shape == (0, 9)
    assert none.shape == (0,)
