"""What the engine answers with a really compressed cache is what masking alone would answer."""

from __future__ import annotations

from random import Random

import pytest
from kvc_recall import model_path
from kvc_recall.tasks import sample
from transformers import AutoTokenizer

from bench.offline import MaskedModel, prompt_tokens
from sgl_kvc.spec import parse
from tests.servers import sglang

TASKS = ("needles32", "questions8", "copy32", "chains")
KNOBS = {
    "kv-compress": {"rate": 16},
    "kv-compress, question apart": {"rate": 4, "question": True},
    "snapkv": {"rate": 16, "policy": "snapkv"},
    "keydiff": {"rate": 4, "policy": "keydiff"},
}


@pytest.fixture(scope="module")
def recall():
    with sglang(model_path(), "--max-total-tokens", "65536") as running:
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
