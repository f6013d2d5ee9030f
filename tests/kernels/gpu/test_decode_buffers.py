"""Memory of FlashInfer's decode kernels: how much, and that batch sizes share it."""

from __future__ import annotations

import pytest
import torch
from kvc_kernels.gpu.decode_buffers import DecodeBuffers, decode_bytes, workspace_bytes
from kvc_kernels.gpu.flashinfer_decode import PagedDecode
from kvc_kernels.gpu.schedule import Schedule
from kvc_kernels.gpu.second_pass import SecondPass

from tests.kernels.batches import HEADS
from tests.kernels.gpu.test_flashinfer import DIM, bounds, check_decode, drawn


def test_batch_sizes_share_their_memory_by_turns(kernels, device):
    """As the graphs of all sizes do: each step is planned before it runs."""
    whole = drawn("all spans", torch.float16)
    cache, most = whole.on(device).cache, max(bounds(whole))
    buffers = DecodeBuffers("fa2", cache, 4, HEADS * 2, most)
    sizes = {
        n: PagedDecode("fa2", cache, n, HEADS * 2, torch.float16, DIM**-0.5, buffers)
        for n in (4, 1, 2)
    }
    for order in ([0, 1, 2, 3], [3], [1, 2], [2], [3, 2, 1, 0]):
        mine, paged = whole.choose(order), sizes[len(order)]
        assert paged.table.data_ptr() == buffers.table.data_ptr()
        paged.plan(mine.on(device), bounds(mine))
        check_decode(paged, mine, device, 2, torch.float16)


@pytest.mark.parametrize(
    ("rows", "group", "dim", "processors", "tiles", "tile"),
    [
        (2048, 8, 128, 132, 1024 + 2047, 16),  # 256 requests of 8 heads: 203 MB
        (8, 4, 128, 132, 264, 16),  # what fills the processors
        (512, 17, 64, 108, 136 + 511, 64),
        (512, 71, 64, 108, 284 + 511, 128),
        (512, 71, 256, 108, 568 + 511, 64),
    ],
)
def test_workspace_is_what_the_kernel_takes(rows, group, dim, processors, tiles, tile):
    """tmp_v and tmp_s of `PrefillPlan`, each aligned to 16 bytes."""
    wanted = group * tiles * tile * dim * 4 + group * tiles * tile * 4
    assert 0 <= workspace_bytes("fa2", rows, group, dim, processors) - wanted <= 32
    assert workspace_bytes("xqa", rows, group, dim, processors) == 128 << 20


@pytest.mark.parametrize("backend", ["triton", "fa2", "xqa"])
def test_what_is_set_aside_is_what_is_allocated(backend, device, monkeypatch):
    """A CPU stands for a device of two processors, so that the cuts are counted."""
    monkeypatch.setattr("kvc_kernels.gpu.decode_buffers._MOST_PROGRAMS", 7)
    cache, requests = drawn("all spans", torch.float16).on(device).cache, 3
    processors = 2
    if device == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    programs, tokens = 7 * processors, cache.req_to_token.shape[1]
    made = Schedule.allocate(cache, requests, programs, 16)
    second = SecondPass.allocate(cache, requests, programs)
    tensors = [made.heads, made.blocks, made.starts, made.cuts]
    tensors += [second.members, second.starts, second.cuts]
    if backend != "triton":
        pages = -(-tokens // cache.page_size)
        buffers = DecodeBuffers(backend, cache, requests, HEADS * 2, pages)
        tensors += [x for x in vars(buffers).values() if isinstance(x, torch.Tensor)]
    taken = sum(each.nbytes for each in tensors)
    asked = decode_bytes(
        backend, requests=requests, layers=cache.layers, heads=HEADS, group=2, head_dim=DIM,
        page_size=cache.page_size, tokens=tokens, processors=processors,
    )  # fmt: skip
    assert abs(asked - taken) <= 64
