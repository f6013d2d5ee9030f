"""No launcher of a decode step or of a compression waits for the device."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kvc_kernels.gpu.compact import compact, move
from kvc_kernels.gpu.decode import decode
from kvc_kernels.gpu.extend import extend
from kvc_kernels.gpu.score import window_attention
from kvc_kernels.gpu.select import compete, kept_positions, protect
from kvc_kernels.gpu.store import store
from kvc_kernels.gpu.tables import block_table

from tests.kernels.batches import HEADS, LAYERS, RAGGED, build
from tests.waits import Waits, waiting_fails


def test_launchers(device):
    batch = build(RAGGED["all spans"]).with_new([1, 1, 0, 1]).on(device)
    cache = batch.cache
    query = torch.randn(len(batch.request), HEADS * 2, 16, device=device)
    metric = torch.zeros(cache.arena_k.shape[:-1], device=device)
    tracked = torch.ones(len(cache.req_to_token), dtype=torch.int32, device=device)
    slots = torch.arange(8, 32, device=device)
    pages = torch.ones(LAYERS * HEADS, dtype=torch.int64, device=device)
    target = torch.tensor([1], device=device)
    layer_k, layer_v = cache.arena_k[:, 0], cache.arena_v[:, 0]

    def launch() -> None:
        scheduled_anew = dataclasses.replace(batch)
        decode(query, scheduled_anew, 0, 1.0, metric=metric, tracked=tracked)
        extend(query[:3], batch, 0, 1.0)
        block_table(batch, 0, 64)
        store(layer_k, layer_v, slots, *torch.zeros(2, len(slots), HEADS, 16, device=device))
        scores = window_attention(query[:2], layer_k, slots, 1.0).repeat(LAYERS, 1)
        protect(scores, 4, 4, None, 1e30)
        compete(scores, 8, len(pages), 1, 1, None, 0.0)
        kept = kept_positions(scores, pages, 8, len(pages))
        compact(cache.arena_k, cache.arena_v, slots, kept, pages, target)
        move(metric, torch.zeros_like(kept), kept % 8, target)

    launch()  # compiles, which may wait
    with waiting_fails(on_gpu=query.is_cuda):
        launch()


def test_what_would_wait_is_seen():
    numbers = torch.arange(4)
    for waits in (
        lambda: int(numbers.sum()),
        lambda: numbers[numbers > 1],
        lambda: numbers.nonzero(),
        lambda: numbers.unique(),
        lambda: torch.repeat_interleave(numbers, numbers),
        lambda: bool(numbers.any()),
    ):
        with pytest.raises(AssertionError, match="waits"), Waits():
            waits()
