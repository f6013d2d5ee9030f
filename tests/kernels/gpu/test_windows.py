"""Window scores of several prompts at once, pooled and faded, against the torch path of each."""

from __future__ import annotations

import pytest
import torch
from kvc_kernels import score
from kvc_kernels.gpu import neighbours
from kvc_kernels.gpu.windows import joined
from kvc_kernels.score import window_scores
from kvc_kernels.windows import Window, WindowOptions

HEADS, GROUP, DIM, PAGE, SCALE = 2, 3, 16, 8, 0.25
LENGTHS, OWN = [70, 9, 133], [5, 9, 33]


def _drawn(device: str):
    """Windows of a chunk's queries, a layer of an arena; every prompt's queries and keys."""
    torch.manual_seed(0)
    table = torch.randperm(3 * 160).view(3, 160).int()
    layer = torch.randn(60, HEADS, PAGE, DIM)
    chunk = torch.randn(sum(LENGTHS), HEADS * GROUP, DIM)
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    keys = [
        layer[row[:n].long() // PAGE, :, row[:n].long() % PAGE]
        for row, n in zip(table, LENGTHS, strict=True)
    ]
    queries = [chunk[end - own : end] for end, own in zip(ends, OWN, strict=True)]
    lse = [
        torch.cat([x for _, x in score.causal_logits(q, k, SCALE)], 2).logsumexp(-1)
        for q, k in zip(queries, keys, strict=True)
    ]
    lse = [x.permute(2, 0, 1).flatten(1) for x in lse]
    on_device, slots = chunk.to(device), table.to(device)
    windows = [
        Window(on_device[end - own : end], slots[i, :n], known.to(device))
        for i, (end, own, n, known) in enumerate(zip(ends, OWN, LENGTHS, lse, strict=True))
    ]
    return windows, layer.to(device), queries, keys


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"group": "mean", "power": 2},
        {"pool": 5},
        {"pool": 7, "pooling": "mean", "excluded": 3},
        {"half_life": 3.0, "power": 2},
        {"pool": 3, "half_life": 0.7},
    ],
    ids=str,
)
def test_prompts_of_a_batch(device, how):
    windows, layer, queries, keys = _drawn(device)
    tables = {}
    together = window_scores(windows, layer, SCALE, WindowOptions(**how), tables)
    assert len(tables) == 1
    again = window_scores(windows, layer, SCALE, WindowOptions(**how), tables)
    assert len(tables) == 1, "told once for all layers"
    for i, (query, key) in enumerate(zip(queries, keys, strict=True)):
        smoothing = {k: v for k, v in how.items() if k in ("pool", "pooling", "half_life")}
        asked = {k: v for k, v in how.items() if k not in smoothing}
        expected = score.window_attention(query, key, SCALE, **asked)
        expected = score.smooth(expected, OWN[i], **smoothing)
        assert together[i].shape == expected.shape
        torch.testing.assert_close(together[i].cpu(), expected, atol=1e-5, rtol=1e-5)
        assert again[i].equal(together[i])
        (alone,) = window_scores([windows[i]], layer, SCALE, WindowOptions(**how))
        torch.testing.assert_close(alone, together[i])


def test_heads_fade_at_their_own_pace(device):
    windows, layer, _, _ = _drawn(device)
    plain = window_scores(windows, layer, SCALE, WindowOptions())
    paces = torch.linspace(0.5, 3.0, len(plain[0]), dtype=torch.float64)
    how = WindowOptions(half_life=3.0, half_lives=paces.to(device))
    found = window_scores(windows, layer, SCALE, how)
    for got, scores in zip(found, plain, strict=True):
        expected = score.fade_to_neighbours(scores.cpu(), 3.0, paces)
        torch.testing.assert_close(got.cpu(), expected, atol=1e-6, rtol=1e-5)


def test_windows_of_other_tensors_and_without_sums(device):
    """Gathered over chunks; and where the attention kernel has not told the log-sum-exp."""
    windows, layer, _, _ = _drawn(device)
    expected = window_scores(windows, layer, SCALE, WindowOptions())
    windows[1] = Window(windows[1].queries.clone(), windows[1].slots.long().int())
    found = window_scores(windows, layer, SCALE, WindowOptions())
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_views_are_joined_without_a_copy():
    whole = torch.arange(24).view(8, 3)
    found, begins = joined([whole[4:6], whole[1:3], whole[5:8]])
    assert found.data_ptr() == whole[4:].data_ptr()
    assert begins == [0, -3, 1]
    found, begins = joined([whole[4:6], whole[1:3].clone()])
    assert found.tolist() == [*whole[4:6].tolist(), *whole[1:3].tolist()]
    assert begins == [0, 2]
    found, begins = joined([whole.view(-1)[0:6].view(2, 3), whole.view(-1)[4:10].view(2, 3)])
    assert begins == [0, 2], "not a whole row further"
    assert found.tolist() == [[0, 1, 2], [3, 4, 5], [4, 5, 6], [7, 8, 9]]


@pytest.mark.parametrize("own", [0, 13])
@pytest.mark.parametrize(
    ("pool", "pooling", "half_life"),
    [
        (7, "max", 0.0),
        (255, "mean", 0.0),
        (1, "max", 2.5),
        (1, "max", 300.0),
        (5, "mean", 1.0),
    ],
)
@pytest.mark.parametrize("n", [1, 14, 600, 1300])
def test_smoothing(device, n, pool, pooling, half_life, own):
    """Over several tiles, some of them beyond reach; zeros beside very large scores."""
    torch.manual_seed(n)
    own = min(n, own)
    scores = torch.rand(2, n) ** 40
    scores[0, n // 3] = 1e20
    scores[1, n // 2 :] = 0
    got = neighbours.smooth(scores.to(device), own, pool, pooling, half_life)
    expected = score.smooth(scores.clone(), own, pool=pool, pooling=pooling, half_life=half_life)
    if half_life:
        torch.testing.assert_close(got.cpu(), expected, atol=0, rtol=3e-7)
    else:
        assert got.cpu().equal(expected)


def test_rows_that_are_part_of_longer_ones(device):
    scores = torch.rand(3, 40, device=device)
    got = neighbours.smooth(scores[:, :25], 0, 3, "max", 0.0)
    assert got.equal(neighbours.smooth(scores[:, :25].contiguous(), 0, 3, "max", 0.0))
