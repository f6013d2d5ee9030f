"""Block tables against the plain lists, and what lies behind a row's pages."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kvc_kernels.gpu import tables
from kvc_kernels.gpu.tables import block_table

from tests.kernels.batches import RAGGED, Drawn, Row, build

EDGES = {
    "edges of a page": [Row(0), Row(0, [1] * 6), Row(1), Row(7, [1] * 6, 1), Row(9)],
    "one head owns most": [Row(8, [1, 1, 7, 1, 1, 1]), Row(64)],
}


def drawn(case: str, layers: int, heads: int, page: int) -> Drawn:
    """`case` for six heads a block, however they are shared between layers and heads."""
    return build((RAGGED | EDGES)[case], layers=layers, heads=heads, page=page)


def check(drawn: Drawn, device: str, spare: int) -> None:
    for layer in range(drawn.cache.layers):
        expected = [head for request in drawn.pages for head in request[layer]]
        most = max(map(len, expected)) + spare
        table, length = block_table(drawn.on(device), layer, most)
        assert length.tolist() == [sum(kvs for _, kvs, _ in head) for head in expected]
        for row, head in zip(table.tolist(), expected, strict=True):
            assert row == [page for page, _, _ in head] + [0] * (most - len(head))


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
    batch, order = drawn("all spans", 2, 3, 8), [3, 1]
    some = batch.choose(order).on(device)
    some = dataclasses.replace(some, request=some.request.to(index), seq_len=some.seq_len.to(index))
    whole, lengths = block_table(batch.on(device), 1, 9)
    table, length = block_table(some, 1, 9)
    rows = (torch.tensor(order)[:, None] * 3 + torch.arange(3)).flatten().to(device)
    assert table.equal(whole[rows])
    assert length.equal(lengths[rows])


@pytest.mark.parametrize("case", RAGGED)
def test_rows_that_come_head_by_head(device, case):
    batch = drawn(case, 2, 3, 8)
    whole, lengths = block_table(batch.on(device), 1, 9)
    table, length = block_table(batch.on(device), 1, 9, by_head=True)
    order = torch.arange(len(lengths), device=device).view(-1, 3).T.flatten()
    assert table.equal(whole[order])
    assert length.equal(lengths[order])


def test_given_tensors_are_written_and_no_further_than_the_pages(device):
    batch = drawn("all spans", 2, 3, 8).on(device)
    expected, lengths = block_table(batch, 0, 9)
    out = torch.full_like(expected, 7), torch.full_like(lengths, 7)
    table, length = block_table(batch, 0, 9, out)
    assert table is out[0]
    assert length is out[1]
    assert length.equal(lengths)
    mine = torch.arange(9, device=device) < -(-lengths[:, None] // 8)
    assert table.equal(torch.where(mine, expected, 7))


@pytest.mark.parametrize("least", [0, 1])
def test_rows_that_are_half_cleared_stay_within_the_table(device, least):
    """A finished request's, which a step that was prepared before still reads."""
    batch = drawn("all spans", 2, 3, 8).on(device)
    spans = batch.cache.spans
    spans.count.zero_()  # fewer KVs than none
    _, length = block_table(batch, 0, 9, least=least)
    assert length.tolist() == [max(least, each) for each in length.tolist()]
    assert int(length.min()) == least
    spans.count.fill_(1000)
    table, length = block_table(batch, 0, 9, least=least)
    assert int(length.max()) == 9 * 8
    assert table.shape == (len(length), 9)


def test_what_does_not_fit_is_refused(device):
    batch = drawn("mixed", 2, 3, 8)
    with pytest.raises(ValueError, match="layer 2 of 2"):
        block_table(batch.on(device), 2, 9)
    table, length = block_table(batch.on(device), 0, 9)
    for out in (table.long(), length), (table[1:], length), (table, length[1:]):
        with pytest.raises(ValueError, match="contiguous int32"):
            block_table(batch.on(device), 0, 9, out)
    empty, none = block_table(batch.choose([]).on(device), 0, 9)
    assert empty.shape == (0, 9)
    assert none.shape == (0,)
