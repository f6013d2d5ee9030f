"""Every scorer and apportioner keeps the contract of `sgl_kvc.policy.base`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvc_kernels.select import protect

from sgl_kvc.policy.base import LayerContext, apportioner, scorer
from sgl_kvc.policy.facts import ModelFacts
from sgl_kvc.policy.kvs import PromptKVs
from sgl_kvc.policy.selection import select
from sgl_kvc.spec import PRESETS, CompressionSpec, methods, parse
from tests.sgl_kvc.contexts import pages_context

LAYERS, HEADS, GROUP, DIM = 2, 3, 2, 8


def _facts() -> ModelFacts:
    angles = torch.outer(torch.arange(1024), 1e4 ** -(torch.arange(0, DIM, 2) / DIM))
    generator = torch.Generator().manual_seed(1)
    return ModelFacts(
        cos_sin=torch.cat((angles.cos(), angles.sin()), -1),
        output_projection=[
            torch.randn(12, HEADS * GROUP * DIM, generator=generator) for _ in range(LAYERS)
        ],
        special_tokens=torch.tensor([0, 1]),
        punctuation=torch.tensor([2, 3]),
        head_profile=torch.rand(LAYERS, HEADS, generator=generator),
    )


def _context(tokens: int, spec: CompressionSpec, layer: int = 0) -> LayerContext:
    """A random layer; where the scorer looks at all queries, as one chunk."""
    torch.manual_seed(tokens + layer)
    window = tokens if spec.all_queries else min(spec.window, tokens)
    return LayerContext(
        layer,
        LAYERS,
        torch.randn(window, HEADS * GROUP, DIM),
        PromptKVs.of(torch.randn(tokens, HEADS, DIM), torch.randn(tokens, HEADS, DIM)),
        DIM**-0.5,
        spec,
        torch.randint(50, (tokens,)),
        max(1, tokens // 8),
        _facts(),
    )


def _score(context: LayerContext) -> torch.Tensor:
    method = scorer(context.spec)
    if method.observe is not None:
        window = context.queries[-context.spec.window :]
        context = replace(context, state=method.observe(context), queries=window)
    return method.run(context)


@pytest.mark.parametrize("name", methods("scorers"))
@pytest.mark.parametrize("tokens", [1, 5, 33, 200])
def test_scorers(name, tokens):
    spec = parse({"rate": 8, "scorer": name, "apportioner": "global"})
    context = _context(tokens, spec)
    scores = _score(context)
    assert scores.shape == (HEADS, tokens)
    assert scores.dtype == torch.float32
    assert torch.isfinite(scores).all()
    assert torch.equal(scores, _score(context)), "the same prompt scores the same"


@pytest.mark.parametrize("name", methods("apportioners"))
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_apportioners(name, data):
    pages = data.draw(st.integers(1, 12))
    blocks = data.draw(st.integers(1, pages))
    values = st.integers(-2, 2).map(float)
    size = LAYERS * HEADS * pages
    drawn = data.draw(st.lists(values, min_size=size, max_size=size))
    page_scores = torch.tensor(drawn).view(LAYERS, HEADS, pages).sort(descending=True).values
    spec = parse({"rate": 8, "scorer": "attention-window", "apportioner": name})
    method = apportioner(spec)
    statistics = None
    if method.observe is not None:
        layers = [_context(40, spec, layer) for layer in range(LAYERS)]
        layers = [replace(layer, scores=_score(layer)) for layer in layers]
        statistics = torch.stack([method.observe(layer) for layer in layers])
    context = pages_context(page_scores, blocks * LAYERS * HEADS, statistics, _facts())
    counts = method.run(context)
    assert counts.shape == (LAYERS, HEADS)
    assert counts.sum() == blocks * LAYERS * HEADS
    assert counts.min() >= 1
    assert counts.max() <= pages


@pytest.mark.parametrize("family", ["scorers", "apportioners"])
def test_the_catalogue_describes_every_method(family):
    for name, method in methods(family).items():
        assert method.summary, name
        assert method.source, name
        for parameter in method.parameters.values():
            assert parameter.about, f"{name}: {parameter.name} is not described"
            if parameter.choices:
                assert parameter.default in parameter.choices
            else:
                assert parameter.min <= parameter.default <= parameter.max


def test_global_gives_pages_to_the_best_heads():
    page_scores = torch.tensor([[[9.0, 8, 7, 6], [5, 0, 0, 0]], [[5, 1, 0, 0], [5, 0, 0, 0]]])
    method = apportioner(CompressionSpec(rate=4, apportioner="global"))
    assert method.run(pages_context(page_scores, 8)).tolist() == [[4, 1], [2, 1]]


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_selection_keeps_the_protected(preset, blocks):
    """Sinks always; the recent as soon as the smallest head has room for both."""
    page, tokens = 8, 80
    spec = parse({"rate": 4, "policy": preset, "recent": 8})
    contexts = [_context(tokens, spec, layer) for layer in range(LAYERS)]
    scores = torch.stack([_score(context) for context in contexts])
    statistics = None
    if apportioner(spec).observe is not None:
        scored = [replace(context, scores=_score(context)) for context in contexts]
        statistics = torch.stack([apportioner(spec).observe(context) for context in scored])
    chosen = select(scores, spec, blocks, page, statistics=statistics, facts=_facts())
    assert int(chosen.pages.sum()) == blocks * LAYERS * HEADS
    for kept in chosen.positions.split((chosen.pages * page).tolist()):
        assert kept.tolist() == sorted(set(kept.tolist()))
        assert set(range(spec.sinks)) <= set(kept.tolist())
        recent = min(spec.recent, blocks * page // 4)
        if len(kept) >= spec.sinks + recent:
            assert set(range(tokens - recent, tokens)) <= set(kept.tolist())


def _attended(group: list[range]) -> LayerContext:
    """256 keys; in head h the last 32 queries look at nothing but `group[h]`, evenly."""
    heads, tokens = len(group), 256
    keys = torch.zeros(tokens, heads, DIM)
    for head, wanted in enumerate(group):
        keys[list(wanted), head, 0] = 1.0
    queries = torch.zeros(32, heads, DIM)
    queries[..., 0] = 60.0
    facts = ModelFacts(output_projection=[torch.ones(1, heads * DIM)])
    spec, ids = CompressionSpec(rate=8), torch.zeros(tokens, dtype=torch.int64)
    values = torch.ones(tokens, heads, DIM)
    return LayerContext(0, 1, queries, PromptKVs.of(keys, values), 1.0, spec, ids, 32, facts)


WINDOWED = ["attention-window", "critical", "defensive", "cake"]


@pytest.mark.parametrize("name", WINDOWED)
def test_the_window_is_forced_into_a_quarter_of_the_budget_only(name):
    """At rate 8, 32 of 256 keys are kept, as many as the window has; 24 matter, all further up."""
    knob = {"rate": 8, "scorer": name, "apportioner": "uniform", "window": 32, "pool": 1}
    spec = parse(knob | {"sinks": 0})
    context = replace(_attended([range(40, 64)] * 2), spec=spec)
    chosen = select(scorer(spec).run(context)[None], spec, 4, 8, facts=context.facts)
    for kept in chosen.positions.view(2, 32):
        assert kept.tolist() == [*range(40, 64), *range(248, 256)]


@pytest.mark.parametrize("name", WINDOWED)
def test_heads_differ_at_rates_where_the_window_would_fill_the_budget(name):
    """One head needs a page of keys, the other three."""
    knob = {"rate": 8, "scorer": name, "apportioner": "global", "window": 32, "pool": 1}
    spec = parse(knob | {"sinks": 0})
    context = replace(_attended([range(40, 48), range(40, 80)]), spec=spec)
    chosen = select(scorer(spec).run(context)[None], spec, 4, 8, facts=context.facts)
    few, many = chosen.pages.tolist()
    assert few < many


@pytest.mark.parametrize("name", WINDOWED)
def test_the_whole_window_is_kept_where_the_budget_is_large(name):
    """As the papers have it: a window of 8 is no more than a quarter of 32."""
    knob = {"rate": 8, "scorer": name, "apportioner": "uniform", "window": 8, "pool": 1}
    spec = parse(knob | {"sinks": 0})
    context = _attended([range(40, 72)])
    context = replace(context, spec=spec, queries=context.queries[-8:])
    chosen = select(scorer(spec).run(context)[None], spec, 4, 8, facts=context.facts)
    assert set(range(248, 256)) <= set(chosen.positions.tolist())


def test_protection_orders_sinks_before_recent_and_newer_before_older():
    scores = torch.full((1, 1, 32), 5.0)
    protect(scores, 2, 8)
    order = scores[0, 0].argsort(descending=True, stable=True).tolist()
    assert order[:2] == [0, 1]
    assert order[2:10] == list(range(31, 23, -1))


def test_recent_counts_from_the_end_of_the_prompt():
    """The tail holds the last of them already."""
    spec = parse({"rate": 2, "scorer": "random", "apportioner": "uniform", "recent": 6, "sinks": 0})
    chosen = select(torch.rand(1, 1, 32), spec, 3, 8, tail=4)
    assert {30, 31} <= set(chosen.positions.tolist())
    scores = torch.zeros(1, 1, 32)
    protect(scores, 0, 2)
    assert scores.nonzero()[:, 2].tolist() == [30, 31]


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_can_be_asked_for(name):
    spec = parse({"rate": 8, "policy": name})
    preset = PRESETS[name]
    assert (spec.scorer, spec.apportioner) == (preset.scorer, preset.apportioner)
    assert set(preset.parameters) <= set(spec.parameters)
    assert parse(spec.to_json()) == spec
