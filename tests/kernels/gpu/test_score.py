"""Window attention from the arena, against the reference of one query at a time."""

from __future__ import annotations

import pytest
import torch
from kvc_kernels.gpu.score import window_attention, window_lse
from kvc_kernels.score import causal_logits, window_attention_reference

from tests.kernels.batches import TOLERANCE

HEADS = 2


def _drawn(device, window, tokens, group, *, dim=16, page=8, dtype=torch.float32, keys=None):
    """Queries, a layer of an arena that is NaN but for the prompt, its slots, its keys."""
    torch.manual_seed(0)
    keys_dtype = keys or dtype
    gathered = torch.randn(tokens, HEADS, dim).to(keys_dtype)
    arena = torch.full((tokens // page + 3, 2, HEADS, page, dim), float("nan")).to(keys_dtype)
    slots = torch.randperm(arena.shape[0] * page)[:tokens]
    arena[slots // page, 1, :, slots % page] = gathered
    queries = torch.randn(window, HEADS * group, dim, dtype=dtype)
    return queries.to(device), arena.to(device).unbind(1)[1], slots.int().to(device), gathered


def _close(got, expected, dtype):
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.cpu(), expected, atol=tolerance, rtol=tolerance)


def _compare(drawn, power=1, *, dtype=torch.float32, lse=None, **options):
    queries, layer_k, slots, keys = drawn
    got = window_attention(queries, layer_k, slots, 0.25, power, lse=lse, **options)
    expected = window_attention_reference(queries.cpu(), keys.float(), 0.25, power, **options)
    assert expected.abs().sum() > 0 or options.get("excluded")
    _close(got, expected, dtype)


@pytest.mark.parametrize("how", ["sum", "mean"])
def test_tiles_of_half_precision(device, how):
    _compare(_drawn(device, 33, 140, 3, dtype=torch.float16), 2, dtype=torch.float16, group=how)


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize(("group", "how"), [(1, "sum"), (3, "sum"), (3, "mean"), (4, "mean")])
@pytest.mark.parametrize(("window", "tokens"), [(1, 1), (1, 20), (8, 8), (7, 9), (33, 70)])
def test_matches_the_reference(device, window, tokens, group, how, power):
    _compare(_drawn(device, window, tokens, group), power, group=how)


@pytest.mark.parametrize("tokens", [7, 8, 9, 63, 64, 65, 128])
def test_lengths_around_a_page_and_a_tile(device, tokens):
    _compare(_drawn(device, 3, tokens, 2), 2)


@pytest.mark.parametrize("how", ["sum", "mean"])
@pytest.mark.parametrize("excluded", [1, 5, 40, 200])
def test_queries_do_not_count_for_their_neighbours(device, excluded, how):
    _compare(_drawn(device, 33, 70, 3), 2, group=how, excluded=excluded)


@pytest.mark.parametrize("how", ["sum", "mean"])
@pytest.mark.parametrize("group", [2, 5, 7, 8, 12, 16])
def test_groups(device, group, how):
    _compare(_drawn(device, 9, 41, group), 2, group=how)


def test_mean_of_a_group_larger_than_a_tile(device):
    _compare(_drawn(device, 2, 20, 17, dim=256), group="mean")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("dim", "page"), [(32, 8), (64, 16), (96, 32), (128, 64), (256, 16)])
def test_dims_pages_and_types(device, dim, page, dtype):
    _compare(_drawn(device, 5, 70, 3, dim=dim, page=page, dtype=dtype), 2, dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "keys"),
    [
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.float16, torch.float8_e5m2),
        (torch.bfloat16, torch.float16),
        (torch.float32, torch.bfloat16),
    ],
)
def test_keys_of_another_type(device, dtype, keys):
    _compare(_drawn(device, 9, 41, 3, dtype=dtype, keys=keys), dtype=dtype)


@pytest.mark.parametrize(("window", "tokens"), [(1, 1), (8, 8), (20, 70), (5, 600), (100, 300)])
def test_log_sum_exp_over_splits(device, window, tokens):
    queries, layer_k, slots, keys = _drawn(device, window, tokens, 3)
    logits = torch.cat([part for _, part in causal_logits(queries.cpu(), keys, 3.0, block=1 << 24)])
    expected = logits.logsumexp(-1).permute(2, 0, 1).flatten(1)
    _close(window_lse(queries, layer_k, slots, 3.0), expected, torch.float32)


def test_large_logits(device):
    queries, layer_k, slots, keys = _drawn(device, 8, 300, 2)
    got = window_attention(queries * 40, layer_k, slots, 2.0)
    expected = window_attention_reference(queries.cpu() * 40, keys, 2.0)
    torch.testing.assert_close(got.cpu(), expected, atol=1e-3, rtol=1e-3)  # logits of 1,000


def test_the_callers_log_sum_exp_is_taken(device):
    drawn = _drawn(device, 6, 30, 3)
    lse = window_lse(*drawn[:3], 0.25)
    _compare(drawn, 2, lse=lse.T.contiguous().T)
    halved = window_attention(*drawn[:3], 0.25, lse=lse + 2.0**0.5)
    expected = window_attention(*drawn[:3], 0.25) * torch.tensor(-(2.0**0.5)).exp()
    torch.testing.assert_close(halved, expected.to(halved.device), atol=1e-5, rtol=1e-5)


def test_queries_may_be_a_slice(device):
    queries, layer_k, slots, keys = _drawn(device, 6, 30, 3)
    wide = torch.cat([queries, queries], dim=1)[:, : queries.shape[1]]
    assert not wide.is_contiguous()
    _compare((wide, layer_k, slots.long(), keys), 2)


def test_what_does_not_fit_is_refused(device):
    queries, layer_k, slots, _ = _drawn(device, 6, 30, 3)
    with pytest.raises(ValueError, match="6 queries"):
        window_attention(queries, layer_k, slots[:5], 0.25)
    with pytest.raises(ValueError, match="not for 2 heads"):
        window_attention(queries[:, :5], layer_k, slots, 0.25)
    with pytest.raises(ValueError, match="power 3"):
        window_attention(queries, layer_k, slots, 0.25, 3)
    with pytest.raises(ValueError, match="lse"):
        window_attention(queries, layer_k, slots, 0.25, lse=torch.zeros(5, 6))
