"""The GPU path in SGLang's own scheduler: Triton's interpreter stands in for the GPU."""

from __future__ import annotations

import pytest

from tests import tiny_models
from tests.engine.conftest import prompt
from tests.servers import Engine, assert_no_leak, sglang

CASES = [
    (None, 70),
    ({"rate": 4}, 150),
    ({"rate": 4, "question_tokens": 20}, 150),
    ({"rate": 2, "policy": "snapkv"}, 90),
    ({"rate": 3, "policy": "h2o"}, 80),
    ({"budget": 32, "recompress_every": 16}, 100),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The interpreter takes a fifth of a second for a layer of attention: two layers will do."""
    return tiny_models.write(
        tmp_path_factory.mktemp("model"), layers=2, query_heads=4, kv_heads=2, head_dim=16
    )


def answers(server: Engine) -> list[dict]:
    """Each alone, then the prompt again with what is cached of it."""
    found = []
    for number, (knob, tokens) in enumerate(CASES):
        ids, length = prompt(tokens, seed=number), 20 if knob and "budget" in knob else 4
        for _ in range(2):
            found.append(server.generate(ids, knob, max_new_tokens=length, ignore_eos=True))
    assert_no_leak(server)
    return found


def test_triton_serves_what_torch_serves(folder):
    """Prompts of several chunks, too."""
    arguments = ("--max-total-tokens", "2048", "--chunked-prefill-size", "96")
    with sglang(folder, *arguments) as server:
        expected = answers(server)
    with sglang(folder, *arguments, "--kvc-decode", "triton", TRITON_INTERPRET="1") as server:
        got = answers(server)
        assert "decode kernel over the spans of the KV cache: triton" in server.log.read_text()
    compressed = [one for one in got if one["kv_compression"]["rate_achieved"] > 1.3]
    assert len(compressed) == 2 * (len(CASES) - 1)
    for one, other in zip(got, expected, strict=True):
        assert one["output_ids"] == other["output_ids"]
        assert one["kv_compression"] == other["kv_compression"]
        assert one["meta_info"]["cached_tokens"] == other["meta_info"]["cached_tokens"]
