"""As much of SGLang as an attention backend on a GPU asks for, and forwards of a few rows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_kvc.cache.request import Request
from sgl_kvc.pool.arena import ArenaKVPool
from sgl_kvc.pool.segment import Segment
from sgl_kvc.spec import OFF

LAYERS, HEADS, GROUP, DIM, PAGE, CONTEXT = 2, 2, 2, 64, 16, 256
DTYPE = torch.float16
LAYER = 1


def make_runner(device: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """As much of SGLang's model runner as a backend asks for; rows 1 and 2 hold nothing yet."""
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    pool = ArenaKVPool(
        40 * PAGE,
        page_size=PAGE,
        dtype=DTYPE,
        head_num=HEADS,
        head_dim=DIM,
        layer_num=LAYERS,
        device=device,
        enable_memory_saver=False,
    )
    torch.manual_seed(0)
    pool.arena_k.normal_()
    pool.arena_v.normal_()
    layers = [
        RadixAttention(HEADS * GROUP, DIM, DIM**-0.5, num_kv_heads=HEADS, layer_id=i)
        for i in range(LAYERS)
    ]
    return SimpleNamespace(
        device=device,
        dtype=DTYPE,
        model=torch.nn.ModuleList(layers),
        token_to_kv_pool=pool,
        req_to_token_pool=ReqToTokenPool(3, CONTEXT, device, False),
        server_args=SimpleNamespace(model_path=str(folder)),
    )


def request_in(backend, row: int) -> Request:
    """The request of a row, which the radix cache would have made known."""
    request = backend.pool.requests.setdefault(f"r{row}", Request(OFF))
    request.row = row
    return request


def batch(backend, mode: ForwardMode, lens: dict[int, tuple[int, int]]) -> SimpleNamespace:
    """Rows with (tokens before, new ones); gives them blocks of their own."""
    at = backend.req_to_token.device
    for row, (prefix, new) in lens.items():
        slots = torch.arange(prefix + new) + (1 + row * 12) * PAGE
        backend.req_to_token[row, : prefix + new] = slots.int().to(at)
        request_in(backend, row)
    prefix, new = ([pair[i] for pair in lens.values()] for i in (0, 1))
    total = [sum(pair) for pair in lens.values()]
    return SimpleNamespace(
        forward_mode=mode,
        batch_size=len(lens),
        rids=[f"r{row}" for row in lens],
        req_pool_indices=torch.tensor(list(lens), device=at),
        seq_lens=torch.tensor(total, device=at),
        seq_lens_cpu=torch.tensor(total),
        extend_seq_lens=torch.tensor(new, device=at),
        extend_seq_lens_cpu=new,
        extend_prefix_lens_cpu=prefix,
        out_cache_loc=torch.cat(
            [backend.req_to_token[row, a : a + b] for row, (a, b) in lens.items()]
        ).long(),
    )


def answer(backend, mode: ForwardMode, lens: dict[int, tuple[int, int]]) -> torch.Tensor:
    """One layer of a forward of these rows, the same tensors for every backend."""
    given = batch(backend, mode, lens)
    new = len(given.out_cache_loc)
    torch.manual_seed(1)
    widths = (HEADS * GROUP * DIM, HEADS * DIM, HEADS * DIM)
    q, k, v = (torch.randn(new, width).to(backend.cache.arena_k) for width in widths)
    layer = RadixAttention(HEADS * GROUP, DIM, DIM**-0.5, num_kv_heads=HEADS, layer_id=LAYER)
    backend.init_forward_metadata(given)
    forward = backend.forward_decode if mode.is_decode() else backend.forward_extend
    return forward(q, k, v, layer, given)


def compress(backend, row: int) -> None:
    """Two blocks of segment before position 64, of which the heads have 1, 3, 3 and 1 pages."""
    pages = torch.tensor([1, 3, 3, 1], device=backend.req_to_token.device)
    slots = torch.arange(2 * PAGE, 4 * PAGE, device=pages.device) + (1 + row * 12) * PAGE
    segment = Segment(0, 4 * PAGE, slots, pages, PAGE, OFF)
    request_in(backend, row).segment = segment
    backend.spans.install(row, segment)
