"""The pool: one memory, seen by block, by head page and, as SGLang does, by layer."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

from sgl_kvc.policy.facts import ModelFacts
from sgl_kvc.pool.arena import ArenaKVPool

BLOCKS, LAYERS, HEADS, PAGE, DIM, VALUE_DIM = 6, 3, 2, 4, 8, 16


def new_pool(size: int = BLOCKS * PAGE, dtype: torch.dtype = torch.bfloat16) -> ArenaKVPool:
    return ArenaKVPool(
        size, page_size=PAGE, dtype=dtype, head_num=HEADS, head_dim=DIM, v_head_dim=VALUE_DIM,
        layer_num=LAYERS, device="cpu", enable_memory_saver=False,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_one_memory_in_three_views(dtype):
    """Beside the blocks that requests get there is SGLang's block 0, for padding."""
    pool = new_pool(dtype=dtype)
    blocks = BLOCKS + 1
    assert pool.arena_k.shape == (blocks, LAYERS, HEADS, PAGE, DIM)
    assert pool.arena_v.shape == (blocks, LAYERS, HEADS, PAGE, VALUE_DIM)
    assert not pool.arena_k.view(torch.uint8).any()
    assert not pool.arena_v.view(torch.uint8).any()
    assert pool.flat_k.shape == (blocks * LAYERS * HEADS, PAGE, DIM)
    assert pool.flat_v.shape == (blocks * LAYERS * HEADS, PAGE, VALUE_DIM)
    assert pool.flat_k.dtype == pool.flat_v.dtype == dtype
    assert [each.shape for each in pool.k_buffer] == [(blocks, HEADS, PAGE, DIM)] * LAYERS
    assert [each.shape for each in pool.v_buffer] == [(blocks, HEADS, PAGE, VALUE_DIM)] * LAYERS
    block, layer, head = 5, 1, 1
    pool.k_buffer[layer][block, head] = 1
    pool.v_buffer[layer][block, head] = 2
    nth = (block * LAYERS + layer) * HEADS + head
    for arena, flat in ((pool.arena_k, pool.flat_k), (pool.arena_v, pool.flat_v)):
        assert arena[block, layer, head].bool().all()
        assert arena.bool().sum() == arena[block, layer, head].numel()
        assert torch.equal(flat[nth].view(arena.dtype), arena[block, layer, head])
    assert pool.block_bytes == LAYERS * HEADS * PAGE * (DIM + VALUE_DIM) * dtype.itemsize
    assert pool.facts == ModelFacts()
    assert pool.requests == {}


def test_a_size_that_is_no_multiple_of_the_page_is_refused():
    with pytest.raises(ValueError, match="pool size 25 is not a multiple of page size"):
        new_pool(BLOCKS * PAGE + 1)


def test_sizing_after_capture_is_refused():
    """SGLang would move the buffers after others have taken views of them."""
    pool = new_pool()
    pool.post_capture_active = True
    with pytest.raises(ValueError, match="SGLANG_ENABLE_POST_CAPTURE_KV_SIZING is not supported"):
        pool._create_buffers()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e5m2], ids=str)
def test_what_attention_reads(dtype):
    pool, requests = new_pool(dtype=dtype), ReqToTokenPool(5, 32, "cpu", False)
    cache = pool.bind(requests)
    assert cache is pool.cache
    assert cache.arena_k.dtype == cache.arena_v.dtype == dtype
    assert cache.arena_k.data_ptr() == pool.arena_k.data_ptr()
    assert cache.arena_v.data_ptr() == pool.arena_v.data_ptr()
    assert cache.req_to_token is requests.req_to_token
    assert cache.spans is pool.spans.spans
    rows = len(requests.req_to_token)
    assert cache.spans.first.shape == (rows, 2, LAYERS * HEADS)


def test_slots_are_stored_and_read_by_layer():
    pool = new_pool(dtype=torch.float32)
    pool.bind(ReqToTokenPool(5, 32, "cpu", False))
    slots = torch.tensor([21, 6, 7])
    keys, values = torch.randn(3, HEADS, DIM), torch.randn(3, HEADS, VALUE_DIM)
    pool._store_kv_layer(1, slots, keys, values)
    for head in range(HEADS):
        assert torch.equal(pool.arena_k[5, 1, head, 1], keys[0, head])
        assert torch.equal(pool.arena_v[1, 1, head, 2], values[1, head])
    assert pool.arena_k.bool().any(-1).sum() == 3 * HEADS
    found = pool.read(1, slots.int())
    assert torch.equal(found[0], keys)
    assert torch.equal(found[1], values)


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("get_contiguous_buf_infos", ()),
        ("get_cpu_copy", (None,)),
        ("load_cpu_copy", (None, None)),
        ("move_kv_cache", (None, None)),
        ("set_kv_buffer_prefix_valid", (None, None)),
    ],
)
def test_what_would_read_the_wrong_bytes_is_refused(method, arguments):
    with pytest.raises(NotImplementedError, match=r"^sgl-kvc: .* is not supported$"):
        getattr(new_pool(), method)(*arguments)
