"""States of scorers that look at every query: all of their memory is counted, and it is bounded."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sgl_kvc.cache.states import StateCache, state_bytes
from sgl_kvc.policy.base import LayerContext, scorer
from sgl_kvc.policy.facts import ModelFacts
from sgl_kvc.policy.kvs import PromptKVs
from sgl_kvc.spec import methods, parse


@dataclasses.dataclass(frozen=True)
class Sums:
    count: int
    total: torch.Tensor
    parts: tuple[torch.Tensor, ...] = ()


def sums(kilobytes: int) -> Sums:
    half = torch.zeros(kilobytes * 128)
    return Sums(3, half, (half.clone(),))


def test_dataclasses_count():
    """They counted as nothing, so every prompt's states stayed for ever."""
    assert state_bytes([sums(4), None, {"more": torch.zeros(2)}]) == 4096 + 8
    cache = StateCache(limit=10_000)
    for prompt in range(50):
        cache.put(prompt, [sums(1), sums(1)])
    assert cache.held == 4 * 2048
    assert [cache.get(prompt) is not None for prompt in (45, 46, 49)] == [False, True, True]
    cache.clear()
    assert cache.held == 0


def test_what_nobody_can_count_is_not_kept(caplog):
    cache = StateCache(limit=10_000)
    cache.put("a", [object()])
    assert cache.get("a") is None
    assert "not remembered" in caplog.text


def test_states_larger_than_the_limit_displace_nobody():
    cache = StateCache(limit=4096)
    cache.put("small", [sums(1)])
    cache.put("large", [sums(8)])
    assert cache.get("large") is None
    assert cache.get("small") is not None
    cache.put("small", [sums(2)])
    assert cache.held == 2048


def test_the_least_recently_used_are_forgotten():
    cache = StateCache(limit=3 * 1024)
    for prompt in "abc":
        cache.put(prompt, [sums(1)])
    assert cache.held == cache.limit, "as much as the limit is no more than the limit"
    assert cache.get("a") is not None
    cache.put("d", [sums(1)])
    assert [prompt for prompt in "abcd" if cache.get(prompt) is not None] == ["a", "c", "d"]
    cache.put("e", [sums(3)])
    assert [prompt for prompt in "acde" if cache.get(prompt) is not None] == ["e"]
    assert cache.held == cache.limit


@pytest.mark.parametrize(
    ("state", "size"),
    [
        (None, 0), (True, 0), (3, 0), (2.5, 0), ("text", 0), ([], 0), (torch.zeros(2, 3), 24),
        (torch.zeros(5, dtype=torch.int8), 5), ((torch.zeros(1), [torch.zeros(2)]), 12),
    ],
)  # fmt: skip
def test_bytes_of_a_state(state, size):
    assert state_bytes(state) == size


@pytest.mark.parametrize("state", [{1, 2}, b"bytes", object(), Sums, torch.zeros])
def test_what_cannot_be_counted(state):
    with pytest.raises(TypeError, match=f"a state of type {type(state).__name__}"):
        state_bytes([0, state])


def test_the_limit_follows_the_pool():
    assert StateCache.for_pool(100 << 30).limit == 2 << 30
    assert StateCache.for_pool(1 << 20).limit == 8 << 20


OBSERVING = [name for name, method in methods("scorers").items() if method.all_queries]


@pytest.mark.parametrize("name", OBSERVING)
def test_the_states_of_every_scorer_can_be_counted(name):
    n, heads, dim = 12, 2, 8
    torch.manual_seed(0)
    queries, keys = torch.randn(n, heads * 2, dim), torch.randn(n, heads, dim)
    angles = torch.arange(n)[:, None] * torch.ones(dim // 2)
    context = LayerContext(
        layer=0, layers=1, queries=queries, kvs=PromptKVs.of(keys, keys), scale=1.0,
        spec=parse({"rate": 2, "scorer": name, "apportioner": "uniform"}),
        tokens=torch.arange(n), kept=4,
        facts=ModelFacts(cos_sin=torch.cat([angles.cos(), angles.sin()], dim=1)),
    )  # fmt: skip
    assert state_bytes(scorer(context.spec).observe(context)) >= n * heads * 4
