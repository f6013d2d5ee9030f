"""A step's second pass: what tracked requests hold is read, cut equally, and nothing else."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from kvc_kernels.batch import Batch
from kvc_kernels.decode import decode_reference
from kvc_kernels.gpu.decode import decode
from kvc_kernels.gpu.schedule import LEAST, ROW_COST, schedule_of
from kvc_kernels.gpu.second_pass import SecondPass

from tests.kernels.batches import HEADS, LAYERS, RAGGED, Drawn, Row, build
from tests.kernels.gpu.test_attention import scheduled

TILE, PAGE = 16, 8


def powers(rows: int, *tracked: int) -> torch.Tensor:
    """Of every request row; those of the batch's numbers in `tracked` are tracked, with 2 or 1."""
    found = torch.zeros(rows + 1, dtype=torch.int32)
    for number in tracked:
        found[1 + number] = 1 + number % 2
    return found


def planned(
    drawn: Drawn, query: torch.Tensor, device: str, programs: int, tracked: torch.Tensor
) -> tuple[Batch, SecondPass]:
    batch = scheduled(drawn, query, device, programs)
    made = SecondPass.allocate(batch.cache, len(batch.request), programs)
    for tensor in (made.members, made.starts, made.cuts):
        tensor.fill_(1 << 30)  # what is read without having been written does harm
    made.update(batch, schedule_of(batch), tracked.to(device))
    return batch, made


