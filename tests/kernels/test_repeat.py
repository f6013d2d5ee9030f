"""A part read again, and keys that stand alone, against one query or key at a time."""

from __future__ import annotations

import pytest
import torch
from kvc_kernels.extend import attend_reference
from kvc_kernels.repeat import (
    leverage,
    leverage_reference,
    repeat_attention,
    repeat_attention_reference,
)
from kvc_kernels.score import causal_lse


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(("size", "n"), [(1, 1), (7, 7), (3, 12)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block", [1, 100, None])
def test_repeat_attention(group, size, n, dtype, block):
    torch.manual_seed(0)
    queries, keys = torch.randn(size, 2 * group, 16), torch.randn(n, 2, 16)
    queries, keys = 2 * queries.to(dtype), 2 * keys.to(dtype)
    lse = torch.randn(size, 2 * group)
    got = repeat_attention(queries, keys, 0.25, lse, block=block)
    expected = repeat_attention_reference(queries, keys, 0.25, lse)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-4)


def test_what_was_found_the_first_time_takes_from_the_second():
    """One key, a logit of 0: half the attention if the first reading's sum is the same."""
    zeros = torch.zeros(1, 1, 4)
    for first, expected in ((float("-inf"), 1.0), (0.0, 0.5), (30.0, 0.0)):
        got = repeat_attention(zeros, zeros, 1.0, torch.full((1, 1), first))
        torch.testing.assert_close(got, torch.full((1, 1), expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 5, 40])
def test_leverage(n, dtype):
    torch.manual_seed(n)
    keys = torch.randn(n, 2, 8).to(dtype)
    got = leverage(keys)
    torch.testing.assert_close(got, leverage_reference(keys), atol=1e-4, rtol=1e-3)
    assert got.min() >= 0
    assert got.max() <= 1


def test_leverage_finds_the_key_that_stands_alone():
    keys = torch.zeros(30, 1, 4)
    keys[:, :, 0] = 1.0
    keys[11, 0] = torch.tensor([0.0, 0.0, 0.1, 0.0])  # small, but no other points its way
    assert leverage(keys)[0].argmax() == 11
    assert torch.isfinite(leverage(torch.zeros(3, 1, 4))).all()


@pytest.mark.parametrize("block", [1, 200, None])
@pytest.mark.parametrize(("window", "tokens"), [(1, 1), (7, 7), (5, 12)])
def test_causal_lse(block, window, tokens):
    torch.manual_seed(0)
    queries, keys = torch.randn(window, 6, 16), torch.randn(tokens, 2, 16)
    _, expected = attend_reference(queries, keys, keys, 0.25)
    torch.testing.assert_close(causal_lse(queries, keys, 0.25, block=block), expected)
