"""Queries that are asked again, all parts at once, against the torch path of each part."""

from __future__ import annotations

import pytest
import torch
from kvc_kernels import repeat
from kvc_kernels.gpu.repeat import repeat_parts

from tests.kernels.batches import TOLERANCE

HEADS, SCALE = 2, 0.25


def _drawn(rows: int, n: int, group: int, dim: int = 16, dtype: torch.dtype = torch.float32):
    torch.manual_seed(rows)
    queries, keys = torch.randn(rows, HEADS * group, dim), torch.randn(n, HEADS, dim).to(dtype)
    return queries.to(dtype), keys, torch.randn(rows, HEADS * group)


@pytest.mark.parametrize(("tokens", "part"), [(1, 16), (16, 16), (17, 16), (70, 33), (300, 256)])
@pytest.mark.parametrize("group", [1, 3])
def test_parts(device, tokens, part, group):
    """The last one is shorter; parts end inside tiles."""
    queries, keys, lse = _drawn(tokens, tokens, group)
    expected = repeat.repeat_parts(queries, keys, SCALE, lse, part)
    assert expected.shape == (HEADS, tokens)
    on_device = (x.to(device) for x in (queries, keys))
    got = repeat_parts(*on_device, SCALE, lse.to(device), part, part)
    torch.testing.assert_close(got.cpu(), expected, atol=1e-6, rtol=1e-5)
    first = repeat.repeat_attention_reference(queries[:part], keys[:part], SCALE, lse[:part])
    torch.testing.assert_close(got.cpu()[:, :part], first, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("rows", "n"), [(5, 140), (64, 64), (33, 9)])
def test_queries_of_other_tokens_than_the_keys(device, rows, n):
    """As the prompt's last ones ask all of it again."""
    queries, keys, lse = _drawn(rows, n, 2)
    expected = repeat.repeat_attention(queries, keys, SCALE, lse)
    given = [x.to(device) for x in (queries, keys, lse)]
    got = repeat_parts(given[0], given[1], SCALE, given[2], rows, n)
    torch.testing.assert_close(got.cpu(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 96])
def test_half_precision(device, dtype, dim):
    queries, keys, lse = _drawn(40, 40, 2, dim, dtype)
    expected = repeat.repeat_parts(queries.float(), keys.float(), SCALE, lse, 16)
    given = [x.to(device) for x in (queries.float(), keys, lse)]
    got = repeat_parts(given[0], given[1], SCALE, given[2], 16, 16)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.cpu(), expected, atol=tolerance, rtol=tolerance)


def test_nothing(device):
    none = [torch.zeros(0, *shape, device=device) for shape in ((2, 16), (1, 16), (2,))]
    assert repeat_parts(none[0], none[1], SCALE, none[2], 16, 16).shape == (1, 0)
