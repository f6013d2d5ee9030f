"""Server options under which a client's request used to end the scheduler."""

from __future__ import annotations

import json

import pytest

from tests.engine.conftest import prompt
from tests.servers import Engine, assert_no_leak, sglang

BAD = {"custom_params": {"kv_compression": {"rate": "8"}}}


@pytest.fixture(scope="module")
def server(tiny_llama) -> Engine:
    """No chunks; and a knob that nobody can use for requests that bring no parameters."""
    memory = ("--max-total-tokens", "16384", "--mem-fraction-static", "0.3")
    options = ("--chunked-prefill-size", "-1", "--preferred-sampling-params", json.dumps(BAD))
    with sglang(tiny_llama, *memory, *options) as running:
        yield running


@pytest.mark.parametrize(("tokens", "question"), [(600, 40), (100, 90), (2000, 700)])
def test_a_question_apart_without_chunked_prefill(server, tokens, question):
    """SGLang goes on with a cut request by the size of its chunks, which there is none of."""
    ids, knob = prompt(tokens, seed=tokens), {"rate": 4, "question_tokens": question}
    report = server.generate(ids, knob)["kv_compression"]
    whole = (tokens - question) // 16
    assert report["blocks"]["before"] == -(-tokens // 16)
    assert (report["skipped"] is None) == (whole > 1)
    if whole > 1:
        tail = tokens - whole * 16
        assert report["kept_per_head"]["mean"] == -(-whole // 4) * 16 + tail
    assert_no_leak(server)


def test_a_bad_knob_that_nobody_validated_is_reported(server):
    report = server.generate(prompt(200, seed=1))["kv_compression"]
    assert report["skipped"].startswith("kv_compression.rate: must be a finite number")
    assert server.generate(prompt(200, seed=1), {"rate": 4})["kv_compression"]["skipped"] is None


def test_copies_of_a_prompt_are_not_prefilled_in_full(server):
    """A policy that looks at every query finds what it saw of the prompt before its copies."""
    knob = {"rate": 4, "policy": "h2o"}
    answers = server.generate(prompt(800, seed=3), knob, n=3, temperature=0.5)
    assert [one["kv_compression"]["skipped"] for one in answers] == [None] * 3
    assert min(one["meta_info"]["cached_tokens"] for one in answers) >= 700


def test_prefix_tokens_stay_shared(server):
    """Requests at once that begin alike hold the beginning together, and answer as alone."""
    shared, knob = prompt(640, seed=4), {"rate": 2, "prefix_tokens": 640}
    asked = [shared + prompt(200, seed=50 + i) for i in range(6)]
    alone = [server.generate(ids, knob) for ids in asked]
    together = server.generate(asked, knob)
    assert [one["output_ids"] for one in together] == [one["output_ids"] for one in alone]
    for one in (*alone, *together):
        report = one["kv_compression"]
        assert report["blocks"] == {"before": 53, "after": 6 + 1, "shared": 40}
        assert report["kept_per_head"]["mean"] == 640 + 6 * 16 + 8
    assert_no_leak(server)
