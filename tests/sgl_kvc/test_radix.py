"""One request at a time through the radix cache: what it takes, gives back and says.

Blocks have 4 tokens; heads keep what random scores say.
"""

from __future__ import annotations

import pytest
import torch
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from sgl_kvc.cache.continual import tracked_power
from sgl_kvc.cache.request import Request
from sgl_kvc.spec import parse
from tests import tiny_models
from tests.sgl_kvc.lives import HEADS, LAYERS, PAGE, World
from tests.sgl_kvc.test_request import run

PLAIN = {"rate": 4, "min_tokens": 0, "sinks": 1, "recent": 2, "window": 2}
H2O = {"rate": 4, "min_tokens": 0, "policy": "h2o"}
GOES_ON = {"budget": 8, "recompress_every": 8} | {k: v for k, v in PLAIN.items() if k != "rate"}


@pytest.fixture(scope="module", autouse=True)
def server_args(tmp_path_factory):
    model = tiny_models.write(tmp_path_factory.mktemp("model"))
    set_global_server_args_for_scheduler(ServerArgs(model_path=str(model), device="cpu"))


def prompt(tokens: int, first: int = 100) -> list[int]:
    return list(range(first, first + tokens))


def report(req) -> dict:
    return Request.of(req).report.to_json()


# ---------------------------------------------------------------------------- memory


@pytest.mark.parametrize("promised", [0, PAGE, 3 * PAGE])
def test_what_was_promised_is_not_given_away(promised):
    """To the block: the next decode step takes it, and raises where it is not there."""
    world = World(10)
    cache = world.cache
    cache._promised = promised
    room = 10 * PAGE - promised
    assert cache.allocate(room + PAGE) is None
    assert world.allocator.available_size() == 10 * PAGE
    slots = cache.allocate(room)
    assert len(slots) == len(slots.unique()) == room
    assert cache.allocate(PAGE) is None or not promised
    assert world.allocator.available_size() == promised


def test_what_the_tree_can_do_without_is_room():
    world = World(10)
    run(world, prompt(6 * PAGE), None)
    release_kv_cache(world.live.pop(), world.cache)
    assert world.cache.evictable_size() == 6 * PAGE
    assert world.cache.allocate(11 * PAGE) is None
    assert world.cache.evictable_size() == 6 * PAGE
    assert len(world.cache.allocate(10 * PAGE)) == 10 * PAGE


def test_a_promise_holds_for_one_step():
    world = World(40)
    req, seen = run(world, prompt(8 * PAGE), GOES_ON), []
    allocate = world.cache.allocate
    world.cache.allocate = lambda tokens: seen.append(world.cache._promised) or allocate(tokens)
    for _ in range(20):
        world.cache.compress_due(world.live, promised=7)
        world.decode()
    assert set(seen) <= {7, PAGE, 0}
    assert 7 in seen
    assert world.cache._promised == 0
    req.kv_committed_len += 9
    world.cache.allocate = None  # so it raises
    with pytest.raises(TypeError):
        world.cache.compress_due(world.live, promised=7)
    assert world.cache._promised == 0


def test_whether_memory_was_released_is_asked_once():
    """The scheduler tries waiting requests again then."""
    world = World(40)
    run(world, prompt(8 * PAGE), None)
    assert not world.cache.take_released()
    run(world, prompt(8 * PAGE, 500), PLAIN)
    assert world.cache.take_released() is True
    assert world.cache.take_released() is False
    run(world, prompt(8 * PAGE, 900), GOES_ON)
    world.cache.take_released()
    for _ in range(8):
        world.decode()
    assert not world.cache.take_released()
    world.decode()
    assert world.cache.take_released() is True


# ---------------------------------------------------------------------------- whether


@pytest.mark.parametrize(
    ("tokens", "knob", "reason"),
    [
        (1, PLAIN, "no token is decoded"),
        (2, PLAIN, None),
        (1, PLAIN | {"question_tokens": 8}, None),
        (0, H2O, None),
        (0, PLAIN, "no token is decoded"),
        (1, H2O, "no token is decoded"),
    ],
)
def test_who_would_read_what_is_kept(tokens, knob, reason):
    """Decode, the question, or copies of the prompt that come next."""
    world = World(40)
    req = world.request(prompt(8 * PAGE), knob, max_new_tokens=tokens)
    world.admit(req)
    assert Request.of(req).unusable is None
    skipped = Request.of(req).extent.skipped
    assert skipped is None if reason is None else reason in skipped


