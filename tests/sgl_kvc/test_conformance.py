"""Our methods keep the keys that kvpress keeps, on a prompt of the embedded model.

kvpress is the field's reference implementation. Both see the same tensors and keep the same
number of keys, page size 1; the kept sets must be equal head by head. Keys whose scores tie
where the budget ends are interchangeable.

How ours are asked to be theirs, where defaults differ:

* SnapKV's paper pools with a maximum; kvpress takes the mean.
* ObservedAttention divides H2O's sum by the number of queries that see the key: `average`.
* TOVA, KNorm and the like have no sinks; TOVA keeps the last key in any case.
* PyramidKV falls back to SnapKV when its last layer would get less than the window, which ours
  never does; here the window is small enough for both.
* AdaKV rounds the floor down and ours up; here it is whole.

kvpress has no KV-Compress, Scissorhands, Keyformer, CAKE, DefensiveKV or FastGen: those are
tested against slow references in test_scorers.py and test_attention_scorers.py. Nor has it R-KV,
CompressKV, WindowKV, KVCrush, LaCache, TriAttention or Ada-KV on PyramidKV: test_paper_scorers.py,
test_paper_apportioners.py.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
from random import Random
from types import ModuleType
from typing import Any

import pytest
import torch
from kvc_recall import model_path, vocabulary
from kvc_recall.tasks import sample
from transformers import AutoModelForCausalLM, DynamicCache

from sgl_kvc.policy.base import LayerContext, scorer
from sgl_kvc.policy.facts import ModelFacts
from sgl_kvc.policy.kvs import PromptKVs
from sgl_kvc.policy.selection import select
from sgl_kvc.spec import parse

TOKENS, KEPT = 320, 80
RATIO = 1 - KEPT / TOKENS


def press(name: str, kind: str, **options) -> Any:
    """A press of kvpress's module `name`."""
    module = importlib.import_module(f"kvpress.presses.{name}_press")
    return getattr(module, f"{kind}Press")(**options)


@dataclasses.dataclass
class Layer:
    """What one attention layer saw; tensors as kvpress has them, with a batch of one."""

    module: Any
    kwargs: dict
    hidden: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    attention: torch.Tensor
    queries: torch.Tensor


@pytest.fixture(scope="module", autouse=True)
def kvpress() -> ModuleType:
    """The package without what its __init__ does: import every press, some of which need
    packages we do not, and patch transformers' attention for the whole process."""
    spec = importlib.util.find_spec("kvpress")
    assert spec is not None, "pip install --no-deps kvpress==0.5.5"
    return sys.modules.setdefault("kvpress", importlib.util.module_from_spec(spec))


@pytest.fixture(scope="module")
def model():
    loaded = AutoModelForCausalLM.from_pretrained(
        model_path(), dtype=torch.float32, attn_implementation="eager"
    )
    for layer in loaded.model.layers:
        layer.self_attn.rotary_emb = loaded.model.rotary_emb  # as kvpress does
    return loaded.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    text = sample("needles8", TOKENS, Random(0)).text
    ids = vocabulary.encode(vocabulary.render(text))
    assert len(ids) == TOKENS
    return torch.tensor(ids)


@pytest.fixture(scope="module")
def layers(model, tokens, kvpress) -> list[Layer]:
    from kvpress.utils import get_prerope_query_states
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    seen = []

    def look(module, args, kwargs, output):
        hidden = kwargs["hidden_states"]
        queries = get_prerope_query_states(module, hidden)
        queries, _ = apply_rotary_pos_emb(queries, queries, *kwargs["position_embeddings"])
        seen.append((module, kwargs, hidden, output[1], queries))

    hooks = [
        layer.self_attn.register_forward_hook(look, with_kwargs=True)
        for layer in model.model.layers
    ]
    cache = DynamicCache()
    with torch.no_grad():
        model(tokens[None], past_key_values=cache)
    for hook in hooks:
        hook.remove()
    return [
        Layer(module, kwargs, hidden, kv.keys, kv.values, attention, queries)
        for (module, kwargs, hidden, attention, queries), kv in zip(seen, cache.layers, strict=True)
    ]


@pytest.fixture(scope="module")
def facts(model) -> ModelFacts:
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(4096)[None])
    half = cos.shape[-1] // 2
    return ModelFacts(
        cos_sin=torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1),
        output_projection=[layer.self_attn.o_proj.weight for layer in model.model.layers],
    )


Kept = list[list[set[int]]]


def ours(layers: list[Layer], tokens: torch.Tensor, facts: ModelFacts, **knob) -> Kept:
    """Positions per layer and head."""
    spec = parse({"budget": KEPT, "sinks": 0, "recent": 0, **knob})
    method = scorer(spec)
    scores = []
    for index, layer in enumerate(layers):
        context = LayerContext(
            layer=index,
            layers=len(layers),
            queries=layer.queries[0].transpose(0, 1),
            kvs=PromptKVs.of(layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)),
            scale=layer.module.scaling,
            spec=spec,
            tokens=tokens,
            kept=KEPT,
            facts=facts,
        )
        if method.observe is not None:
            context = dataclasses.replace(context, state=method.observe(context))
        window = context.queries[-spec.window :]
        scores.append(method.run(dataclasses.replace(context, queries=window)))
    chosen = select(torch.stack(scores), spec, KEPT, 1, facts=facts)
    heads = [set(part.tolist()) for part in chosen.positions.split(chosen.pages.tolist())]
    each = len(heads) // len(layers)
    return [heads[i : i + each] for i in range(0, len(heads), each)]


