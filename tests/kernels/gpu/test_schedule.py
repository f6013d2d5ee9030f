"""The work of a decode step is cut equally, and a step reads nothing but its schedule."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from kvc_kernels.decode import decode_reference
from kvc_kernels.gpu.decode import decode, new_schedule
from kvc_kernels.gpu.schedule import LEAST, ROW_COST, Schedule

from tests.kernels.batches import HEADS, LAYERS, RAGGED, Drawn, Row, build
from tests.kernels.gpu import queue_model
from tests.kernels.gpu.test_attention import scheduled

TILE = 16
BOUND = {"atol": 1e-5, "rtol": 1e-5}


def schedule(drawn: Drawn, device: str, programs: int, room: int | None = None) -> Schedule:
    batch = drawn.on(device)
    made = new_schedule(
        batch.cache, room or len(batch.request), HEADS, torch.float32, programs=programs, tile=TILE
    )
    made.update(batch)
    return made


def cuts_of(made: Schedule, rows: int, layer: int) -> tuple[list, list]:
    """Where rows begin, and the (row, tile) of every cut, in one layer."""
    starts = made.starts[layer * (rows + 1) :][: rows + 1].tolist()
    cuts = made.cuts.view(LAYERS, -1, 2)[layer].tolist()
    return starts, [tuple(cut) for cut in cuts]


@pytest.mark.parametrize("case", RAGGED)
@pytest.mark.parametrize("programs", [1, 2, 7, 1500])
def test_every_tile_is_read_once_in_stretches_of_equal_length(case, programs, device):
    drawn = build(RAGGED[case])
    rows, made = len(drawn.keys) * HEADS, schedule(drawn, device, programs)
    for layer in range(LAYERS):
        tiles = [-(-len(keys) // TILE) for each in drawn.keys for keys in each[layer]]
        starts, cuts = cuts_of(made, rows, layer)
        assert starts == [sum(tiles[:row]) + row * ROW_COST for row in range(rows + 1)]
        assert len(cuts) == programs + 1
        assert cuts[0] == (0, 0)
        assert cuts[-1] == (rows, 0)
        read = []
        for (row, tile), (to_row, to_tile) in itertools.pairwise(cuts):
            while row < to_row:
                read += [(row, each) for each in range(tile, tiles[row])]
                row, tile = row + 1, 0
            read += [(row, each) for each in range(tile, to_tile)]
        assert read == [(row, tile) for row in range(rows) for tile in range(tiles[row])]
        stretches = min(max(starts[-1] // LEAST, 1), programs)
        where = [0 if row == rows else starts[row] + (tile + ROW_COST if tile else 0)
                 for row, tile in cuts]  # fmt: skip
        where[stretches:] = [starts[-1]] * (programs + 1 - stretches)
        lengths = [after - before for before, after in itertools.pairwise(where)]
        assert max(lengths) <= -(-starts[-1] // stretches) + ROW_COST


@pytest.mark.parametrize("programs", [2, 5, 40])
def test_a_head_that_many_programs_share(programs, device):
    """The longest is cut into parts that are merged; heads beside it are not."""
    rows = [Row(9), Row(5, [1, 20, 1, 2, 9, 1]), Row(170), Row(0)]
    drawn = build(rows)
    torch.manual_seed(3)
    query = torch.randn(len(rows), HEADS * 2, 16)
    batch = scheduled(drawn, query, device, programs)
    for layer in range(LAYERS):
        out, lse = decode(query.to(device), batch, layer, 0.25)
        expected, expected_lse = decode_reference(query, drawn.batch, layer, 0.25)
        torch.testing.assert_close(out.cpu(), expected, **BOUND)
        torch.testing.assert_close(lse.cpu(), expected_lse, **BOUND)


def test_more_rows_than_are_counted_at_a_time(device, monkeypatch):
    monkeypatch.setattr("kvc_kernels.gpu.schedule.AT_ONCE", 4)
    drawn = build(RAGGED["all spans"])
    query = torch.randn(len(drawn.keys), HEADS, 16)
    batch = scheduled(drawn, query, device, 6)
    expected = decode_reference(query, drawn.batch, 1, 0.25)[0]
    got = decode(query.to(device), batch, 1, 0.25)[0]
    torch.testing.assert_close(got.cpu(), expected, **BOUND)


def test_one_schedule_for_batches_of_any_size(device):
    """As CUDA graphs use it: its tensors stay, and a smaller batch follows a larger one."""
    drawn = build(RAGGED["all spans"])
    query = torch.randn(4, HEADS, 16)
    made = schedule(drawn, device, 5)
    for order in ([3, 0, 1, 2], [2], [1, 3]):
        chosen = drawn.choose(order)
        batch = chosen.on(device)
        made.update(batch)
        got = decode(query[: len(order)].to(device), batch, 0, 0.25)[0]
        expected = decode_reference(query[: len(order)], chosen.batch, 0, 0.25)[0]
        torch.testing.assert_close(got.cpu(), expected, **BOUND)
    too_many = dataclasses.replace(drawn.batch, request=drawn.batch.request.repeat(2),
                                   seq_len=drawn.batch.seq_len.repeat(2))  # fmt: skip
    with pytest.raises(ValueError, match="a schedule of 4 requests"):
        made.update(too_many)


def test_a_step_reads_nothing_but_its_schedule(device):
    """A graph is replayed while rows, spans and lengths change for the next step."""
    drawn = build(RAGGED["all spans"])
    query = torch.randn(len(drawn.keys), HEADS, 16)
    expected = decode_reference(query, drawn.batch, 1, 0.25)[0]
    batch = scheduled(drawn, query, device, 3)
    for tensor in (*vars(batch.cache.spans).values(), batch.cache.req_to_token):
        tensor.fill_(-7)
    for tensor in (batch.request, batch.seq_len):
        tensor.fill_(1 << 20)
    got = decode(query.to(device), batch, 1, 0.25)[0]
    torch.testing.assert_close(got.cpu(), expected, **BOUND)


@pytest.mark.parametrize("seed", range(6))
def test_torn_and_dead_rows_do_no_harm(seed, device):
    """A row that is being given to another request may hold anything: others are right.

    For it only blocks of its own row are read; its length may be of another time.
    """
    drawn = build(RAGGED["all spans"])
    query = torch.randn(len(drawn.keys), HEADS, 16)
    expected = decode_reference(query, drawn.batch, 1, 0.25)[0]
    torch.manual_seed(seed)
    torn = drawn.on(device)
    spans, row = torn.cache.spans, int(torn.request[1])
    for tensor in vars(spans).values():
        old, now = tensor[row].clone(), torch.randint_like(tensor[row], -40, 400)
        tensor[row] = torch.where(torch.rand(old.shape, device=device) < 0.4, now, old)
    torn.seq_len[1] = [0, -3, 5, 10**6, 17, int(torn.seq_len[1])][seed]
    made = new_schedule(torn.cache, 4, HEADS, query.dtype, programs=3, tile=TILE)
    made.blocks.fill_(1 << 30)
    made.update(torn)
    width = len(made.blocks) // 4
    heads = made.heads.view(LAYERS, 4, HEADS, 8)
    per_block, used = LAYERS * HEADS, -(-max(0, min(int(torn.seq_len[1]), width * 8)) // 8)
    for held, shared, packed, *places, one, other in heads[:, 1].flatten(0, 1).tolist():
        for page in range(-(-held // 8)):
            span = 0 if page < shared else 1 if page < packed else 2
            place = places[span] + page * (one, other, per_block)[span]
            assert 0 <= place < used * per_block
    got = decode(query.to(device), torn, 1, 0.25)[0]
    others = [0, 2, 3]
    torch.testing.assert_close(got.cpu()[others], expected[others], **BOUND)


def test_what_lies_behind_a_head_is_not_read(device):
    """The rest of a page may hold anything, NaN too, and so may a page that is nobody's."""
    drawn = build([Row(3), Row(1, [1, 2, 1, 1, 1, 3]), Row(17)])
    cache, mine = drawn.cache, torch.zeros(drawn.cache.flat_k.shape[:2], dtype=torch.bool)
    for request in drawn.pages:
        for page, length, _ in (page for layer in request for head in layer for page in head):
            mine[page, :length] = True
    for arena in (cache.flat_k, cache.flat_v):
        arena[~mine] = float("nan")
    query = torch.randn(3, HEADS, 16)
    got = decode(query.to(device), scheduled(drawn, query, device, 2), 1, 0.25)[0]
    torch.testing.assert_close(got.cpu(), decode_reference(query, drawn.batch, 1, 0.25)[0], **BOUND)


@pytest.mark.parametrize("requests", [16, 64, 256, 1024])
@pytest.mark.parametrize("sigma", [0.0, 0.7, 1.2])
def test_the_bandwidth_is_used_whatever_the_lengths(requests, sigma, device):
    """Llama-3.1-8B at rate 8 and 6,000 tokens on an H200, in a model of it (queue_model.py)."""
    held, machine = queue_model.lengths(requests, 8, 750, sigma), queue_model.Machine()
    used = queue_model.utilisation(machine, queue_model.by_schedule(machine, held, 512))
    assert 0.85 <= used <= 1
    if sigma == 1.2 and requests <= 64:  # the model sees what uneven work costs
        whole = queue_model.utilisation(machine, queue_model.by_head(machine, held, 512))
        assert whole < 0.7
