"""Requests' lives without a model: SGLang's own requests, pools, tree and batches.

Every KV is a number that follows from its tokens so far, its layer and its head, so any
misplaced one shows.
"""

from __future__ import annotations

import contextlib
from array import array

import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.schedule_batch import Req, ReqKvInfo, ScheduleBatch
from sglang.srt.mem_cache.allocation import alloc_for_decode
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import evict_from_tree_cache, release_kv_cache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.runtime_context import get_server_args
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sgl_kvc.cache.radix import CompressingRadixCache
from sgl_kvc.cache.request import Request
from sgl_kvc.compat.scheduling import compress_due, relieve_decode
from sgl_kvc.platform.allocator import TorchPagedAllocator
from sgl_kvc.policy.facts import ModelFacts
from sgl_kvc.policy.kvs import PromptKVs
from sgl_kvc.pool.arena import ArenaKVPool

LAYERS, HEADS, GROUP, DIM, PAGE = 2, 3, 2, 4, 4
ROWS, CONTEXT = 6, 120
_NUMBERS: dict[tuple[int, int], int] = {}  # number of a prefix, next token -> a number of its own
#: int64, the position of the last token of every prefix, by its number. So many that float32 holds
#: them and 64ths.
NUMBERED = torch.full((1 << 18,), CONTEXT - 1)


def numbers(tokens: list[int]) -> list[int]:
    """A number for every prefix of `tokens`."""
    found, last = [], -1
    for position, token in enumerate(tokens):
        number = _NUMBERS.get((last, token))
        if number is None:
            number = _NUMBERS[last, token] = len(_NUMBERS)
            NUMBERED[number] = position
        found.append(number)
        last = number
    return found


def kv(tokens: list[int]) -> torch.Tensor:
    """[len(tokens), LAYERS, HEADS, DIM]: a fingerprint of every prefix, layer and head."""
    index = torch.arange(LAYERS * HEADS * DIM).view(1, LAYERS, HEADS, DIM)
    return torch.tensor(numbers(tokens), dtype=torch.float32).view(-1, 1, 1, 1) + index / 64


def tokens_of(req: Req) -> list[int]:
    """Prompt and output."""
    return [*req.origin_input_ids, *req.output_ids]