def theirs(layers: list[Layer], press: Any, attention: bool = False) -> Kept:
    """Positions per layer and head, found again by the keys that `press.compress` returns."""
    kept = []
    for layer in layers:
        keys, values = layer.keys, layer.values
        observed = layer.attention if attention else None
        left, _ = press.compress(layer.module, layer.hidden, keys, values, observed, layer.kwargs)
        rest = torch.ones(keys.shape[:3], dtype=torch.bool)
        if left.shape == keys.shape:  # AdaKV masks keys instead of removing them
            rest[layer.module.masked_key_indices] = False
        else:
            rest = (left[:, :, :, None] == keys[:, :, None]).all(dim=-1).any(dim=2)
        kept.append([set(row.nonzero().flatten().tolist()) for row in rest[0]])
    return kept


def scores_of(layers: list[Layer], press: Any, attention: bool = False) -> list[torch.Tensor]:
    """[H, n] a layer."""
    return [
        press.score(
            layer.module,
            layer.hidden,
            layer.keys,
            layer.values,
            layer.attention if attention else None,
            layer.kwargs,
        )[0]
        for layer in layers
    ]


def assert_same(got: Kept, expected: Kept, scores: list[torch.Tensor]) -> None:
    """The same sets, but for keys that tie."""
    for index, (mine, reference) in enumerate(zip(got, expected, strict=True)):
        for head, (a, b) in enumerate(zip(mine, reference, strict=True)):
            assert len(a) == len(b), f"layer {index} head {head}: {len(a)} keys, {len(b)} theirs"
            row = scores[index][head]
            swapped = row[sorted(a - b)], row[sorted(b - a)]
            close = torch.isclose(torch.cat(swapped), swapped[1][:1], rtol=1e-5, atol=0)
            assert a == b or close.all(), f"layer {index} head {head}: {sorted(a ^ b)}"


SNAP = {"scorer": "attention-window", "norm": "l1", "pool": 5, "pooling": "mean"}
CASES = {
    "snapkv": (
        ("snapkv", "SnapKV", {"window_size": 20}),
        SNAP | {"window": 20, "recent": 20},
    ),
    "tova": (("tova", "TOVA", {}), {"scorer": "tova", "recent": 1}),
    "knorm": (("knorm", "Knorm", {}), {"scorer": "knorm"}),
    "keydiff": (("keydiff", "KeyDiff", {}), {"scorer": "keydiff"}),
    "expected-attention": (
        ("expected_attention", "ExpectedAttention", {}),
        {"scorer": "expected-attention", "sinks": 4},
    ),
    "expected-attention, mean alone": (
        (
            "expected_attention",
            "ExpectedAttention",
            {"use_covariance": False, "use_vnorm": False, "n_future_positions": 64},
        ),
        {
            "scorer": "expected-attention",
            "sinks": 4,
            "covariance": False,
            "value_norm": False,
            "future": 64,
        },
    ),
    "streaming-llm": (("streaming_llm", "StreamingLLM", {}), {"scorer": "recency", "sinks": 4}),
    "h2o": (
        ("observed_attention", "ObservedAttention", {}),
        {"scorer": "full-attention", "norm": "l1", "average": True},
    ),
    "lagkv": (
        ("lagkv", "LagKV", {"lag_size": 32}),
        {"scorer": "lagkv", "lag": 32, "sinks": 4},
    ),
    "pyramidkv": (
        ("pyramidkv", "PyramidKV", {"window_size": 4, "beta": 10}),
        SNAP | {"window": 4, "recent": 4, "apportioner": "pyramid", "beta": 10},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_keeps_what_kvpress_keeps(case, layers, tokens, facts):
    (name, kind, options), knob = CASES[case]
    reference = press(name, kind, compression_ratio=RATIO, **options)
    observed = case == "h2o"
    expected = theirs(layers, reference, observed)
    got = ours(layers, tokens, facts, **{"apportioner": "uniform", **knob})
    assert_same(got, expected, scores_of(layers, reference, observed))


def test_critical_kv(layers, tokens, facts):
    snap = press("snapkv", "SnapKV", compression_ratio=RATIO, window_size=20)
    reference = press("criticalkv", "CriticalKV", press=snap)
    got = ours(
        layers, tokens, facts, scorer="critical", apportioner="uniform",
        window=20, recent=20, pool=5, pooling="mean",
    )  # fmt: skip
    assert_same(got, theirs(layers, reference), scores_of(layers, reference))
    assert got != theirs(layers, snap), "the values changed nothing"


@pytest.mark.parametrize("window", [4, 20])
def test_ada_kv(window, layers, tokens, facts, monkeypatch):
    """With a window of 4 keys the floor of 16 holds some heads up."""
    monkeypatch.setattr(layers[0].module.config, "_attn_implementation", "sdpa")
    snap = press("snapkv", "SnapKV", compression_ratio=RATIO, window_size=window)
    reference = press("adakv", "AdaKV", press=snap)
    got = ours(layers, tokens, facts, **SNAP, apportioner="adaptive", window=window, recent=window)
    assert_same(got, theirs(layers, reference), scores_of(layers, snap))
    sizes = {len(head) for layer in got for head in layer}
    assert len(sizes) > 1
