"""Span table, allocator and radix cache together, over random lives of requests."""

from __future__ import annotations

import contextlib
import os

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from sgl_kvc.cache.request import Request
from tests import tiny_models
from tests.sgl_kvc import ownership, reading
from tests.sgl_kvc.knobs import APART, KNOBS, PRESSED, TURNS
from tests.sgl_kvc.lives import CONTEXT, PAGE, ROWS, World, tokens_of
from tests.waits import UnwaitingCache

BLOCKS = 40
#: Random lives, the steps of one at most, and of all at least; all checks follow each.
LIVES, LIFE, STEPS = 280, 40, 10_000


@pytest.fixture(scope="module", autouse=True)
def server_args(tmp_path_factory):
    model = tiny_models.write(tmp_path_factory.mktemp("model"))
    set_global_server_args_for_scheduler(ServerArgs(model_path=str(model), device="cpu"))


class Lives(RuleBasedStateMachine):
    """What can happen to requests, and what always holds."""

    steps = 0  # of all lives

    def __init__(self):
        super().__init__()
        self.waiting: list[Req] = []  # retracted
        self.said: list[list[int]] = []  # prompt and answer of those that have ended

    @initialize(blocks=st.sampled_from([BLOCKS, 24]))
    def build(self, blocks=BLOCKS):
        self.world = World(blocks)

    # ------------------------------------------------------------------- what can happen

    @rule(
        family=st.integers(0, 1),
        shared=st.integers(1, 60),
        own=st.integers(0, 12),
        knob=st.sampled_from(KNOBS + 3 * PRESSED),  # these need more to happen
        chunk=st.sampled_from([0, 0, 2 * PAGE, 5 * PAGE]),
        keep=st.booleans(),
        other_ends=st.booleans(),
    )
    def start(self, family, shared, own, knob, chunk, keep, other_ends=False):
        """Prefill a prompt, in chunks or at once.

        `keep` False aborts it before its end; with `other_ends` another request ends after
        each chunk.
        """
        tokens = [family * 1000 + i for i in range(shared)] + [2000 + self.world.started] * own
        self._start(tokens, knob, chunk, keep, other_ends)

    @rule(
        document=st.sampled_from([(0, 24), (0, 40), (1, 24)]),
        question=st.sampled_from([[7], [8] * 9]),
        knob=st.sampled_from(APART),
        chunk=st.sampled_from([0, 0, PAGE]),
        keep=st.booleans(),
        other_ends=st.booleans(),
        pin=st.booleans(),
    )
    def ask(self, document, question, knob, chunk, keep, other_ends, pin):
        """A question about a document: requests like it share a segment, and may pin it."""
        tokens = [document[0] * 1000 + i for i in range(document[1])] + question
        knob = knob | {"question_tokens": len(question)}
        self._start(tokens, knob, chunk, keep, other_ends, pin)

    @rule(
        before=st.integers(0, 3),
        new=st.integers(1, 12),
        knob=st.sampled_from(TURNS),
        chunk=st.sampled_from([0, 0, 2 * PAGE]),
    )
    def extend(self, before, new, knob, chunk):
        """The next turn of a chat, or of one that begins: after what was said before."""
        said = self.said[-1 - before] if before < len(self.said) else list(range(30))
        if len(said) + new < CONTEXT - 2 * PAGE:
            self._start([*said, *[4000 + len(said)] * new], knob, chunk)

    def _start(self, tokens, knob, chunk=0, keep=True, other_ends=False, pin=False):
        if len(self.world.live) < ROWS:
            req = self.world.request(tokens, knob, pin=pin)
            self._prefill(req, chunk, keep, other_ends)

    def _prefill(self, req, chunk, keep=True, other_ends=False):
        world, length = self.world, req.seqlen
        done = world.admit(req)
        request = Request.of(req)
        extent, found = request.extent, request.found
        if found is not None:
            assert done >= found.segment.end
            assert found.segment.end == extent.end or request.reuses(req)
        elif extent.compressed:
            assert done <= max(0, extent.scored - request.spec.window)
        while done < length:
            end = min(length, done // PAGE * PAGE + chunk) if chunk else length
            room = world.cache.room_before_cut(req)
            if room is not None:  # what compat's hook does to SGLang's chunks
                end = min(end, done + room)
            if not world.prefill(req, done, end):
                world.give_up(req, done)
                return
            done = end
            self._within_bound(req)
            if done < length:
                world.cache.cache_unfinished_req(req, chunked=True)
                if not keep:
                    world.give_up(req, done)
                    return
                if other_ends and world.live:
                    release_kv_cache(world.live.pop(0), world.cache)
        world.cache.cache_unfinished_req(req)
        world.live.append(req)

    @rule(steps=st.integers(1, 2 * PAGE))
    def decode(self, steps):
        """Decode with SGLang's own allocation; it retracts requests when the pool is full."""
        world = self.world
        for _ in range(steps):
            if any(req.kv_committed_len + 1 >= CONTEXT for req in world.live):
                return
            roomy = world.allocator.available_size() >= ROWS * CONTEXT // 2
            self.waiting += world.decode()
            for req in world.live if roomy else ():
                self._bounded(req)

    @rule(promised=st.sampled_from([0, 3 * PAGE, BLOCKS * PAGE]), once=st.booleans())
    def relieve(self, promised, once):
        """Memory is short: somebody waits (`once`), or the next step needs more than there is."""
        self.world.cache.relieve(self.world.live, promised, once=once)

    @rule(which=st.integers(0, ROWS - 1), insert=st.booleans())
    def finish(self, which, insert):
        """It ends, or is aborted."""
        if which < len(self.world.live):
            req = self.world.live.pop(which)
            if insert:
                self.said.append(tokens_of(req)[: req.kv_committed_len])
            release_kv_cache(req, self.world.cache, is_insert=insert)

    @rule(which=st.integers(0, ROWS - 1))
    def retract(self, which):
        if which < len(self.world.live):
            self.waiting.append(self.world.live.pop(which))
            self.world.retract(self.waiting[-1])

    @rule(chunk=st.sampled_from([0, 2 * PAGE]))
    def resume(self, chunk):
        """The first that was retracted is prefilled again."""
        if self.waiting and len(self.world.live) < ROWS:
            self._prefill(self.waiting.pop(0), chunk)

    @rule(seconds=st.sampled_from([1, 20, 60]))
    def expire(self, seconds):
        """Time passes: what is held for so long no longer is, and the oldest pin is released."""
        self.world.clock += seconds
        if seconds > 1:
            self.world.cache.pins.release_oldest()

    @rule(blocks=st.integers(1, 12))
    def evict(self, blocks):
        locked = self.world.cache.protected_size()
        self.world.cache.evict(EvictParams(num_tokens=blocks * PAGE))
        assert self.world.cache.protected_size() == locked

    @rule(abort=st.sampled_from([False] * 5 + [True]))
    def flush(self, abort):
        """Forget the whole cache; SGLang does while nothing runs."""
        while abort and self.world.live:
            release_kv_cache(self.world.live.pop(), self.world.cache, is_insert=False)
        if not self.world.live:
            self.world.cache.reset()
            self.world.allocator.clear()
            self.world.requests.clear()

    # ------------------------------------------------------------------ what always holds

    @invariant()
    def accounting(self):
        """Every block is free, in the tree or owned by one request, as SGLang counts."""
        Lives.steps += 1
        if hasattr(self, "world"):
            self.world.pool.spans.check_integrity()
            ownership.check(self.world)

    @invariant()
    def contents(self):
        """Every request reads its own KVs: all of them, or the kept ones and what lies around."""
        if hasattr(self, "world") and self.world.live:
            reading.check(self.world)

    def positions(self, req: Req) -> list[list[int]]:
        """The positions whose KVs each layer and head of `req` reads, ascending."""
        return reading.held(self.world, [req]).lists()[0]

    def _within_bound(self, req: Req) -> None:
        """What a bounded prefill promises, when a chunk has its blocks."""
        extent, bounded = Request.of(req).extent, Request.of(req).bounded
        if bounded is None:
            return
        held = -(-req.kv.kv_allocated_len // PAGE) - req.cache_protected_len // PAGE
        if Request.of(req).stored is not None:
            held += Request.of(req).segment.blocks
        assert held <= bounded.blocks_peak <= extent.bound - extent.begin // PAGE
        if extent.cut is None:
            assert bounded.blocks_peak <= extent.segment_blocks + bounded.block // PAGE + 2

    def _bounded(self, req: Req) -> None:
        """What compression in decode promises: at most a tail of so many tokens more."""
        request = Request.of(req)
        spec, segment = request.spec, request.segment
        if request.goes_on and spec.budget is not None and segment is not None:
            mean = req.kv_committed_len - segment.row_begin + segment.begin
            most = -(-spec.budget // PAGE) * PAGE + max(spec.recompress_every, PAGE) + PAGE
            assert mean <= most + spec.question_tokens + segment.begin

    def teardown(self):
        if not hasattr(self, "world"):
            return
        world = self.world
        while world.live:
            release_kv_cache(world.live.pop(), world.cache)
        while world.cache.pins.release_oldest():
            ownership.check(world)
        assert world.allocator.available_size() + world.cache.evictable_size() == world.tokens
        assert world.cache.protected_size() == 0
        assert len(world.requests.free_slots) == ROWS
        assert not world.cache.sharing.holders


class WorldOnGPU(World):
    """With overlap scheduling's streams, and forwards that take their time.

    What the cache does to the pool beside them, and not behind them, shows in `contents`.
    """

    @contextlib.contextmanager
    def forward(self):
        stream, scheduling = self.cache.stream, torch.cuda.current_stream()
        stream.wait_stream(scheduling)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000)  # cycles: half a millisecond
            yield


class LivesOnGPU(Lives):
    @initialize()
    def build(self):
        torch.set_default_device("cuda")
        self.world = WorldOnGPU(BLOCKS, device="cuda", cache_class=UnwaitingCache)
        self.world.cache.stream = torch.cuda.Stream()

    @invariant()
    def contents(self):
        torch.cuda.synchronize()
        super().contents()

    def teardown(self):
        torch.cuda.synchronize()
        super().teardown()
        torch.set_default_device(None)


Lives.TestCase.settings = settings(
    max_examples=int(os.environ.get("KVC_LIVES", LIVES)),
    stateful_step_count=LIFE,
    deadline=None,
)
LivesOnGPU.TestCase.settings = Lives.TestCase.settings


class TestLives(Lives.TestCase):
    def runTest(self):
        before = Lives.steps
        super().runTest()
        assert "KVC_LIVES" in os.environ or Lives.steps - before >= STEPS


TestLivesOnGPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")(
    LivesOnGPU.TestCase
)
