"""Segment table, allocator and radix cache together, over random lives of requests.

SGLang's own requests, pools and tree; only the model is left out: every KV is a number
that follows from its tokens so far, its layer and its head, so any misplaced one shows.
"""

from __future__ import annotations

import contextlib
from array import array

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kvc_kernels.pages import Rows, head_pages
from sglang.srt.managers.schedule_batch import Req, ReqKvInfo
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import evict_from_tree_cache, release_kv_cache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from sgl_kvc.cache.radix import CompressingRadixCache, spec_of
from sgl_kvc.platform.allocator import TorchPagedAllocator
from sgl_kvc.pool.arena import ArenaKVPool
from sgl_kvc.report import of as report_of
from sgl_kvc.spec import Extent
from tests import tiny_models
from tests.waits import UnwaitingCache

LAYERS, HEADS, GROUP, DIM, PAGE = 2, 3, 2, 4, 4
TOKENS = 40 * PAGE
CONTEXT = 120
KNOBS = [
    None,
    {"rate": 1},
    {"rate": 1.5, "min_tokens": 0},
    {"rate": 4, "min_tokens": 0},
    {"rate": 64, "min_tokens": 0, "window": 3, "sinks": 1},
    {"rate": 4, "min_tokens": 0, "policy": "snapkv"},
    {"budget": 9, "min_tokens": 0, "policy": "random"},
    {"rate": 3, "min_tokens": 0, "policy": "streaming-llm"},
    {"rate": 4, "min_tokens": 0, "question_tokens": 7, "recent": 3},
    {"rate": 2, "min_tokens": 0, "question_tokens": 30, "policy": "random"},
    {"rate": 3, "min_tokens": 0, "policy": "h2o", "recent": 2},
    {"budget": 12, "recompress_every": 6, "recent": 3, "sinks": 2},
    {"rate": 3, "recompress_every": 1, "recent": 0, "policy": "snapkv", "window": 2},
    {"budget": 8, "recompress_every": 9, "question_tokens": 5},
    {"budget": 12, "recompress_every": 5, "policy": "h2o", "recent": 2},
    {"rate": 3, "recompress_every": 4, "policy": "streaming-llm"},
]


@pytest.fixture(scope="module", autouse=True)
def server_args(tmp_path_factory):
    model = tiny_models.write(tmp_path_factory.mktemp("model"))
    set_global_server_args_for_scheduler(ServerArgs(model_path=str(model), device="cpu"))

_PRINTS: dict[int, int] = {}  # prefix -> a number of its own


def kv(tokens: list[int]) -> torch.Tensor:
    """[len(tokens), LAYERS, HEADS, DIM]: a fingerprint of every prefix, layer and head."""
    prefix, prints = (), []
    for token in tokens:
        prefix = hash((prefix, token))
        prints.append(_PRINTS.setdefault(prefix, len(_PRINTS)))
    index = torch.arange(LAYERS * HEADS * DIM).view(1, LAYERS, HEADS, DIM)
    return torch.tensor(prints, dtype=torch.float32).view(-1, 1, 1, 1) + index / 64