def own_tiles(drawn: Drawn, request: int, layer: int, head: int) -> int:
    """Tiles of a head that have KVs behind its shared span."""
    pages = drawn.pages[request][layer][head]
    shared = sum(span == 0 for _, _, span in pages) * PAGE
    return -(-sum(length for _, length, _ in pages) // TILE) - shared // TILE


@pytest.mark.parametrize("case", ["mixed", "all spans", "a shared document"])
@pytest.mark.parametrize("programs", [1, 2, 7, 200])
def test_tiles_of_tracked_requests_are_read_once_in_stretches_of_equal_length(
    case, programs, device
):
    drawn = build(RAGGED[case])
    tracked = [0, len(drawn.keys) - 1]
    query = torch.randn(len(drawn.keys), HEADS, 16)
    _, made = planned(drawn, query, device, programs, powers(len(drawn.keys), *tracked))
    assert made.members[:4].tolist() == [x for n in tracked for x in (n, 1 + n % 2)]
    rows = len(tracked) * HEADS
    for layer in range(LAYERS):
        tiles = [own_tiles(drawn, n, layer, head) for n in tracked for head in range(HEADS)]
        starts = made.starts[layer * (rows + 1) :][: rows + 1].tolist()
        assert starts == [sum(tiles[:row]) + row * ROW_COST for row in range(rows + 1)]
        cuts = [tuple(cut) for cut in made.cuts.view(LAYERS, -1, 2)[layer].tolist()]
        read, stretches = [], min(max(starts[-1] // LEAST, 1), programs)
        for (row, tile), (to_row, to_tile) in itertools.pairwise(cuts):
            before = len(read)
            while row < to_row:
                read += [(row, each) for each in range(tile, tiles[row])]
                row, tile = row + 1, 0
            read += [(row, each) for each in range(tile, to_tile)]
            assert len(read) - before <= -(-starts[-1] // stretches)
        assert read == [(row, tile) for row in range(rows) for tile in range(tiles[row])]


def test_where_nobody_is_tracked_no_program_has_work(device):
    drawn = build(RAGGED["all spans"])
    query = torch.randn(len(drawn.keys), HEADS, 16)
    batch, made = planned(drawn, query, device, 5, powers(len(drawn.keys)))
    assert not made.cuts.any(), "from head 0, tile 0 to head 0, tile 0"
    metric = torch.rand(batch.cache.arena_k.shape[:-1], device=device)
    before = metric.clone()
    out, _ = decode(query.to(device), batch, 1, 0.25, metric=metric, tracked=powers(4))
    assert torch.equal(metric, before)
    expected = decode_reference(query, drawn.batch, 1, 0.25)[0]
    torch.testing.assert_close(out.cpu(), expected, atol=1e-5, rtol=1e-5)


def check_metric(drawn, query, batch, tracked, device) -> None:
    """Of every layer what the reference adds."""
    got = torch.rand(batch.cache.arena_k.shape[:-1])
    expected, got = got.clone(), got.to(device)
    for layer in range(LAYERS):
        decode_reference(query, drawn.batch, layer, 0.25, metric=expected, tracked=tracked)
        nothing = torch.full_like(tracked, 1 << 20, device=device)  # it is not read any more
        decode(query.to(device), batch, layer, 0.25, metric=got, tracked=nothing)
    torch.testing.assert_close(got.cpu(), expected, atol=1e-5, rtol=1e-5)


def test_a_step_reads_nothing_but_its_snapshot(device):
    """A graph is replayed while rows, spans, lengths and who is tracked change for the next."""
    drawn = build(RAGGED["all spans"])
    query, tracked = torch.randn(4, HEADS * 2, 16), powers(4, 1, 3)
    on_device = tracked.clone().to(device)
    batch, _ = planned(drawn, query, device, 3, on_device)
    whole = dataclasses.replace(drawn.batch, request=drawn.batch.request.clone(),
                                seq_len=drawn.batch.seq_len.clone())  # fmt: skip
    kept = Drawn(whole, drawn.keys, drawn.values, drawn.pages)
    spans = {name: tensor.clone() for name, tensor in vars(drawn.cache.spans).items()}
    table = drawn.cache.req_to_token.clone()
    on_device.fill_(-7)
    for tensor in (*vars(batch.cache.spans).values(), batch.cache.req_to_token):
        tensor.fill_(-7)
    for tensor in (batch.request, batch.seq_len):
        tensor.fill_(1 << 20)
    got = torch.zeros(batch.cache.arena_k.shape[:-1], device=device)
    decode(query.to(device), batch, 1, 0.25, metric=got, tracked=on_device)
    for name, tensor in spans.items():  # on a CPU both are the same tensors
        getattr(kept.cache.spans, name).copy_(tensor)
    kept.cache.req_to_token.copy_(table)
    expected = torch.zeros(got.shape)
    decode_reference(query, kept.batch, 1, 0.25, metric=expected, tracked=tracked)
    torch.testing.assert_close(got.cpu(), expected, atol=1e-5, rtol=1e-5)


def test_one_for_batches_of_any_size(device):
    """As CUDA graphs use it: its tensors stay, and another batch follows a larger one."""
    drawn = build(RAGGED["all spans"])
    query, tracked = torch.randn(4, HEADS, 16), powers(4, 0, 3)
    _, made = planned(drawn, query, device, 4, tracked)
    for order in ([3, 1, 0], [2], [1, 3]):
        chosen, asked = drawn.choose(order), query[: len(order)]
        batch = scheduled(chosen, asked, device, 4)
        made.update(batch, schedule_of(batch), tracked.to(device))
        check_metric(chosen, asked, batch, tracked, device)
    more = build([Row(3)] * 5)
    batch = scheduled(more, torch.randn(5, HEADS, 16), device, 4)
    with pytest.raises(ValueError, match="a second pass of 4 requests"):
        made.update(batch, schedule_of(batch), tracked.to(device))


@pytest.mark.parametrize("programs", [2, 7, 20])
def test_one_tracked_request_is_shared_by_all_programs(programs, device):
    """Its heads are cut behind shared spans of several tiles; others are not looked at."""
    drawn = build([Row(9), Row(100, [3, 1, 1, 9, 2, 2], [1, 9, 2, 4, 5, 3]), Row(170), Row(0)])
    query, tracked = torch.randn(4, HEADS * 2, 16), powers(4, 1)
    batch, made = planned(drawn, query, device, programs, tracked)
    cuts = made.cuts.view(LAYERS, -1, 2)[0].tolist()
    assert len({*map(tuple, cuts)}) == min(programs, made.starts[HEADS].item() // LEAST) + 1
    check_metric(drawn, query, batch, tracked, device)


def test_more_than_are_counted_at_a_time(device, monkeypatch):
    monkeypatch.setattr("kvc_kernels.gpu.second_pass.AT_ONCE", 2)
    drawn = build(RAGGED["all spans"])
    query, tracked = torch.randn(4, HEADS, 16), powers(4, 0, 2, 3)
    batch, _ = planned(drawn, query, device, 6, tracked)
    check_metric(drawn, query, batch, tracked, device)


@pytest.mark.parametrize("seed", range(4))
def test_a_torn_row_that_is_tracked_does_no_harm(seed, device):
    """It adds to nothing but what its own row's blocks hold; others' metric is right."""
    drawn = build(RAGGED["all spans"])
    query, tracked = torch.randn(4, HEADS, 16), powers(4, 0, 1, 3)
    expected = torch.zeros(drawn.cache.arena_k.shape[:-1])
    others = tracked.clone()
    others[2] = 0
    decode_reference(query, drawn.batch, 1, 0.25, metric=expected, tracked=others)
    torch.manual_seed(seed)
    torn = drawn.on(device)
    row = int(torn.request[1])
    for tensor in vars(torn.cache.spans).values():
        old, now = tensor[row].clone(), torch.randint_like(tensor[row], -40, 400)
        tensor[row] = torch.where(torch.rand(old.shape, device=device) < 0.4, now, old)
    torn.seq_len[1] = [0, -3, 10**6, 17][seed]
    given = Drawn(torn, drawn.keys, drawn.values, drawn.pages)
    batch, _ = planned(given, query, device, 3, tracked)
    got = torch.zeros(expected.shape, device=device)
    decode(query.to(device), batch, 1, 0.25, metric=got, tracked=tracked.to(device))
    held = (torn.cache.req_to_token[row] // PAGE).long().cpu()
    got = got.cpu()
    got[held] = expected[held]
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
