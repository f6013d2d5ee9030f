"""Span table, allocator and radix cache together, over random lives of requests."""

from __future__ import annotations

import contextlib
import os

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kvc_kernels.batch import Batch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from sgl_kvc.cache.request import Request
from tests import tiny_models
from tests.sgl_kvc.knobs import KNOBS
from tests.sgl_kvc.lives import CONTEXT, HEADS, LAYERS, PAGE, ROWS, World, kv, tokens_of
from tests.waits import UnwaitingCache

BLOCKS = 40


@pytest.fixture(scope="module", autouse=True)
def server_args(tmp_path_factory):
    model = tiny_models.write(tmp_path_factory.mktemp("model"))
    set_global_server_args_for_scheduler(ServerArgs(model_path=str(model), device="cpu"))


class Lives(RuleBasedStateMachine):
    """What can happen to requests, and what always holds."""

    @initialize(blocks=st.sampled_from([BLOCKS, 24]))
    def build(self, blocks=BLOCKS):
        self.world = World(blocks)

    # ------------------------------------------------------------------- what can happen

    @rule(
        family=st.integers(0, 1),
        shared=st.integers(1, 60),
        own=st.integers(0, 12),
        knob=st.sampled_from(KNOBS),
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
        self._prefill(tokens, knob, chunk, keep, other_ends)

    @rule(
        document=st.sampled_from([(0, 24), (0, 40), (1, 24)]),
        question=st.sampled_from([[7], [8] * 9]),
        knob=st.sampled_from([each for each in KNOBS if each and "question_tokens" in each]),
        chunk=st.sampled_from([0, 0, PAGE]),
        keep=st.booleans(),
        other_ends=st.booleans(),
    )
    def ask(self, document, question, knob, chunk, keep, other_ends):
        """A question about a document: requests like it share a segment."""
        tokens = [document[0] * 1000 + i for i in range(document[1])] + question
        knob = knob | {"question_tokens": len(question)}
        self._prefill(tokens, knob, chunk, keep, other_ends)

    def _prefill(self, tokens, knob, chunk, keep, other_ends):
        world = self.world
        if len(world.live) == ROWS:
            return
        req = world.request(tokens, knob)
        done = world.admit(req)
        extent, found = Request.of(req).extent, Request.of(req).found
        if found is not None:
            assert done >= found.segment.end == extent.end
        elif extent.compressed:
            assert done <= max(0, extent.scored - Request.of(req).spec.window)
        while done < len(tokens):
            end = min(len(tokens), done // PAGE * PAGE + chunk) if chunk else len(tokens)
            room = world.cache.room_before_cut(req)
            if room is not None:  # what compat's hook does to SGLang's chunks
                end = min(end, done + room)
            if not world.prefill(req, done, end):
                world.give_up(req, done)
                return
            done = end
            self._within_bound(req)
            if done < len(tokens):
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
        for _ in range(steps):
            if any(req.kv_committed_len + 1 >= CONTEXT for req in self.world.live):
                return
            roomy = self.world.allocator.available_size() >= ROWS * CONTEXT // 2
            self.world.decode()
            for req in self.world.live if roomy else ():
                self._bounded(req)

    @rule(promised=st.sampled_from([0, PAGE, 3 * PAGE]))
    def relieve(self, promised):
        """Somebody waits for memory."""
        self.world.cache.relieve(self.world.live, promised, once=True)

    @rule(which=st.integers(0, ROWS - 1), insert=st.booleans())
    def finish(self, which, insert):
        if which < len(self.world.live):
            release_kv_cache(self.world.live.pop(which), self.world.cache, is_insert=insert)

    @rule()
    def flush(self):
        if not self.world.live:
            self.world.cache.reset()
            self.world.allocator.clear()
            self.world.requests.clear()

    # ------------------------------------------------------------------ what always holds

    @invariant()
    def accounting(self):
        """Every block is free, in the tree or owned by one request, as SGLang counts."""
        if not hasattr(self, "world"):
            return
        world, cache = self.world, self.world.cache
        world.pool.spans.check_integrity()
        uncached = sum(
            -(-req.kv.kv_allocated_len // PAGE) * PAGE - req.cache_protected_len
            for req in world.live
        )
        free = world.allocator.available_size()
        counted = free + cache.evictable_size() + cache.protected_size() + uncached
        assert counted == world.tokens
        tree = cache.all_values_flatten()[::PAGE] if cache.total_size() else []
        blocks = world.allocator.free_pages.tolist() + [int(slot) // PAGE for slot in tree]
        for req in world.live:
            row = world.requests.req_to_token[req.req_pool_idx]
            own = row[req.cache_protected_len : req.kv.kv_allocated_len : PAGE]
            blocks += (own // PAGE).tolist()
        assert len(set(blocks)) == len(blocks) == world.tokens // PAGE

    @invariant()
    def contents(self):
        """Every request reads its own KVs: all of them, or the kept ones and what lies around."""
        for req in self.world.live if hasattr(self, "world") else ():
            positions = self.positions(req)
            kept = [len(each) for each in positions]
            request, length = Request.of(req), req.kv_committed_len
            segment, report = request.segment, request.report.to_json()
            if segment is None:
                assert set(kept) == {length}
                continue
            always = {*range(segment.begin), *range(segment.end, length)}
            assert all(always <= set(each) for each in positions)
            held = len(always) + len(segment.slots)
            assert sum(kept) == held * LAYERS * HEADS
            if report.get("decode", {}).get("recompressed"):
                continue
            decoded = length - report["prompt_tokens"]
            assert report["kept_per_head"]["min"] == min(kept) - decoded
            assert report["kept_per_head"]["max"] == max(kept) - decoded
            assert report["blocks"]["shared"] == request.extent.begin // PAGE
            if segment.end < request.extent.end:
                continue  # there was no room to compress a chat's turn again
            assert segment.blocks == request.extent.segment_blocks
            self._protected(request, positions, length)

    def positions(self, req: Req) -> list[list[int]]:
        """The positions whose KVs each layer and head of `req` reads, ascending."""
        world, tokens = self.world, tokens_of(req)[: req.kv_committed_len]
        expected = kv(tokens)
        batch = Batch(
            world.pool.cache, torch.tensor([req.req_pool_idx]), torch.tensor([len(tokens)])
        )
        found = []
        for layer, pages in enumerate(batch.head_pages):
            for head in range(HEADS):
                mine = pages.owner == head
                held, mine = ~pages.absent[mine], pages.page[mine]
                keys, values = world.pool.flat_k[mine][held], world.pool.flat_v[mine][held]
                assert torch.equal(keys, -values)
                same = (keys[:, None] == expected[:, layer, head]).all(-1)
                assert bool(same.any(1).all()), "a KV of somebody else"
                found.append(same.int().argmax(1).tolist())
                assert found[-1] == sorted(set(found[-1]))
        return found

    def _protected(self, request: Request, positions: list[list[int]], length: int) -> None:
        """Sinks and recent positions are kept where the budget holds them."""
        extent, spec, segment = request.extent, request.spec, request.segment
        recent = min(spec.recent, len(segment.slots) // 4)
        sinks = max(0, spec.sinks - extent.begin)
        for each in positions:
            in_segment = len(each) - extent.begin - (length - extent.end)
            if in_segment >= sinks + recent:
                last = range(max(extent.begin, extent.scored - recent), extent.end)
                assert set(last) <= set(each)
                assert set(range(extent.begin, extent.begin + sinks)) <= set(each)

    def _within_bound(self, req: Req) -> None:
        """What a bounded prefill promises, when a chunk has its blocks."""
        extent, bounded = Request.of(req).extent, Request.of(req).bounded
        if bounded is None:
            return
        held = -(-req.kv.kv_allocated_len // PAGE) - req.cache_protected_len // PAGE
        if Request.of(req).stored is not None:
            held += Request.of(req).segment.blocks
        assert held <= bounded.blocks_peak <= extent.bound - extent.begin // PAGE
        most = extent.segment_blocks + bounded.block // PAGE + 2
        if extent.cut is None:
            assert bounded.blocks_peak <= most

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
    max_examples=int(os.environ.get("KVC_LIVES", "170")),  # `make mutants` has less time
    stateful_step_count=30,
    deadline=None,
)
TestLives = Lives.TestCase
LivesOnGPU.TestCase.settings = Lives.TestCase.settings
TestLivesOnGPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")(
    LivesOnGPU.TestCase
)