class World:
    """A pool of `blocks` blocks, its radix cache, and the requests that run.

    Attributes
    ----------
    live : requests that decode, oldest first.
    """

    def __init__(
        self,
        blocks: int,
        *,
        device: str = "cpu",
        cache_class: type[CompressingRadixCache] = CompressingRadixCache,
    ):
        self.tokens, self.device = blocks * PAGE, device
        self.pool = ArenaKVPool(
            self.tokens,
            page_size=PAGE,
            dtype=torch.float32,
            head_num=HEADS,
            head_dim=DIM,
            layer_num=LAYERS,
            device=device,
            enable_memory_saver=False,
        )
        angles = torch.arange(CONTEXT)[:, None] / torch.tensor([1.0, 10.0])
        self.pool.facts = ModelFacts(cos_sin=torch.cat([angles.cos(), angles.sin()], -1))
        self.requests = ReqToTokenPool(ROWS, CONTEXT, device, False)
        self.pool.bind(self.requests)
        self.allocator = TorchPagedAllocator(
            self.tokens, PAGE, torch.float32, device, self.pool, need_sort=False
        )
        self.cache = cache_class(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.requests,
                token_to_kv_pool_allocator=self.allocator,
                page_size=PAGE,
            )
        )
        self.model_config = ModelConfig.from_server_args(get_server_args())
        self.live: list[Req] = []
        self.started = 0
        self.clock = 0.0  # seconds, when requests arrive

    def forward(self) -> contextlib.AbstractContextManager:
        """Around what a forward does to the pool."""
        return contextlib.nullcontext()

    def request(
        self, tokens: list[int], knob: dict | None, *, pin: bool = False, **sampling
    ) -> Req:
        """A request that waits; with `pin` it is there to pin a document."""
        self.started += 1
        custom = knob and {"kv_compression": knob, "kv_cache_time": self.clock}
        if custom and pin:
            custom["kv_cache_pin"] = {"expires": self.clock + 60}
        params = SamplingParams(custom_params=custom, **sampling)
        params.max_new_tokens = 128 if "max_new_tokens" not in sampling else params.max_new_tokens
        return Req(f"r{self.started}", "", array("q", tokens), params)

    def admit(self, req: Req) -> int:
        """Match `req` against the cache and lock what it found: tokens it begins with."""
        req.init_next_round_input(self.cache)
        self.cache.inc_lock_ref(req.last_node)
        return len(req.prefix_indices)

    def prefill(self, req: Req, begin: int, end: int) -> bool:
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
        self.cache.begin_prefill(req)
        with self.forward():
            self.write(tokens_of(req)[:end], slots, begin)
            scores = Request.of(req).scores
            for layer in range(LAYERS) if scores is not None else ():
                queries = torch.randn(end - begin, HEADS * GROUP, DIM)
                keys, values = self.pool.read(layer, row[:end])
                seen = scores.look(layer, queries, PromptKVs.of(keys / 8191, values), 1.0)
                if seen is not None:
                    scores.score(seen)
            if self.pool.spans.tracks_attention(req.req_pool_idx):
                self.pool.reset_metric(slots)
        return True

    def decode(self) -> list[Req]:
        """One step of all that run, by SGLang's own checks and allocation.

        Returns
        -------
        Those it had to retract, the last started first.
        """
        retracted = []
        while self.live and not relieve_decode(ScheduleBatch.check_decode_mem, self._batch()):
            retracted.append(self.live[-1])
            self.retract(self.live.pop())
        if not self.live:
            return retracted
        batch = self._batch()
        compress_due(batch)
        slots = alloc_for_decode(batch, token_per_req=1)  # raises where there is no room
        for req, slot in zip(self.live, slots, strict=True):
            length = req.kv_committed_len
            req.output_ids.append(3000 + length)
            with self.forward():
                self.write(tokens_of(req)[: length + 1], slot[None], length)
            req.kv_committed_len += 1
            if self.pool.spans.tracks_attention(req.req_pool_idx):  # what the backend does
                self.pool.reset_metric(slot[None])
        if self.pool.spans.tracks_attention():
            self.pool.metric += torch.rand_like(self.pool.metric) * 0.1
        return retracted

    def retract(self, req: Req) -> None:
        """Take the memory of `req`, as SGLang does where the pool is full."""
        release_kv_cache(req, self.cache, is_insert=False)
        req.reset_for_retract()

    def give_up(self, req: Req, done: int) -> None:
        """End `req` in the middle of its prefill, after `done` tokens."""
        if req.req_pool_idx is None:
            self.cache.dec_lock_ref(req.last_node)
            return
        if req.kv.kv_allocated_len == 0:
            req.kv.kv_allocated_len = done
        req.kv_committed_len = req.kv.kv_allocated_len
        row = self.requests.req_to_token[req.req_pool_idx]
        row[:done] = req.prefix_indices[:done].to(torch.int32)
        release_kv_cache(req, self.cache, is_insert=False)

    def write(self, tokens: list[int], slots: torch.Tensor, begin: int) -> None:
        """Store the KVs of `tokens` from `begin` on."""
        content = kv(tokens)[begin:]
        for layer in range(LAYERS):
            self.pool._store_kv_layer(layer, slots, content[:, layer], -content[:, layer])

    def _batch(self) -> ScheduleBatch:
        batch = ScheduleBatch.init_new(
            self.live,
            self.requests,
            self.allocator,
            self.cache,
            self.model_config,
            enable_overlap=False,
            spec_algorithm=SpeculativeAlgorithm.NONE,
        )
        batch.req_pool_indices = torch.tensor([req.req_pool_idx for req in self.live])
        batch.seq_lens_cpu = torch.tensor([req.kv_committed_len for req in self.live])
        batch.seq_lens = batch.seq_lens_cpu.to(self.device)
        return batch
