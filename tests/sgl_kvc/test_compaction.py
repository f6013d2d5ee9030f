"""What is kept of one prompt, when it is compressed again, and what its report says of it.

Blocks have 4 tokens; heads keep what random scores say.
"""

from __future__ import annotations

import pytest
import torch
from sglang.srt.mem_cache.common import release_kv_cache

from sgl_kvc.cache.continual import tracked_power
from sgl_kvc.cache.request import Request
from sgl_kvc.spec import parse
from tests.sgl_kvc.lives import HEADS, LAYERS, PAGE, World
from tests.sgl_kvc.test_radix import GOES_ON, PLAIN, prompt, report, server_args  # noqa: F401
from tests.sgl_kvc.test_request import run


def test_a_report_before_the_first_token_is_decoded():
    world = World(40)
    req = world.request(prompt(30), PLAIN)
    world.admit(req)
    assert world.prefill(req, 0, 30)
    said = report(req)
    assert said["skipped"] == "the request ended before its first token was decoded"
    assert said["blocks"] == {"before": 8, "after": 8, "shared": 0}
    assert Request.of(req).row == req.req_pool_idx
    assert world.pool.requests == {req.rid: Request.of(req)}


def test_a_compressed_requests_report():
    """28 of 30 tokens are whole blocks, 7; a quarter of them is 2."""
    world = World(40)
    req = run(world, prompt(30), PLAIN)
    said, segment = report(req), Request.of(req).segment
    assert (segment.begin, segment.end, segment.blocks, segment.row_begin) == (0, 28, 2, 20)
    assert str(said["blocks"]) == "{'before': 8, 'after': 3, 'shared': 0}", "whole numbers"
    assert segment.spec is Request.of(req).spec
    assert said["bytes"]["after"] == 3 * world.pool.block_bytes
    assert said["kept_per_head"]["mean"] == 2 * PAGE + 2
    low, high = (int(each) for each in (segment.pages.min(), segment.pages.max()))
    assert said["kept_per_head"]["min"] == low * PAGE + 2
    assert said["kept_per_head"]["max"] == high * PAGE + 2
    assert (said["policy"], said["rate"], said["skipped"]) == ("kv-compress", 4.0, None)
    assert "decode" not in said
    assert Request.of(req).scores is None
    assert req.cache_protected_len == 20
    row = world.requests.req_to_token[req.req_pool_idx]
    assert not row[:20].any(), "what was let go of is nobody's block 0"
    assert torch.equal(row[20:28].long(), segment.slots)
    assert world.cache.protected_size() == 0
    assert world.pool.spans.is_compressed(req.req_pool_idx)
    assert not world.pool.spans.tracks_attention()


@pytest.mark.parametrize("prefix", [0, 8])
@pytest.mark.parametrize("decoded", [3, 30])
def test_the_peak_of_what_decode_held(decoded, prefix):
    """Just before it was compressed again, or when the request ended."""
    world = World(40)
    req = run(world, prompt(32), GOES_ON | {"prefix_tokens": prefix})
    request, held = Request.of(req), []
    for _ in range(decoded):
        begin = request.segment.row_begin - prefix
        held.append(req.kv_committed_len - begin)
        world.decode()
    held.append(req.kv_committed_len - request.segment.row_begin + prefix)
    assert report(req)["decode"]["recompressed"] == (0 if decoded == 3 else 3)
    release_kv_cache(world.live.pop(), world.cache)
    assert report(req)["decode"]["kept_per_head_peak"] == max(held)


@pytest.mark.parametrize(("every", "at"), [(1, 4), (4, 4), (5, 8), (8, 8), (9, 12)])
def test_how_often_it_is_compressed_again(every, at):
    """After so many decoded tokens, in whole blocks; never for less than a block."""
    world = World(40)
    req = run(world, prompt(32), GOES_ON | {"recompress_every": every})
    begins = []
    for _ in range(14):
        begins.append(Request.of(req).segment.end)
        world.decode()
    assert begins.index(32 + at) == at + 1
    assert set(begins[: at + 1]) == {32}


@pytest.mark.parametrize("prefix", [0, 8])
def test_it_is_not_compressed_again_to_as_much_as_it_holds(prefix):
    """By a budget that is not full yet nothing would be freed."""
    world, own = World(40), {"budget": 24, "recompress_every": 4, "prefix_tokens": prefix}
    req = run(world, prompt(prefix + 8), GOES_ON | own)
    assert Request.of(req).segment.blocks == 2
    ends = []
    for _ in range(24):
        ends.append(Request.of(req).segment.end)
        world.decode()
    assert set(ends[:21]) == {prefix + 8}  # 24 KVs are held
    assert ends[21] == prefix + 28


