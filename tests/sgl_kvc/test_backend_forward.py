"""What SGLang calls: attention over what is stored, new KVs in their slots, prompts that are seen.

Three requests of a layer in the middle of a model; attention is compared with the textbook's.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_kvc.attention.backend import KvcAttentionBackend
from sgl_kvc.attention.support import UnsupportedError
from sgl_kvc.cache.request import Request
from sgl_kvc.pool.arena import ArenaKVPool
from sgl_kvc.profile import FILE_NAME
from sgl_kvc.spec import OFF

LAYERS, HEADS, GROUP, DIM, PAGE = 3, 2, 2, 8, 4
START = 4  # this process's first layer
LAYER = START + 2
SCALE = 0.3
#: (row, tokens that were there, new ones) of every request.
CHUNKS = [(3, 6, 5), (1, 0, 3), (2, 9, 1)]


def new_layer(**options) -> RadixAttention:
    return RadixAttention(HEADS * GROUP, DIM, SCALE, num_kv_heads=HEADS, layer_id=LAYER, **options)


class Seen:
    """In the place of a prompt's scores: what it was shown."""

    def __init__(self) -> None:
        self.shown: list[tuple[Any, ...]] = []

    def look(self, *arguments: Any) -> None:
        self.shown.append(arguments)


@pytest.fixture
def backend(tmp_path: Path) -> KvcAttentionBackend:
    """Every row holds 16 tokens of random KVs."""
    pool = ArenaKVPool(
        30 * PAGE, page_size=PAGE, dtype=torch.float32, head_num=HEADS, head_dim=DIM,
        layer_num=LAYERS, start_layer=START, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    runner = SimpleNamespace(
        token_to_kv_pool=pool,
        req_to_token_pool=ReqToTokenPool(5, 16, "cpu", False),
        server_args=SimpleNamespace(model_path=str(tmp_path)),  # without a head profile
    )
    backend = KvcAttentionBackend(runner)
    torch.manual_seed(0)
    pool.arena_k.normal_()
    pool.arena_v.normal_()
    blocks = torch.randperm(30)[:20].view(5, 4) + 1
    backend.req_to_token[:5, :16] = (blocks[..., None] * PAGE + torch.arange(PAGE)).flatten(1).int()
    return backend


def batch_of(backend: KvcAttentionBackend, mode: ForwardMode, chunks: list) -> SimpleNamespace:
    """As SGLang makes it: `chunks` are (row, tokens before, new tokens)."""
    rows, before, new = (list(each) for each in zip(*chunks, strict=True))
    where = [backend.req_to_token[row, b : b + n] for row, b, n in chunks]
    return SimpleNamespace(
        forward_mode=mode,
        req_pool_indices=torch.tensor(rows),
        seq_lens=torch.tensor(before) + torch.tensor(new),
        extend_seq_lens=torch.tensor(new),
        extend_seq_lens_cpu=new,
        extend_prefix_lens_cpu=before,
        out_cache_loc=torch.cat(where).long(),
        rids=[f"r{row}" for row in rows],
    )


def drawn(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of new tokens, as the model hands them over."""
    return tuple(torch.randn(tokens, width * DIM) for width in (HEADS * GROUP, HEADS, HEADS))


def textbook(backend: KvcAttentionBackend, q: torch.Tensor, chunks: list) -> torch.Tensor:
    """[t, Hq * D]: softmax over all tokens up to each query's own, as they are stored."""
    found, first = [], 0
    for row, before, new in chunks:
        slots = backend.req_to_token[row, : before + new].long()
        keys, values = backend.pool.read(LAYER, slots)
        for i in range(new):
            for head in range(HEADS * GROUP):
                query = q[first + i].view(HEADS * GROUP, DIM)[head]
                known = slice(0, before + i + 1)
                weights = (keys[known, head // GROUP] @ query * SCALE).softmax(0)
                found.append(weights @ values[known, head // GROUP])
        first += new
    return torch.stack(found).view(len(q), -1)


def test_prefill(backend):
    """Of requests with and without a prefix; the new KVs lie where they belong, in one layer."""
    batch, (q, k, v) = batch_of(backend, ForwardMode.EXTEND, CHUNKS), drawn(9)
    others = backend.pool.arena_k[:, :2].clone()
    backend.init_forward_metadata(batch)
    out = backend.forward_extend(q, k, v, new_layer(), batch)
    keys, values = backend.pool.read(LAYER, batch.out_cache_loc)
    assert torch.equal(keys.flatten(1), k)
    assert torch.equal(values.flatten(1), v)
    assert torch.equal(backend.pool.arena_k[:, :2], others)
    torch.testing.assert_close(out, textbook(backend, q, CHUNKS), atol=1e-5, rtol=1e-5)


def test_a_forward_that_sglang_has_not_announced(backend):
    batch, (q, k, v) = batch_of(backend, ForwardMode.EXTEND, CHUNKS), drawn(9)
    out = backend.forward_extend(q, k, v, new_layer(), batch)
    torch.testing.assert_close(out, textbook(backend, q, CHUNKS), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.IDLE])
def test_decode(backend, mode):
    chunks = [(row, 9 - row, 1) for row in (4, 1, 2)]
    batch, (q, k, v) = batch_of(backend, mode, chunks), drawn(3)
    backend.init_forward_metadata(batch)
    out = backend.forward_decode(q, k, v, new_layer(), batch)
    keys, values = backend.pool.read(LAYER, batch.out_cache_loc)
    assert torch.equal(keys.flatten(1), k)
    assert torch.equal(values.flatten(1), v)
    torch.testing.assert_close(out, textbook(backend, q, chunks), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("forward", ["forward_decode", "forward_extend"])
def test_what_is_stored_already_is_left(backend, forward):
    chunks = [(1, 5, 1)]
    mode = ForwardMode.DECODE if forward == "forward_decode" else ForwardMode.EXTEND
    batch, (q, k, v) = batch_of(backend, mode, chunks), drawn(1)
    before = backend.pool.arena_k.clone()
    call = getattr(backend, forward)
    backend.init_forward_metadata(batch)
    for out in (
        call(q, k, v, new_layer(), batch, save_kv_cache=False),
        call(q, None, None, new_layer(), batch),
    ):
        assert torch.equal(backend.pool.arena_k, before)
        torch.testing.assert_close(out, textbook(backend, q, chunks), atol=1e-5, rtol=1e-5)
    with pytest.raises(UnsupportedError, match="attention option sinks"):
        call(q, k, v, new_layer(), batch, sinks=torch.zeros(4))
    call(q, k, v, new_layer(), batch, sinks=None)
    assert not torch.equal(backend.pool.arena_k, before)


def test_a_batch_that_was_not_prepared(backend):
    """SGLang runs a few forwards, warm-ups among them, without `init_forward_metadata`."""
    prepared = batch_of(backend, ForwardMode.DECODE, [(1, 3, 1)])
    backend.init_forward_metadata(prepared)
    assert backend._of(prepared) is backend._of(prepared)
    for chunk in (2, 9, 1), (1, 3, 1):
        other, (q, k, v) = batch_of(backend, ForwardMode.DECODE, [chunk]), drawn(1)
        out = backend.forward_decode(q, k, v, new_layer(), other)
        torch.testing.assert_close(out, textbook(backend, q, [chunk]), atol=1e-5, rtol=1e-5)


def test_what_kernels_are_told_of_a_prefill(backend):
    """The device's numbers beside the host's: those on a GPU read the former alone."""
    batch = batch_of(backend, ForwardMode.EXTEND, CHUNKS)
    told = backend._new_batch(batch)
    assert told.request is batch.req_pool_indices
    assert told.seq_len is batch.seq_lens
    assert told.start.tolist() == [0, 5, 8, 9]
    assert told.new == [5, 3, 1]
    assert told.rows == CHUNKS
    batch.extend_seq_lens_cpu = [5, 3]
    with pytest.raises(ValueError, match="shorter"):
        backend._new_batch(batch)


def test_prompts_with_scores_see_their_own_chunk(backend):
    """The second request is none of ours, the first has nothing to score."""
    plain, scored = Request(OFF), Request(OFF)
    plain.row, scored.row, scored.scores = 3, 2, Seen()
    backend.pool.requests = {"r3": plain, "r2": scored, "another": Request(OFF)}
    batch, q = batch_of(backend, ForwardMode.EXTEND, CHUNKS), drawn(9)[0]
    batch.rids = ["r3", "unknown", "r2"]
    assert backend.requests(batch) == [plain, None, scored]
    lse = torch.arange(9.0)
    backend._observe(q, lse, new_layer(), batch)
    backend._observe(q, None, new_layer(), batch)
    (local, queries, kvs, scale, known), unknown = scored.scores.shown
    assert (local, kvs.length, kvs.heads, scale) == (2, 10, HEADS, SCALE)
    assert torch.equal(queries, q[8:])
    assert known.tolist() == [8.0]
    assert unknown[-1] is None
    expected = backend.pool.read(LAYER, backend.req_to_token[2, :10])
    assert all(torch.equal(*pair) for pair in zip((kvs.keys, kvs.values), expected, strict=True))


def test_prefill_shows_prompts_their_queries(backend):
    scored = Request(OFF)
    scored.row, scored.scores = 1, Seen()
    backend.pool.requests = {"r1": scored}
    batch, (q, k, v) = batch_of(backend, ForwardMode.EXTEND, CHUNKS), drawn(9)
    backend.init_forward_metadata(batch)
    backend.forward_extend(q, k, v, new_layer(), batch)
    ((_, queries, kvs, _, _),) = scored.scores.shown
    assert queries.shape == (3, HEADS * GROUP, DIM)
    assert torch.equal(queries.flatten(1), q[5:8])
    assert kvs.length == 3
    assert torch.equal(kvs.keys.flatten(1), k[5:8]), "its new keys are stored before"


def test_a_batch_without_names(backend):
    batch = batch_of(backend, ForwardMode.DECODE, [(1, 3, 1)])
    batch.rids = None
    assert backend.requests(batch) == []


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE])
def test_the_metric_of_new_kvs_begins_at_zero(backend, mode):
    """Of tracked requests alone: slots are used again, with what others left in them."""
    chunks = CHUNKS if mode == ForwardMode.EXTEND else [(row, 5, 1) for row, _, _ in CHUNKS]
    backend.spans.track(3, 2)
    backend.spans.track(2, 1)
    metric = backend.pool.metric
    metric.fill_(7)
    batch = batch_of(backend, mode, chunks)
    backend.init_forward_metadata(batch)
    expected = torch.full_like(metric, 7)
    for row, before, new in chunks:
        for position in range(before, before + new) if row != 1 else ():
            slot = int(backend.req_to_token[row, position])
            expected[slot // PAGE, :, :, slot % PAGE] = 0
    assert torch.equal(metric, expected)


def test_decode_adds_attention_to_the_metric_of_tracked_requests(backend):
    chunks = [(3, 6, 1), (1, 6, 1)]
    batch, (q, k, v) = batch_of(backend, ForwardMode.DECODE, chunks), drawn(2)
    backend.init_forward_metadata(batch)
    backend.forward_decode(q, k, v, new_layer(), batch)
    assert "metric" not in vars(backend.pool), "nobody asked for its memory"
    backend.spans.track(3, 1)
    backend.init_forward_metadata(batch)
    backend.forward_decode(q, k, v, new_layer(), batch)
    slots = backend.req_to_token[3, :7].long()
    mine = backend.pool.metric[slots // PAGE, :, :, slots % PAGE]  # [7, L, H]
    torch.testing.assert_close(mine[:, 2].sum(0), torch.full((HEADS,), float(GROUP)))
    assert backend.pool.metric.sum() == pytest.approx(HEADS * GROUP), "nobody else's"


def test_a_model_without_a_head_profile_is_told_so(backend, tmp_path, caplog):
    """The default policy is the better for one; it lies beside the model or not at all."""
    runner = SimpleNamespace(
        token_to_kv_pool=backend.pool,
        req_to_token_pool=ReqToTokenPool(5, 16, "cpu", False),
        server_args=SimpleNamespace(model_path=str(tmp_path)),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: HEADS),
        ps=SimpleNamespace(attn_tp_rank=0, attn_tp_size=1),
        device="cpu",
    )
    with caplog.at_level("INFO"):
        assert KvcAttentionBackend(runner).pool.facts.head_profile is None
    assert "no head profile" in caplog.text
    caplog.clear()
    (tmp_path / FILE_NAME).write_text(json.dumps({"heads": [[0.5] * HEADS] * LAYERS}))
    with caplog.at_level("INFO"):
        assert KvcAttentionBackend(runner).pool.facts.head_profile.shape == (LAYERS, HEADS)
    assert not caplog.text


def test_what_sglang_asks_of_a_backend(backend):
    assert backend.get_cuda_graph_seq_len_fill_value() == 1
    assert not backend.support_triton()
    assert backend.init_cuda_graph_state(1, 1) is None
    assert backend.pool.facts.head_profile is None
