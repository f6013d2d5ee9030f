"""A prompt is scored alike however its prefill is cut, and read no more often than it must be."""

from __future__ import annotations

import pytest
import torch
from kvc_kernels.score import causal_logits

from sgl_kvc.policy.scores import PromptScores
from sgl_kvc.spec import Extent, parse

N, HEADS, GROUP, DIM, PAGE = 60, 2, 3, 8, 4
SCALE = DIM**-0.5


@pytest.fixture
def drawn() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(N, HEADS * GROUP, DIM), *torch.randn(2, N, HEADS, DIM)


def scored(knob: dict, drawn, ends: list[int], *, with_lse: bool) -> tuple[torch.Tensor, list[int]]:
    """Scores after chunks that end so, and the lengths at which keys were read."""
    queries, keys, values = drawn
    logits = torch.cat([x for _, x in causal_logits(queries, keys, SCALE)], dim=2)
    lse = logits.logsumexp(-1).permute(2, 0, 1).flatten(1)
    spec = parse({"rate": 3, "min_tokens": 0} | knob)
    scores = PromptScores(spec, Extent.of(spec, N, PAGE), list(range(N)), PAGE, layers=1)
    read, begin = [], 0
    for end in ends:

        def cached(end=end) -> tuple[torch.Tensor, torch.Tensor]:
            read.append(end)
            return keys[:end], values[:end]

        mine = slice(begin, end)
        known = lse[mine] if with_lse else None
        scores.observe(0, queries[mine], end, cached, SCALE, known)
        begin = end
    return scores.scores(), read


@pytest.mark.parametrize("with_lse", [True, False])
@pytest.mark.parametrize("ends", [[7, 41, 60], [20, 57, 60], [1, 2, 60]])
@pytest.mark.parametrize(
    "knob", [{"policy": "snapkv", "window": 16}, {"policy": "h2o"}, {"policy": "tova"}], ids=str
)
def test_chunks(drawn, knob, ends, with_lse):
    expected, _ = scored(knob, drawn, [N], with_lse=False)
    got, read = scored(knob, drawn, ends, with_lse=with_lse)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert read == (ends if knob["policy"] == "h2o" else [N])
