"""What a report tells of the KVs every head kept, held against the pages that hold them."""

from __future__ import annotations

import base64
import json
import zlib

import pytest
import torch

from sgl_kvc import report as reports
from sgl_kvc.cache import compaction
from sgl_kvc.cache.request import Request
from sgl_kvc.policy.selection import Selection
from sgl_kvc.spec import SpecError, parse
from tests.sgl_kvc.lives import HEADS, LAYERS, PAGE, World, kv
from tests.sgl_kvc.test_radix import PLAIN, prompt, report, server_args  # noqa: F401
from tests.sgl_kvc.test_request import run

EXPLAINED = PLAIN | {"explain": True}


def kept_positions(explain: dict) -> list[list[int]]:
    """Of every head, as a client reads them."""
    rows = zlib.decompress(base64.b64decode(explain["positions"]))
    width = -(-(explain["end"] - explain["begin"]) // 8)
    return [
        [
            explain["begin"] + i
            for i in range(width * 8)
            if rows[head * width + i // 8] >> (i % 8) & 1
        ]
        for head in range(explain["layers"] * explain["heads"])
    ]


@pytest.mark.parametrize("prefix", [0, 8])
def test_what_is_told_is_what_lies_in_the_pages(prefix):
    world, tokens = World(40), prompt(46)
    req = run(world, tokens, EXPLAINED | {"prefix_tokens": prefix})
    segment, told = Request.of(req).segment, report(req)["explain"]
    assert json.loads(json.dumps(told)) == told
    assert (told["layers"], told["heads"], told["skipped"]) == (LAYERS, HEADS, None)
    assert (told["begin"], told["end"]) == (prefix, 44)
    blocks = segment.slots[::PAGE] // PAGE
    pages = world.pool.arena_k[blocks].flatten(0, 2)
    held = pages.split([count // PAGE for count in told["kept"]])
    expected = kv(tokens)
    for head, positions in enumerate(kept_positions(told)):
        assert len(positions) == told["kept"][head]
        content = expected[positions, head // HEADS, head % HEADS]
        assert torch.equal(held[head].flatten(0, 1), content), f"head {head}"
    assert len({tuple(each) for each in kept_positions(told)}) > 1, "heads differ"


def test_nothing_is_told_unless_asked():
    world = World(40)
    assert "explain" not in report(run(world, prompt(30), PLAIN))
    assert Request.of(world.live[0]).segment.bitmap is None
    short = run(world, prompt(5), EXPLAINED | {"min_tokens": 64})
    assert report(short)["skipped"]
    assert "explain" not in report(short)


def test_a_bitmap_that_would_be_large_is_not_made(monkeypatch):
    bits = LAYERS * HEADS * 28
    for module in (reports, compaction):
        monkeypatch.setattr(module, "MAX_BITS", bits - 1)
    told = report(run(World(40), prompt(30), EXPLAINED))["explain"]
    assert told["positions"] is None
    assert told["skipped"].endswith(f"2 layers, 3 heads and 28 tokens are {bits}")
    assert sum(told["kept"]) == 2 * PAGE * LAYERS * HEADS
    for module in (reports, compaction):
        monkeypatch.setattr(module, "MAX_BITS", bits)
    assert report(run(World(40), prompt(30), EXPLAINED))["explain"]["positions"]


def test_bits_are_from_the_lowest_and_rows_whole_bytes():
    positions = [*(8, 9, 10, 19), *(8, 11, 12, 13, 16, 17, 18, 19)]
    selection = Selection(torch.tensor([1, 2]), torch.tensor(positions))
    assert selection.bitmap(8, 20, 4).tolist() == [[0b111, 0b1000], [0b111001, 0b1111]]


def test_it_is_about_the_prompt():
    knob = {"rate": 8, "recompress_every": 16, "explain": True}
    with pytest.raises(SpecError, match=r"kv_compression\.explain: tells what was kept"):
        parse(knob)
    assert parse(knob | {"explain": False}).recompress_every == 16
