"""Store in one launch against the reference, and the bits it leaves alone."""

from __future__ import annotations

import pytest
import torch
from kvc_kernels.gpu.store import store
from kvc_kernels.store import store as store_reference

TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


def _arena(dim: int, dtype: torch.dtype, heads: int, page: int, device: str) -> torch.Tensor:
    """[6 blocks, 3 layers, H, P, D], not zero anywhere."""
    arena = torch.randn(6, 3, heads, page, dim, device=device) + 8
    return arena.to(dtype)


def _expected(layer: torch.Tensor, slots: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """What `layer` should hold, in float32: torch cannot index fp8."""
    expected = layer.float()
    store_reference(expected, slots.long(), new.to(layer.dtype).float())
    return expected


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("n", "heads", "page", "dim", "dim_v"),
    [
        (0, 2, 8, 16, 16),
        (1, 1, 8, 64, 64),
        (7, 3, 8, 16, 32),
        (9, 8, 32, 96, 128),
        (3, 2, 64, 256, 64),
        (2, 11, 16, 256, 16),
    ],
)
def test_store(device, dtype, n, heads, page, dim, dim_v):
    torch.manual_seed(n)
    arena_k = _arena(dim, dtype, heads, page, device)
    arena_v = _arena(dim_v, dtype, heads, page, device)
    metric = torch.rand(arena_k.shape[:-1], device=device) + 1
    before = arena_k.clone(), arena_v.clone(), metric.clone()
    # the interpreter cuts off what it should round: what is written fits the type already
    keys = torch.randn(n, heads, dim, device=device).to(dtype).float()
    values = torch.randn(n, heads, dim_v, device=device).to(dtype).float()
    slots = torch.randperm(6 * page, device=device)[:n]
    for slot_type, with_metric in ((torch.int64, True), (torch.int32, False)):
        for arena, old in zip((arena_k, arena_v, metric), before, strict=True):
            arena.copy_(old)
        layer_k, layer_v, layer_metric = (a.unbind(1)[1] for a in (arena_k, arena_v, metric))
        expected_k = _expected(layer_k, slots, keys)
        expected_v = _expected(layer_v, slots, values)
        given = layer_metric if with_metric else None
        store(layer_k, layer_v, slots.to(slot_type), keys, values, given)
        assert layer_k.float().equal(expected_k)
        assert layer_v.float().equal(expected_v)
        expected_metric = before[2].clone()
        if with_metric:
            expected_metric[slots // page, 1, :, slots % page] = 0
        assert metric.equal(expected_metric)
        for arena, old in zip((arena_k, arena_v), before, strict=False):
            others = arena[:, ::2].float()
            assert others.equal(old[:, ::2].float()), "other layers stay as they were"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_keys_and_values_inside_a_wider_projection(device, dtype):
    heads, dim, page = 3, 16, 8
    arena = _arena(dim, torch.float32, heads, page, device)
    projected = torch.randn(5, 3, heads, dim, device=device).to(dtype)
    keys, values = projected[:, 1], projected[:, 2]
    slots = torch.tensor([40, 3, 17, 18, 8], device=device)
    layer_k, layer_v = arena.unbind(1)[0], arena.unbind(1)[2]
    expected_k, expected_v = _expected(layer_k, slots, keys), _expected(layer_v, slots, values)
    store(layer_k, layer_v, slots, keys, values)
    assert layer_k.equal(expected_k)
    assert layer_v.equal(expected_v)


@pytest.mark.parametrize("dtype", TYPES[1:], ids=str)
def test_a_cast_rounds_within_a_step(device, dtype):
    if device == "cpu" and dtype.itemsize == 1:
        pytest.skip("Triton's interpreter rounds 1.99 to 1 when it casts to fp8")
    arena = torch.zeros(2, 1, 2, 8, 16, device=device).to(dtype)
    new = torch.randn(9, 2, 16, device=device)
    slots = torch.arange(9, device=device)
    store(arena[:, 0], arena.clone()[:, 0], slots, new, new)
    got = arena[:, 0].transpose(1, 2).flatten(0, 1)[:9].float()
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    torch.testing.assert_close(got, new, rtol=torch.finfo(dtype).eps, atol=smallest)


def test_fp8_held_as_bytes(device):
    arena = torch.zeros(2, 1, 2, 8, 16, device=device, dtype=torch.uint8)
    new = torch.randint(0, 256, (3, 2, 16), device=device, dtype=torch.uint8)
    slots = torch.tensor([9, 2, 15], device=device)
    store(arena[:, 0], arena.clone()[:, 0], slots, new, new)
    assert arena[slots // 8, 0, :, slots % 8].equal(new)
    with pytest.raises(ValueError, match="cannot be cast"):
        store(arena[:, 0], arena[:, 0], slots, new.float(), new.float())


def test_what_does_not_fit_is_refused(device):
    arena = torch.zeros(2, 2, 2, 8, 16, device=device)
    layer, new = arena[:, 0], torch.zeros(3, 2, 16, device=device)
    slots = torch.tensor([9, 2, 15], device=device)
    with pytest.raises(ValueError, match="keys are"):
        store(layer, layer, slots, new[:2], new)
    with pytest.raises(ValueError, match="last dimension"):
        store(layer, layer, slots, new, new.mT.contiguous().mT)
    with pytest.raises(ValueError, match="slots"):
        store(layer, layer, slots.float(), new, new)
    with pytest.raises(ValueError, match="layer_metric"):
        store(layer, layer, slots, new, new, torch.zeros(2, 2, 9, device=device))
    with pytest.raises(ValueError, match="not written to a layer"):
        store(arena.transpose(2, 3)[:, 0], layer, slots, torch.zeros(3, 8, 16, device=device), new)