def test_without_a_prefix_cache_or_in_a_session_nothing_is_compressed():
    world = World(40)
    req = world.request(prompt(8 * PAGE), PLAIN)
    req.session = object()
    assert world.cache._extent(req).skipped == "the request belongs to a session"
    world.cache.disable = True
    req = world.request(prompt(8 * PAGE), PLAIN)
    assert world.cache._extent(req).skipped == "the server's prefix cache is disabled"


@pytest.mark.parametrize("question", [0, 1, 8, 31])
def test_room_before_the_cut(question):
    world = World(40)
    req = world.request(prompt(8 * PAGE), PLAIN | {"question_tokens": question})
    assert world.admit(req) == 0
    end = (32 - question) // PAGE * PAGE
    room = end if question and end > PAGE else None
    assert world.cache.room_before_cut(req) == room
    if room is not None:
        req.prefix_indices = torch.arange(end - 3)
        assert world.cache.room_before_cut(req) == 3
        req.prefix_indices = torch.arange(end)
        assert world.cache.room_before_cut(req) is None


# ---------------------------------------------------------------------------- what it says


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
    assert said["blocks"] == {"before": 8, "after": 3, "shared": 0}
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


@pytest.mark.parametrize("decoded", [3, 30])
def test_the_peak_of_what_decode_held(decoded):
    """Just before it was compressed again, or when the request ended."""
    world = World(40)
    req = run(world, prompt(32), GOES_ON)
    request, held = Request.of(req), []
    for _ in range(decoded):
        begin = request.segment.row_begin
        held.append(req.kv_committed_len - begin)
        world.decode()
    held.append(req.kv_committed_len - request.segment.row_begin)
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


def test_it_is_not_compressed_again_to_as_much_as_it_holds():
    """By a budget that is not full yet nothing would be freed."""
    world = World(40)
    req = run(world, prompt(8), GOES_ON | {"budget": 24, "recompress_every": 4})
    assert Request.of(req).segment.blocks == 2
    ends = []
    for _ in range(24):
        ends.append(Request.of(req).segment.end)
        world.decode()
    assert set(ends[:21]) == {8}  # 24 KVs are held
    assert ends[21] == 28


def test_where_the_loss_begins():
    """A copy as large as the request's share frees nothing."""
    world = World(60)
    run(world, prompt(32), None)
    req = run(world, prompt(32), PLAIN | {"rate": 2, "window": 32})  # its share is 4 of 8 blocks
    request = Request.of(req)
    assert report(req)["skipped"] == (
        "compressed it would hold 4 blocks of its own; its share of the 8 it holds together with "
        "others is 4.0 (prefix_tokens keeps what is shared)"
    )
    assert request.segment is request.scores is None
    assert not request.extent.compressed
    assert request.extent.skipped == report(req)["skipped"]
    other = run(world, prompt(32), PLAIN | {"rate": 3, "window": 32})  # 3 blocks; share 8 / 3
    assert "is 2.7 (" in report(other)["skipped"]
    least = run(world, prompt(32), PLAIN | {"rate": 8, "window": 32})  # 1 block; share 2
    assert report(least)["skipped"] is None


# ---------------------------------------------------------------------------- decode's metric


@pytest.mark.parametrize(
    ("policy", "power"), [("kv-compress", 2), ("h2o", 1), ("streaming-llm", 0), ("tova", 0)]
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


# ---------------------------------------------------------------------------- the end


def test_a_flushed_cache_has_forgotten_everything():
    world = World(40)
    req = run(world, prompt(32), H2O)
    run(world, prompt(32, 500), GOES_ON)
    key = Request.of(req).states_key(req)
    assert world.cache.states.get(key) is not None
    world.cache.reset()
    assert world.cache.states.get(key) is None
    assert not world.cache.sharing.holders
    assert world.pool.requests == {}
    world.pool.spans.check_integrity()
    assert not world.pool.spans.is_compressed(req.req_pool_idx)


@pytest.mark.parametrize("knob", [None, PLAIN, GOES_ON])
def test_a_request_that_ends_leaves_nothing(knob):
    world = World(40)
    req = run(world, prompt(32), knob)
    for _ in range(9):
        world.decode()
    row = req.req_pool_idx
    release_kv_cache(world.live.pop(), world.cache)
    assert world.pool.requests == {}
    assert not world.cache.sharing.holders
    assert not world.pool.spans.is_compressed(row)
    assert not world.pool.spans.tracks_attention()
    assert Request.of(req).segment is None
    assert world.allocator.available_size() + world.cache.evictable_size() == world.tokens
    world.pool.spans.check_integrity()
