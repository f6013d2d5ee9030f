"""What the engine answers with a really compressed cache is what masking alone would answer."""

from __future__ import annotations

from random import Random

import pytest
from kvc_recall import model_path
from kvc_recall.tasks import sample
from transformers import AutoTokenizer

from bench.offline import MaskedModel, prompt_tokens
from sgl_kvc.policy.kvs import PromptKVs
from sgl_kvc.policy.scores import PromptScores
from sgl_kvc.spec import Extent, parse
from tests.servers import sglang

TASKS = ("needles32", "questions8", "copy32", "chains")
KNOBS = {
    "kv-compress": {"rate": 16},
    "question apart": {"rate": 4, "question": True},
    "virtual-repeat-echo": {"rate": 16, "policy": "virtual-repeat-echo"},
    "snapkv": {"rate": 16, "policy": "snapkv"},
    "keydiff": {"rate": 4, "policy": "keydiff"},
}


@pytest.fixture(scope="module")
def recall():
    """Prefills in chunks that no part of a prompt ends with."""
    chunks = ("--chunked-prefill-size", "208")
    with sglang(model_path(), "--max-total-tokens", "65536", *chunks) as running:
        yield running


@pytest.fixture(scope="module")
def masked() -> MaskedModel:
    return MaskedModel(model_path())


@pytest.mark.parametrize("name", KNOBS)
def test_the_engine_is_the_masked_model(recall, masked, name):
    """At least 99 % of the answers are the same; many are wrong, at these rates, in both."""
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    asked, knobs = [], []
    for i in range(28):
        prompt = sample(TASKS[i % len(TASKS)], 512, Random(77_000_000 + i))
        asked.append(prompt_tokens(tokenizer, prompt.text))
        knob = dict(KNOBS[name])
        if knob.pop("question", False):
            knob["question_tokens"] = 40
        knobs.append(knob)
    most = 72
    same = 0
    for ids, knob in zip(asked, knobs, strict=True):
        answer = recall.generate(ids, knob, max_new_tokens=most)
        assert answer["kv_compression"]["skipped"] is None
        same += answer["output_ids"] == masked.generate(ids, parse(knob), most)
    assert same >= 0.99 * len(asked)


@pytest.mark.parametrize("policy", ["virtual-repeat", "virtual-repeat-echo"])
def test_the_same_is_kept_whatever_the_chunks_and_who_sums(masked, policy):
    """Of 20 prompts at least 19 to the last position: rounding may swap two equal scores."""
    spec, page = parse({"rate": 8, "policy": policy}), masked.page_size
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    scale, same = masked.config.head_dim**-0.5, 0
    for i in range(20):
        prompt = sample(TASKS[i % len(TASKS)], 512, Random(78_000_000 + i))
        tokens = prompt_tokens(tokenizer, prompt.text)
        extent, seen = Extent.of(spec, len(tokens), page), masked.layers(tokens)
        chosen = []
        for chunk in (len(tokens), 100 + i):
            scores = PromptScores(spec, extent, tokens, page, len(seen), masked.facts)
            for begin in range(0, len(tokens), chunk):
                end = min(begin + chunk, len(tokens))
                for layer, (queries, keys, values, lse) in enumerate(seen):
                    cached = PromptKVs.of(keys[:end], values[:end])
                    known = lse if chunk == len(tokens) else None
                    scores.observe(layer, queries[begin:end], cached, scale, known)
            chosen.append(scores.select())
        whole, parts = chosen
        same += whole.positions.equal(parts.positions) and whole.pages.equal(parts.pages)
    assert same >= 19
