"""Compressing, and compressing again, waits for nothing on the device."""

from __future__ import annotations

import pytest
import torch

from sgl_kvc.cache.request import Request
from sgl_kvc.pool.host_copy import HostCopy
from tests.sgl_kvc.lives import World
from tests.sgl_kvc.test_cache import BLOCKS, Lives, LivesOnGPU, server_args  # noqa: F401
from tests.waits import UnwaitingCache


@pytest.fixture
def lives(monkeypatch) -> Lives:
    """On a CPU with the kernels of a GPU, in Triton's interpreter."""
    if torch.cuda.is_available():
        lives = LivesOnGPU()
        lives.build()
        return lives
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    numbers = torch.Tensor.tolist  # which no dispatch mode sees
    monkeypatch.setattr(HostCopy, "tolist", lambda self: numbers(self._tensor))
    lives = Lives()
    lives.world = World(BLOCKS, cache_class=UnwaitingCache)
    return lives


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"policy": "snapkv"},
        {"policy": "ada-kv"},
        {"policy": "pyramidkv"},
        {"policy": "cake"},
        {"recompress_every": 8},
        {"recompress_every": 8, "policy": "snapkv"},
        {"prefill_block": 8, "window": 4},
        {"prefill_block": 16, "policy": "virtual-repeat", "part": 16, "window": 4},
    ],
    ids=lambda more: " ".join(map(str, more.values())) or "kv-compress",
)
def test_nothing_waits(lives, more, monkeypatch):
    knob = {"rate": 3, "min_tokens": 0, "policy": "kv-compress"} | more
    lives.start(family=0, shared=60, own=0, knob=knob, chunk=0, keep=True)
    with monkeypatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(torch.Tensor, "tolist", None)
        lives.decode(steps=20)
    report = Request.of(lives.world.live[0]).report.to_json()
    assert report["rate_achieved"] == pytest.approx(3, rel=0.2)
    if "recompress_every" in more:
        assert report["decode"]["recompressed"] >= 2
    lives.contents()
    lives.teardown()
