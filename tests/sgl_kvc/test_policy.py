"""Every scorer and apportioner keeps the contract of `sgl_kvc.policy.base`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_kvc.policy.base import LayerContext, apportioner, scorer
from sgl_kvc.policy.selection import protect, select
from sgl_kvc.spec import PRESETS, CompressionSpec, method_names, parse

LAYERS, HEADS, GROUP, DIM = 2, 3, 2, 8


def _context(tokens: int, spec: CompressionSpec, layer: int = 0) -> LayerContext:
    torch.manual_seed(tokens + layer)
    window = min(spec.window, tokens)
    return LayerContext(
        layer,
        torch.randn(window, HEADS * GROUP, DIM),
        torch.randn(tokens, HEADS, DIM),
        torch.randn(tokens, HEADS, DIM),
        DIM**-0.5,
        spec,
    )


@pytest.mark.parametrize("name", method_names("scorers"))
@pytest.mark.parametrize("tokens", [1, 5, 33, 200])
def test_scorers(name, tokens):
    context = _context(tokens, CompressionSpec(rate=8, scorer=name))
    scores = scorer(name)(context)
    assert scores.shape == (HEADS, tokens)
    assert scores.dtype == torch.float32
    assert torch.isfinite(scores).all()
    assert torch.equal(scores, scorer(name)(context)), "the same prompt scores the same"


@pytest.mark.parametrize("name", method_names("apportioners"))
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_apportioners(name, data):
    pages = data.draw(st.integers(1, 12))
    blocks = data.draw(st.integers(1, pages))
    values = st.integers(-2, 2).map(float)
    size = LAYERS * HEADS * pages
    drawn = data.draw(st.lists(values, min_size=size, max_size=size))
    page_scores = torch.tensor(drawn).view(LAYERS, HEADS, pages).sort(descending=True).values
    counts = apportioner(name)(page_scores, blocks * LAYERS * HEADS)
    assert counts.shape == (LAYERS, HEADS)
    assert counts.sum() == blocks * LAYERS * HEADS
    assert counts.min() >= 1
    assert counts.max() <= pages


def test_global_gives_pages_to_the_best_heads():
    page_scores = torch.tensor([[[9.0, 8, 7, 6], [5, 0, 0, 0]], [[5, 1, 0, 0], [5, 0, 0, 0]]])
    assert apportioner("global")(page_scores, 8).tolist() == [[4, 1], [2, 1]]


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_selection_keeps_the_protected(preset, blocks):
    """Sinks always; the last page as soon as the smallest head has room for both."""
    page, tokens = 8, 80
    spec = parse({"rate": 4, "policy": preset})
    scores = torch.stack([scorer(spec.scorer)(_context(tokens, spec, i)) for i in range(LAYERS)])
    chosen = select(scores, spec, blocks, page)
    assert int(chosen.pages.sum()) == blocks * LAYERS * HEADS
    for kept in chosen.positions.split((chosen.pages * page).tolist()):
        assert kept.tolist() == sorted(set(kept.tolist()))
        assert set(range(spec.sinks)) <= set(kept.tolist())
        if len(kept) >= spec.sinks + page:
            assert set(range(tokens - page, tokens)) <= set(kept.tolist())


def test_protection_orders_sinks_before_recent_and_newer_before_older():
    scores = torch.full((1, 1, 32), 5.0)
    protect(scores, 2, 8)
    order = scores[0, 0].argsort(descending=True, stable=True).tolist()
    assert order[:2] == [0, 1]
    assert order[2:10] == list(range(31, 23, -1))


def test_presets_name_methods_that_exist():
    for preset in PRESETS.values():
        assert preset.scorer in method_names("scorers")
        assert preset.apportioner in method_names("apportioners")