class Lives(RuleBasedStateMachine):
    device = "cpu"
    cache_class = CompressingRadixCache

    def forward(self) -> contextlib.AbstractContextManager:
        """Around what a forward does to the pool."""
        return contextlib.nullcontext()

    @initialize()
    def build(self):
        self.pool = ArenaKVPool(
            TOKENS,
            page_size=PAGE,
            dtype=torch.float32,
            head_num=HEADS,
            head_dim=DIM,
            layer_num=LAYERS,
            device=self.device,
            enable_memory_saver=False,
        )
        self.requests = ReqToTokenPool(6, CONTEXT, self.device, False)
        self.segments = self.pool.bind(self.requests)
        self.allocator = TorchPagedAllocator(
            TOKENS, PAGE, torch.float32, self.device, self.pool, need_sort=False
        )
        self.cache = self.cache_class(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.requests,
                token_to_kv_pool_allocator=self.allocator,
                page_size=PAGE,
            )
        )
        self.live: list[Req] = []
        self.started = 0

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
        if len(self.live) == 6:
            return
        self.started += 1
        tokens = [family * 1000 + i for i in range(shared)]
        tokens += [2000 + self.started] * own
        params = SamplingParams(custom_params=knob and {"kv_compression": knob})
        req = Req(f"r{self.started}", "", array("q", tokens), params)
        done = 0
        while done < len(tokens):
            if not done:
                req.init_next_round_input(self.cache)
                self.cache.inc_lock_ref(req.last_node)
                done = len(req.prefix_indices)
                spec = spec_of(req)
                if Extent.of(spec, len(tokens), PAGE).compressed:
                    assert done <= max(0, len(tokens) - spec.window)
            end = min(len(tokens), done // PAGE * PAGE + chunk) if chunk else len(tokens)
            room = self.cache.room_before_question(req)
            if room is not None:  # what compat's hook does to SGLang's chunks
                end = min(end, done + room)
            if not self._prefill(req, done, end):
                self._release(req, done)
                return
            done = end
            if done < len(tokens):
                self.cache.cache_unfinished_req(req, chunked=True)
                if not keep:
                    self._release(req, done)
                    return
                if other_ends and self.live:
                    release_kv_cache(self.live.pop(0), self.cache)
        self.cache.cache_unfinished_req(req)
        self.live.append(req)

    @rule(which=st.integers(0, 5), steps=st.integers(1, 2 * PAGE))
    def decode(self, which, steps):
        """Decode some tokens; retract the request when the pool is full."""
        if which >= len(self.live):
            return
        req = self.live[which]
        for _ in range(steps):
            seq = req.kv_committed_len
            if seq + 1 >= CONTEXT:
                return
            row = self.requests.req_to_token[req.req_pool_idx]
            room = self.allocator.available_size() + self.cache.evictable_size()
            self.cache.compress_due(req)
            if room >= CONTEXT:  # for any segment
                self._bounded(req)
            evict_from_tree_cache(self.cache, PAGE)
            slot = self.allocator.alloc_decode(
                torch.tensor([seq + 1]), torch.tensor([seq + 1]), row[seq - 1 : seq].long()
            )
            if slot is None:
                self.live.remove(req)
                release_kv_cache(req, self.cache, is_insert=False)
                req.reset_for_retract()
                return
            row[seq] = slot[0]
            req.output_ids.append(3000 + seq)
            with self.forward():
                self._write(self._tokens(req)[: seq + 1], slot, seq)
            req.kv_committed_len = req.kv.kv_allocated_len = seq + 1
            if self.segments.counts(req.req_pool_idx):  # what the backend does
                self.pool.reset_metric(slot)
                self.pool.metric += torch.rand_like(self.pool.metric) * 0.1

    @rule(which=st.integers(0, 5), insert=st.booleans())
    def finish(self, which, insert):
        if which < len(self.live):
            release_kv_cache(self.live.pop(which), self.cache, is_insert=insert)

    @rule()
    def flush(self):
        if not self.live:
            self.cache.reset()
            self.allocator.clear()
            self.requests.clear()

    # ------------------------------------------------------------------ what always holds

    @invariant()
    def accounting(self):
        """Every block is free, in the tree or owned by one request, as SGLang counts."""
        if not hasattr(self, "cache"):
            return
        self.segments.check_integrity(PAGE)
        uncached = sum(
            -(-req.kv.kv_allocated_len // PAGE) * PAGE - req.cache_protected_len
            for req in self.live
        )
        counted = (
            self.allocator.available_size()
            + self.cache.evictable_size()
            + self.cache.protected_size()
            + uncached
        )
        assert counted == TOKENS
        free = self.allocator.free_pages.tolist()
        tree = self.cache.all_values_flatten()[::PAGE] if self.cache.total_size() else []
        in_tree = [int(slot) // PAGE for slot in tree]
        owned = []
        for req in self.live:
            row = self.requests.req_to_token[req.req_pool_idx]
            own = row[req.cache_protected_len : req.kv.kv_allocated_len : PAGE]
            owned += (own // PAGE).tolist()
        assert len(set(free + in_tree + owned)) == len(free + in_tree + owned) == TOKENS // PAGE

    @invariant()
    def contents(self):
        """Every request reads its own KVs: all of them, or the kept ones and the tail."""
        for req in getattr(self, "live", []):
            tokens = self._tokens(req)[: req.kv_committed_len]
            expected = kv(tokens)
            state = self.segments
            index = torch.tensor([req.req_pool_idx])
            rows = Rows(
                self.requests.req_to_token,
                index,
                torch.tensor([len(tokens)]),
                state.segment_begin[index],
                state.tail_begin[index],
                state.page_start[index],
            )
            tail_begin = int(state.tail_begin[index])
            report = report_of(req)
            kept = []
            by_layer = head_pages(rows, LAYERS, HEADS, PAGE)
            for layer in range(LAYERS):
                pages = by_layer[layer]
                for head in range(HEADS):
                    mine = (pages.owner == head).nonzero().flatten().tolist()
                    got = [self.pool.flat_k[pages.page[i], : pages.length[i]] for i in mine]
                    values = [self.pool.flat_v[pages.page[i], : pages.length[i]] for i in mine]
                    got = torch.cat(got)
                    assert torch.equal(got, -torch.cat(values))
                    all_keys = expected[:, layer, head]
                    positions = [
                        int((all_keys == key).all(-1).nonzero()[0]) for key in got
                    ]
                    assert positions == sorted(set(positions))
                    assert set(range(tail_begin, len(tokens))) <= set(positions)
                    spec, in_segment = spec_of(req), len(positions) - (len(tokens) - tail_begin)
                    quarter = (tail_begin - req.cache_protected_len) // 4
                    recent = min(spec.recent, quarter)
                    if tail_begin and in_segment >= spec.sinks + recent:
                        end = tail_begin if spec.question_tokens else report["prompt_tokens"]
                        if not report.get("decode"):
                            assert set(range(end - recent, tail_begin)) <= set(positions)
                        assert set(range(spec.sinks)) <= set(positions)
                    kept.append(len(positions))
            if spec_of(req).recompress_every and not report["skipped"]:
                mean = len(tokens) - req.cache_protected_len
                assert sum(kept) == mean * len(kept) or not state.tail(req.req_pool_idx)
            elif tail_begin:
                decoded = len(tokens) - report["prompt_tokens"]
                assert report["kept_per_head"]["min"] == min(kept) - decoded
                assert report["kept_per_head"]["max"] == max(kept) - decoded
                segment = (tail_begin - req.cache_protected_len) // PAGE
                extent = Extent.of(spec, report["prompt_tokens"], PAGE)
                assert segment == extent.segment_blocks
                assert sum(kept) == LAYERS * HEADS * (segment * PAGE + len(tokens) - tail_begin)
            else:
                assert set(kept) == {len(tokens)}

    def _bounded(self, req) -> None:
        """What compression during decode promises: at most a tail of so many tokens more."""
        spec, every = spec_of(req), spec_of(req).recompress_every
        if every and spec.budget is not None and not report_of(req)["skipped"]:
            mean = req.kv_committed_len - (self.segments.begin(req.req_pool_idx) or 0)
            most = -(-spec.budget // PAGE) * PAGE + max(every, PAGE) + PAGE
            assert mean <= most + spec.question_tokens

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        while self.live:
            release_kv_cache(self.live.pop(), self.cache)
        assert self.allocator.available_size() + self.cache.evictable_size() == TOKENS
        assert self.cache.protected_size() == 0
        assert len(self.requests.free_slots) == 6
        assert not self.cache.plans

    # --------------------------------------------------------------------------- helpers

    def _tokens(self, req) -> list[int]:
        return [*req.origin_input_ids, *req.output_ids]

    def _prefill(self, req, begin: int, end: int) -> bool:
        """Allocate and write positions [begin, end); False when the pool is too full."""
        if self.requests.alloc([req]) is None:
            return False
        if req.kv is None:
            req.kv = ReqKvInfo(kv_allocated_len=begin, swa_evicted_seqlen=0)
        evict_from_tree_cache(self.cache, end - begin + PAGE)
        last = req.prefix_indices[-1:] if begin else torch.tensor([-1])
        lens = torch.tensor([begin]), torch.tensor([end])
        slots = self.allocator.alloc_extend(
            lens[0], lens[0], lens[1], lens[1], last.long(), end - begin
        )
        if slots is None:
            return False
        row = self.requests.req_to_token[req.req_pool_idx]
        row[:begin] = req.prefix_indices.to(row.dtype)
        row[begin:end] = slots.to(row.dtype)
        req.set_extend_range(begin, end)
        req.kv_committed_len = req.kv.kv_allocated_len = end
        self.cache.plan_request(req)
        with self.forward():
            self._write(self._tokens(req)[:end], slots, begin)
            plan = self.cache.plans.get(req.req_pool_idx)
            for layer in range(LAYERS) if plan is not None else ():
                queries = torch.randn(end - begin, HEADS * GROUP, DIM)
                keys, values = self.pool.read(layer, row[:end])
                cached = keys / 8191, values
                plan.observe(layer, queries, end, lambda cached=cached: cached, 1.0)
        return True

    def _write(self, tokens: list[int], slots: torch.Tensor, begin: int) -> None:
        content = kv(tokens)[begin:]
        for layer in range(LAYERS):
            self.pool._store_kv_layer(layer, slots, content[:, layer], -content[:, layer])

    def _release(self, req, done: int) -> None:
        """Give up a request in the middle of its prefill."""
        if req.req_pool_idx is None:
            self.cache.dec_lock_ref(req.last_node)
        else:
            if req.kv.kv_allocated_len == 0:
                req.kv.kv_allocated_len = done
            req.kv_committed_len = req.kv.kv_allocated_len
            self.requests.req_to_token[req.req_pool_idx, :done] = req.prefix_indices[:done].to(
                torch.int32
            )
            release_kv_cache(req, self.cache, is_insert=False)


class LivesOnGPU(Lives):
    """The same with overlap scheduling's streams, and forwards that take their time.

    What the cache does to the pool beside them, and not behind them, shows in `contents`.
    """

    device = "cuda"
    cache_class = UnwaitingCache

    @contextlib.contextmanager
    def forward(self):
        stream, scheduling = self.cache.stream, torch.cuda.current_stream()
        stream.wait_stream(scheduling)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000)  # cycles: half a millisecond
            yield

    @initialize()
    def build(self):
        torch.set_default_device("cuda")
        super().build()
        self.cache.stream = torch.cuda.Stream()

    @invariant()
    def contents(self):
        torch.cuda.synchronize()
        super().contents()

    def teardown(self):
        torch.cuda.synchronize()
        super().teardown()
        torch.set_default_device(None)


Lives.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestLives = Lives.TestCase
LivesOnGPU.TestCase.settings = Lives.TestCase.settings
TestLivesOnGPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")(
    LivesOnGPU.TestCase
)


@pytest.mark.parametrize("while_the_question_is_read", [True, False])
def test_compressed_as_soon_as_there_is_room(while_the_question_is_read):
    """The pool is full when the context was read, until another request ends."""
    lives = Lives()
    lives.build()
    lives.start(family=0, shared=90, own=0, knob=None, chunk=0, keep=True)
    knob = {"rate": 1.5, "min_tokens": 0, "question_tokens": 7, "recompress_every": 8}
    lives.start(1, 60, 0, knob, 0, keep=True, other_ends=while_the_question_is_read)
    req = lives.live[-1]
    if not while_the_question_is_read:
        assert req.kvc_report["skipped"] == "no free blocks to compress into"
        lives.decode(which=1, steps=2)
        assert req.kvc_report["skipped"] == "no free blocks to compress into"
        lives.finish(which=0, insert=False)
    lives.decode(which=0, steps=12)
    assert req.kvc_report["skipped"] is None
    assert req.kvc_report["decode"]["recompressed"] >= 1
    lives.accounting()
    lives.contents()
    lives.teardown()


def test_streaming_llm_slides_its_window_in_decode():
    """Sinks and the newest keys, of every head; attention has no say."""
    lives = Lives()
    lives.build()
    knob = {"budget": 16, "policy": "streaming-llm", "recompress_every": 8, "min_tokens": 0}
    lives.start(0, 60, 0, knob, 0, keep=True)
    lives.decode(which=0, steps=40)
    req = lives.live[0]
    assert req.kvc_report["decode"]["recompressed"] >= 3
    tokens, row = lives._tokens(req)[: req.kv_committed_len], req.req_pool_idx
    state, index = lives.segments, torch.tensor([row])
    rows = Rows(
        lives.requests.req_to_token, index, torch.tensor([len(tokens)]),
        state.segment_begin[index], state.tail_begin[index], state.page_start[index],
    )  # fmt: skip
    for layer, pages in enumerate(head_pages(rows, LAYERS, HEADS, PAGE)[:LAYERS]):
        for head in range(HEADS):
            mine = (pages.owner == head).nonzero().flatten().tolist()
            held = [lives.pool.flat_k[pages.page[i], : pages.length[i]] for i in mine]
            wanted = kv(tokens)[:, layer, head]
            kept = [int((wanted == key).all(-1).nonzero()[0]) for key in torch.cat(held)]
            newest = len(kept) - 4
            assert kept == [*range(4), *range(len(tokens) - newest, len(tokens))]
    lives.teardown()
