"""The attention backend's two ways to read a compressed request agree."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kvc_kernels.batch import Batch
from kvc_kernels.decode import decode
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_kvc.attention.backend import KvcAttentionBackend
from sgl_kvc.attention.select import VARIABLE, create
from sgl_kvc.attention.support import UnsupportedError, check_layer
from sgl_kvc.pool.arena import ArenaKVPool
from sgl_kvc.pool.segment import Segment
from sgl_kvc.spec import OFF

LAYERS, HEADS, GROUP, DIM, PAGE = 2, 3, 2, 8, 4


def _layer(**options) -> RadixAttention:
    return RadixAttention(
        HEADS * GROUP, DIM, DIM**-0.5, num_kv_heads=HEADS, layer_id=1, **options
    )


def _backend(folder: Path, dtype: torch.dtype) -> KvcAttentionBackend:
    """Of an empty pool."""
    pool = ArenaKVPool(
        20 * PAGE,
        page_size=PAGE,
        dtype=dtype,
        head_num=HEADS,
        head_dim=DIM,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    runner = SimpleNamespace(
        token_to_kv_pool=pool,
        req_to_token_pool=ReqToTokenPool(3, 64, "cpu", False),
        server_args=SimpleNamespace(model_path=str(folder)),  # without a head profile
    )
    return KvcAttentionBackend(runner)


def compress(backend: KvcAttentionBackend, row: int, slots: torch.Tensor, end: int, pages: list):
    """A segment of `slots` ends at position `end` of a row."""
    begin = end - len(slots)
    segment = Segment(0, end, slots, torch.tensor(pages), PAGE, OFF)
    backend.req_to_token[row, begin:end] = slots.int()
    backend.spans.install(row, segment)


def chunk(row: int, total: int, new: int, slots: torch.Tensor) -> SimpleNamespace:
    """A prefill of the last `new` of `total` tokens of one request."""
    return SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        req_pool_indices=torch.tensor([row]),
        seq_lens=torch.tensor([total]),
        extend_seq_lens=torch.tensor([new]),
        extend_seq_lens_cpu=[new],
        extend_prefix_lens_cpu=[total - new],
        out_cache_loc=slots[total - new : total],
        rids=None,
    )


@pytest.fixture
def backend(tmp_path) -> KvcAttentionBackend:
    backend = _backend(tmp_path, torch.float32)
    torch.manual_seed(0)
    backend.pool.arena_k.normal_()
    backend.pool.arena_v.normal_()
    return backend


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("compressed", [False, True])
def test_a_cache_in_eight_bits(tmp_path, dtype, compressed):
    """What is stored is rounded, and nothing else differs from a cache of the rounded numbers."""
    torch.manual_seed(0)
    layer, row, stored = _layer(), 1, 6 * PAGE
    keys, values = torch.randn(2, stored, HEADS, DIM).unbind()
    queries = torch.randn(3, HEADS * GROUP, DIM)
    slots = torch.randperm(20)[: stored // PAGE, None] * PAGE + PAGE + torch.arange(PAGE)
    found = []
    for backend in (_backend(tmp_path, dtype), _backend(tmp_path, torch.float32)):
        pool, rounded = backend.pool, [x.to(dtype).float() for x in (keys, values)]
        pool.set_kv_buffer(layer, slots.flatten(), *rounded)
        backend.req_to_token[row, :stored] = slots.flatten().int()
        if compressed:  # positions 8 to 15: two blocks
            compress(backend, row, slots.flatten()[8:16], 4 * PAGE, [1, 3, 2, 4, 1, 1])
        batch = SimpleNamespace(
            forward_mode=ForwardMode.DECODE,
            req_pool_indices=torch.tensor([row]),
            seq_lens=torch.tensor([stored]),
        )
        backend.init_forward_metadata(batch)
        found.append([backend.attend_decode(queries[:1], layer, batch)])
        batch = chunk(row, stored, len(queries), slots.flatten())
        backend.init_forward_metadata(batch)
        found[-1].append(backend.attend_extend(queries, None, None, layer, batch)[0])
        found[-1] += [x.float() * 2 for x in pool.read(layer.layer_id, slots.flatten())]
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)
    read, _ = _backend(tmp_path, dtype).pool.read(1, slots.flatten())
    assert (read * 2).dtype == torch.float16, "scorers may compute with it"


def test_extend_over_a_compressed_prefix_is_decode(backend):
    """One new token as a batch of prefill (mixed chunks) and as a decode step."""
    row, begin, end, seq_len = 2, 3 * PAGE, 5 * PAGE, 5 * PAGE + 6
    blocks = torch.tensor([7, 2, 11, 4])  # two of the segment, two of the tail
    slots = (blocks[:, None] * PAGE + torch.arange(PAGE)).flatten()
    compress(backend, row, slots[: end - begin], end, [1, 3, 1, 4, 2, 1])
    backend.req_to_token[row, end : begin + len(slots)] = slots[end - begin :].int()
    query = torch.randn(1, HEADS * GROUP, DIM)
    layer = _layer()

    step = Batch(backend.cache, torch.tensor([row]), torch.tensor([seq_len]))
    pages = step.head_pages[layer.layer_id]
    assert pages.owner.bincount().tolist() == [4 + 2, 2 + 2, 1 + 2]
    expected, _ = decode(query, step, layer.layer_id, layer.scaling)
    batch = chunk(row, seq_len, 1, backend.req_to_token[row].long())
    backend.init_forward_metadata(batch)
    got, _ = backend.attend_extend(query, None, None, layer, batch)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("layer", "extras", "reason"),
    [
        (_layer(sliding_window_size=64), {}, "sliding-window"),
        (_layer(sliding_window_size=1), {}, "sliding-window"),
        (_layer(logit_cap=30.0), {}, "soft-capping"),
        (_layer(is_cross_attention=True), {}, "cross attention"),
        (_layer(), {"sinks": torch.zeros(3)}, "sinks"),
    ],
)
def test_attention_that_is_more_than_softmax_is_refused(layer, extras, reason):
    with pytest.raises(UnsupportedError, match=reason):
        check_layer(layer, extras)


@pytest.mark.parametrize(
    ("chosen", "sentence"),
    [("xqa", "--kvc-decode xqa needs a GPU"), ("fast", "must be one of auto, torch, triton, fa2")],
)
def test_decode_choices_that_are_refused(chosen, sentence, monkeypatch):
    monkeypatch.setenv(VARIABLE, chosen)
    with pytest.raises(UnsupportedError, match=sentence):
        create(SimpleNamespace(device="cpu"))
