"""The files in docs/adding-a-policy.md do what it says of them."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sgl_kvc.policy.base import LayerContext, apportioner, scorer
from sgl_kvc.policy.kvs import PromptKVs
from sgl_kvc.policy.selection import select
from sgl_kvc.spec import PRESETS, CompressionSpec, Preset, SpecError, catalogue, parse
from tests.sgl_kvc.contexts import pages_context

GUIDE = (Path(__file__).parents[2] / "docs" / "adding-a-policy.md").read_text()
FILES = re.findall(r"`sgl_kvc/policy/(\w+)/(\w+)\.py`:\n\n```python\n(.*?)```", GUIDE, re.DOTALL)
KNOB = json.loads(re.search(r'^    (\{"rate".*\})$', GUIDE, re.MULTILINE)[1])
LAYERS, HEADS, GROUP, DIM, TOKENS = 4, 2, 3, 8, 96


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The guide's files, where the methods are."""
    assert [family for family, _, _ in FILES] == ["scorers", "apportioners"]
    for family, name, text in FILES:
        path = tmp_path / family / f"{name}.py"
        path.parent.mkdir()
        path.write_text(text)
        package = importlib.import_module(f"sgl_kvc.policy.{family}")
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(path.parent)])
        method = catalogue._read(family, path)
        monkeypatch.setitem(catalogue.methods(family), method.name, method)
    yield
    for family, name, _ in FILES:
        sys.modules.pop(f"sgl_kvc.policy.{family}.{name}", None)


def layer(index: int, spec: CompressionSpec) -> LayerContext:
    torch.manual_seed(index)
    keys, values = torch.randn(2, TOKENS, HEADS, DIM)
    queries = torch.randn(spec.window, HEADS * GROUP, DIM)
    tokens = torch.zeros(TOKENS, dtype=torch.int64)
    return LayerContext(index, LAYERS, queries, PromptKVs.of(keys, values), 0.3, spec, tokens, 12)


def test_the_request_of_the_guide_is_served():
    spec = parse(KNOB)
    assert spec.parameters == {"window": 32, "norm": "l1", "dense_layers": 2, "factor": 2.0}
    scores = torch.stack([scorer(spec).run(layer(index, spec)) for index in range(LAYERS)])
    assert scores.shape == (LAYERS, HEADS, TOKENS)
    assert scores.dtype == torch.float32
    assert torch.isfinite(scores).all()
    chosen = select(scores, spec, 6, 8)
    assert chosen.pages.view(LAYERS, HEADS).tolist() == [[8, 8], [8, 8], [4, 4], [4, 4]]


def test_the_scorer_multiplies_attention_and_value():
    spec = parse(KNOB)
    context = layer(0, spec)
    once = scorer(spec).run(context)
    context.values[5] *= 3
    ratio = scorer(spec).run(context) / once
    assert torch.allclose(ratio[:, 5], torch.tensor(3.0))
    assert torch.allclose(ratio[:, :5], torch.tensor(1.0))


@pytest.mark.parametrize("dense_layers", [0, 2, 128])
@pytest.mark.parametrize("factor", [1, 64])
@pytest.mark.parametrize("mean", [1, 5, 12])
def test_the_apportioner_keeps_the_contract(dense_layers, factor, mean):
    spec = parse(KNOB | {"dense_layers": dense_layers, "factor": factor})
    context = pages_context(torch.zeros(LAYERS, HEADS, 12), mean * LAYERS * HEADS)
    counts = apportioner(spec).run(context)
    assert int(counts.sum()) == context.total
    assert int(counts.min()) >= 1
    assert int(counts.max()) <= 12


def test_parameters_are_checked_and_described():
    with pytest.raises(SpecError, match=r"factor: must be a number from 1 to 64"):
        parse(KNOB | {"factor": 65})
    with pytest.raises(SpecError, match="norm"):
        parse(KNOB | {"norm": "l3"})
    for family, name in (("scorers", "value-aware"), ("apportioners", "dense-first")):
        method = catalogue.methods(family)[name]
        assert method.source
        assert method.summary.endswith(".")
        assert all(parameter.about for parameter in method.parameters.values())


def test_the_preset_names_them(monkeypatch):
    (entry,) = re.findall(r"```python\n(\"[^`]*?),\n```", GUIDE)
    name, preset = next(iter(eval("{" + entry + "}", {"Preset": Preset}).items()))
    monkeypatch.setitem(PRESETS, name, preset)
    spec = parse({"rate": 8, "policy": name})
    assert (spec.scorer, spec.apportioner) == ("value-aware", "dense-first")
    assert spec.window == spec.recent == 32
