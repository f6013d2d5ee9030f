"""Apportioners: the contract at the parameters' bounds, and what each method promises."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvc_kernels.score import put_first
from torch._subclasses.fake_tensor import FakeTensorMode

from sgl_kvc.policy.apportioners.cake import observe
from sgl_kvc.policy.base import LayerContext, apportioner
from sgl_kvc.policy.facts import ModelFacts
from sgl_kvc.policy.kvs import PromptKVs
from sgl_kvc.policy.pages import PagesContext
from sgl_kvc.spec import CompressionSpec, Parameter, methods, parse
from tests.sgl_kvc.contexts import pages_context

#: (the apportioner, its parameters): all at their defaults, then every mix of their bounds.
CASES = []


def _ends(parameter: Parameter) -> tuple:
    return parameter.choices or (parameter.min, parameter.max)


for _name, _method in methods("apportioners").items():
    CASES.append((_name, {}))
    CASES += [
        (_name, dict(zip(_method.parameters, values, strict=True)))
        for values in itertools.product(*map(_ends, _method.parameters.values()))
        if values
    ]


def pages(name: str, context: PagesContext, **parameters) -> list[list[int]]:
    """What the apportioner gives, checked against the contract; twice the same."""
    knob = {"rate": 2, "scorer": "attention-window", "apportioner": name, **parameters}
    method = apportioner(parse(knob))
    counts = method.run(context)
    layers, heads, most = context.layers, context.heads, context.pages
    assert counts.dtype == torch.int64
    assert counts.shape == (layers, heads)
    assert int(counts.sum()) == context.total
    assert int(counts.min()) >= 1
    assert int(counts.max()) <= most
    assert torch.equal(counts, method.run(context))
    return counts.tolist()


def flat(layers: int, heads: int, most: int, mean: int, **fields) -> PagesContext:
    """A context whose pages all score the same."""
    return pages_context(torch.zeros(layers, heads, most), mean * layers * heads, **fields)


@pytest.mark.parametrize(("name", "parameters"), CASES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_contract(name, parameters, data):
    layers, heads, most = (data.draw(st.integers(1, top)) for top in (5, 3, 9))
    mean = data.draw(st.integers(1, most))
    numbers = st.sampled_from([0.0, 1e-30, 1e-3, 0.25, 1.0, 3.0, 1e4])

    def drawn(*shape: int) -> torch.Tensor:
        size = math.prod(shape)
        return torch.tensor(data.draw(st.lists(numbers, min_size=size, max_size=size))).view(shape)

    scores = drawn(layers, heads, most)
    scores[..., : data.draw(st.integers(0, most))] = 1e30
    facts = ModelFacts(head_profile=drawn(layers, heads).clamp(0, 1))
    context = pages_context(
        scores.sort(descending=True).values, mean * layers * heads, drawn(layers, 2), facts
    )
    pages(name, context, **parameters)


@pytest.mark.parametrize("layers", [1, 2, 3, 32])
@pytest.mark.parametrize("mean", [20, 64, 300, 500, 777, 1000])
@pytest.mark.parametrize("beta", [1, 2, 5, 20])
def test_pyramid_follows_the_formula(layers, mean, beta):
    """The layer budgets of the paper's code and kvpress, no window set apart, KV by KV.

    There every layer is rounded by itself, so the total may be off; ours is rounded once.
    """
    keys = 1000
    last, first = mean / beta, 2 * mean - mean / beta
    if first > keys:
        last, first = 2 * mean - keys, keys
    ours = pages("pyramid", flat(layers, 2, keys, mean), beta=beta)
    for layer, (one, other) in enumerate(ours):
        assert one == other
        if layers > 1:
            assert abs(one - (first - layer * (first - last) / (layers - 1))) < 1


def test_pyramid_by_hand():
    column = [row[0] for row in pages("pyramid", flat(4, 2, 100, 20))]
    assert column == [39, 26, 14, 1]  # 39, 26.33, 13.67, 1
    column = [row[0] for row in pages("pyramid", flat(3, 2, 5, 4))]
    assert column == [5, 4, 3], "the first layer keeps all it has"
    column = [row[0] for row in pages("pyramid", flat(8, 2, 100, 2))]
    # From 3 to 1 by 2/7: no layer falls below a page, where kvpress turns uniform.
    assert column == [3, 3, 2, 2, 2, 2, 1, 1]
    assert pages("pyramid", flat(1, 2, 100, 7)) == [[7, 7]]


def test_adaptive_lets_the_heads_of_a_layer_compete():
    scores = torch.tensor(
        [
            [[9.0, 8, 7, 6, 5, 4], [3, 2, 1, 0, 0, 0]],  # one head wins all
            [[9.0, 1, 1, 0, 0, 0], [8, 7, 2, 2, 2, 0]],  # 7, 2, 2, 2 against 1 and 1
        ]
    )
    context = pages_context(scores * 1e-3, 3 * 4)
    assert pages("adaptive", context) == [[5, 1], [1, 5]]
    assert pages("adaptive", context, floor=0.5) == [[4, 2], [2, 4]]
    assert pages("adaptive", context, floor=1) == [[3, 3], [3, 3]]


def test_adaptive_floor_is_a_share_of_the_mean():
    """A head that always loses keeps ceil(floor * mean)."""
    scores = torch.stack([torch.full((20,), 2.0), torch.ones(20)])[None]
    for floor, kept in [(0, 1), (0.2, 2), (0.25, 3), (0.3, 3), (1, 10)]:
        context = pages_context(scores, 20)
        assert pages("adaptive", context, floor=floor) == [[20 - kept, kept]]


def _layer(queries: torch.Tensor, keys: torch.Tensor, scale: float) -> LayerContext:
    spec = CompressionSpec(rate=2)
    tokens = torch.zeros(keys.shape[0], dtype=torch.int64)
    return LayerContext(0, 1, queries, PromptKVs.of(keys, keys), scale, spec, tokens, 1)


def test_cake_observes_entropy_and_variance_before_the_window():
    torch.manual_seed(0)
    window, tokens, heads, group, dim = 5, 12, 2, 3, 8
    queries, keys = torch.randn(window, heads * group, dim), torch.randn(tokens, heads, dim)
    entropy = shift = 0.0
    for head in range(heads * group):
        rows = []
        for i in range(window):
            visible = tokens - window + i + 1
            row = (keys[:visible, head // group] @ queries[i, head] * 0.3).softmax(0)
            rows.append(row[: tokens - window])
        before = torch.stack(rows)
        entropy -= float((before * before.log()).sum())
        shift += float(before.var(dim=0, correction=0).sum())
    found = observe(_layer(queries, keys, 0.3), tau1=1.0, tau2=1.0)
    assert found.tolist() == pytest.approx([entropy, shift], rel=1e-4)


def test_cake_observes_a_layer_that_is_all_window():
    found = observe(_layer(torch.randn(4, 2, 8), torch.randn(4, 1, 8), 0.3), tau1=1.0, tau2=1.0)
    assert found.tolist() == [0, 0]


def test_cake_follows_the_preference():
    """Dispersion 4, 1 and shift 1, 4: alike at first, then as 16 to 2 and as 8 to 8."""
    context = flat(2, 2, 50, 9, statistics=torch.tensor([[4.0, 1.0], [1.0, 4.0]]))

    def column(**taus: float) -> list[int]:
        return [row[0] for row in pages("cake", context, **taus)]

    assert column() == [9, 9]
    assert column(tau1=0.5) == [1 + round(16 * 4 / 5), 1 + round(16 * 1 / 5)]
    assert column(tau2=0.5) == [1 + round(16 * 1 / 5), 1 + round(16 * 4 / 5)]


def test_cake_gives_every_layer_its_window_first():
    scores = torch.zeros(2, 1, 50)
    scores[..., :3] = 1e30
    one_sided = torch.tensor([[1e4, 1e4], [0.0, 0.0]])
    assert pages("cake", pages_context(scores, 20, one_sided)) == [[17], [3]]


def test_global_counts_a_retrieval_heads_pages_for_more():
    scores = torch.tensor([[[9.0, 4, 2, 1], [9, 3, 3, 3]]])
    facts = ModelFacts(head_profile=torch.tensor([[0.3, 0.1]]))  # 1.5 and 0.5 times the mean
    known = pages_context(scores, 4, facts=facts)
    unknown = replace(known, facts=ModelFacts())
    assert pages("global", known) == [[2, 2]]
    assert pages("global", known, profile_power=1.0) == [[3, 1]], "6 and 3 against 1.5"
    assert pages("global", known, profile_power=0.1) == [[2, 2]], "4.2 and 2.1 against 2.8"
    assert pages("global", unknown, profile_power=8.0) == [[2, 2]]
    below = pages_context(scores - 10, 4, facts=facts)
    assert pages("global", below, profile_power=8.0) == [[3, 1]]


def test_global_keeps_what_is_protected_whatever_the_profile():
    scores = torch.tensor([[[1e30, 1e30, 1], [9, 8, 7]]])
    facts = ModelFacts(head_profile=torch.tensor([[0.0, 0.2]]))
    context = pages_context(scores, 4, facts=facts)
    assert pages("global", context, profile_power=8.0) == [[2, 2]]
    nobody = replace(context, facts=ModelFacts(head_profile=torch.zeros(1, 2)))
    assert pages("global", nobody, profile_power=8.0) == [[2, 2]]


PROFILE = torch.tensor([[0.1, 0.9, 0.3, 0.2], [0.8, 0.1, 0.0, 0.1]])


def profiled(mean: int, most: int, protected: int = 1) -> PagesContext:
    scores = torch.zeros(2, 4, most)
    scores[..., :protected] = 1e30
    return pages_context(scores, mean * 8, facts=ModelFacts(head_profile=PROFILE))


def test_head_profile_gives_retrieval_heads_the_rest():
    few = {"retrieval": 0.25}
    assert pages("head-profile", profiled(4, 20), **few) == [[1, 13, 1, 1], [13, 1, 1, 1]]
    assert pages("head-profile", profiled(4, 20, 2), **few) == [[2, 10, 2, 2], [10, 2, 2, 2]]
    uneven = pages("head-profile", profiled(2, 20), retrieval=0.375)
    assert uneven == [[1, 4, 3, 1], [4, 1, 1, 1]], "8 pages for 3 heads, the best profile first"


def test_head_profile_gives_the_others_what_retrieval_heads_cannot_hold():
    assert pages("head-profile", profiled(4, 7)) == [[3, 7, 3, 3], [7, 3, 3, 3]]
    assert pages("head-profile", profiled(7, 7)) == [[7] * 4] * 2


def test_head_profile_rounds_the_number_of_heads_up():
    assert pages("head-profile", profiled(3, 20), retrieval=0.01) == [[1, 17, 1, 1], [1, 1, 1, 1]]
    many = flat(10, 10, 20, 2, facts=ModelFacts(head_profile=torch.rand(10, 10)))
    more = sum(count > 1 for row in pages("head-profile", many, retrieval=0.07) for count in row)
    assert more == 7, "0.07 * 100 is a little more than 7 in floating point"


@pytest.mark.parametrize("retrieval", [0, 1])
def test_head_profile_is_uniform_when_all_heads_are_alike(retrieval):
    assert pages("head-profile", profiled(3, 20), retrieval=retrieval) == [[3] * 4] * 2


def test_by_need_gives_every_head_the_same_share_of_its_need():
    scores = torch.zeros(1, 3, 12)
    for head, needed in enumerate([1, 3, 8]):
        scores[0, head, :needed] = put_first(torch.zeros(1), torch.tensor([True]))

    def each(mean: int) -> list[int]:
        return pages("by-need", pages_context(scores, 3 * mean))[0]

    assert each(2) == [1, 1, 4], "6 for 12; no head below a page"
    assert each(4) == [1, 3, 8], "all that they need"
    assert each(5) == [1, 4, 10], "and the rest likewise"
    assert pages("by-need", flat(2, 2, 9, 3)) == [[3, 3]] * 2, "where nobody needs anything"


@pytest.mark.parametrize("name", methods("apportioners"))
def test_nothing_waits_for_the_device(name):
    """On tensors without data whatever needs a value on the host raises."""
    method = apportioner(parse({"rate": 2, "scorer": "attention-window", "apportioner": name}))
    with FakeTensorMode():
        facts = ModelFacts(head_profile=torch.rand(4, 3))
        context = pages_context(torch.rand(4, 3, 9), 5 * 12, torch.rand(4, 2), facts)
        counts = method.run(context)
        assert counts.shape == (4, 3)
        if method.observe is not None:
            seen = _layer(torch.rand(4, 6, 8), torch.rand(20, 3, 8), 0.3)
            facts = ModelFacts(output_projection=[torch.rand(5, 48)])
            seen = replace(seen, scores=torch.rand(3, 20), facts=facts)
            assert method.observe(seen).dtype == torch.float32