def test_where_the_loss_begins():
    """A copy as large as the request's share costs nothing, a larger one does."""
    world = World(60)
    run(world, prompt(32), None)
    even = run(world, prompt(32), PLAIN | {"rate": 2, "window": 32})  # its share is 4 of 8 blocks
    assert report(even)["skipped"] is None
    req = run(world, prompt(32), PLAIN | {"rate": 2, "window": 32})
    request = Request.of(req)
    assert report(req)["skipped"] == (
        "compressed it would hold 4 blocks of its own; its share of the 8 it holds together with "
        "others is 2.7 (prefix_tokens keeps what is shared)"
    )
    assert request.segment is request.scores is None
    assert not request.extent.compressed
    assert request.extent.skipped == report(req)["skipped"]
    other = run(world, prompt(32), PLAIN | {"rate": 3, "window": 32})  # 3 blocks; share 8 / 4
    assert "is 2.0 (" in report(other)["skipped"]
    least = run(world, prompt(32), PLAIN | {"rate": 8, "window": 32})  # 1 block; share 8 / 5
    assert report(least)["skipped"] is None


def test_a_shared_prefix_is_no_part_of_the_loss():
    """It stays shared, whatever becomes of what follows."""
    world, knob = World(60), PLAIN | {"rate": 2, "window": 32, "prefix_tokens": 16}
    run(world, prompt(32), None)
    run(world, prompt(32), None)
    req = run(world, prompt(32), knob)
    assert report(req)["skipped"] == (
        "compressed it would hold 2 blocks of its own; its share of the 4 it holds together with "
        "others is 1.3 (prefix_tokens keeps what is shared)"
    )


def test_a_prefix_that_takes_the_whole_prompt():
    """Nothing is kept of it then; what is decoded behind it is compressed all the same."""
    world = World(40)
    req = run(world, prompt(30), GOES_ON | {"prefix_tokens": 100})
    segment = Request.of(req).segment
    assert (segment.begin, segment.end, segment.blocks) == (28, 28, 0)
    assert segment.spec is Request.of(req).spec
    assert report(req)["blocks"] == {"before": 8, "after": 1, "shared": 7}
    assert report(req)["skipped"] is None
    assert world.cache.protected_size() == 28
    for _ in range(20):
        world.decode()
    assert report(req)["decode"]["recompressed"] >= 1


# ---------------------------------------------------------------------------- decode's metric


@pytest.mark.parametrize(
    ("policy", "power"),
    [("kv-compress", 2), ("h2o", 1), ("r-kv", 1), ("streaming-llm", 0), ("tova", 0)],
)
def test_which_power_of_attention_counts(policy, power):
    assert tracked_power(parse({"rate": 4, "policy": policy})) == power


@pytest.mark.parametrize("goes_on", [True, False])
def test_the_metric_begins_with_the_prompts_scores(goes_on):
    """Of what was kept, and of the tail that was scored too; of no one else."""
    world = World(40)
    req = world.request(prompt(30), GOES_ON if goes_on else PLAIN)
    world.admit(req)
    assert world.prefill(req, 0, 30)
    world.pool.metric.fill_(-1)
    scores = Request.of(req).scores.scores()
    world.cache.cache_unfinished_req(req)
    metric = world.pool.metric
    assert world.pool.spans.tracks_attention(req.req_pool_idx) == goes_on
    if not goes_on:
        assert (metric == -1).all()
        return
    assert int(world.pool.spans.tracked[req.req_pool_idx]) == 2
    segment = Request.of(req).segment
    tail = world.requests.req_to_token[req.req_pool_idx, 28:30].long()
    behind = metric[tail // PAGE, :, :, tail % PAGE].permute(1, 2, 0)
    assert torch.equal(behind, scores[..., 28:])
    blocks = segment.slots[::PAGE] // PAGE
    mine = metric[blocks].flatten().sort().values
    assert mine.numel() == segment.blocks * PAGE * LAYERS * HEADS
    assert set(mine.tolist()) <= set(scores[..., :28].flatten().tolist())
    ours = len(blocks) * PAGE * LAYERS * HEADS + scores[..., 28:].numel()
    assert (metric != -1).sum() == ours
