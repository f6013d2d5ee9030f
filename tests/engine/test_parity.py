"""Without compression nothing changes; with it, a result does not depend on the cache."""

from __future__ import annotations

import random

from tests.engine.conftest import prompt

LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 100, 255, 256, 257, 500, 900, 1500]


def _prompts(count: int) -> list[list[int]]:
    lengths = random.Random(7)
    drawn = LENGTHS + [lengths.randrange(1, 900) for _ in range(count - len(LENGTHS))]
    return [prompt(n, seed=i, shared=min(n // 2, 200)) for i, n in enumerate(drawn)]


def test_rate_one_is_plain_sglang(server, plain_server):
    """208 prompts of mixed length, half of each shared, in batches, cold and then cached."""
    prompts = _prompts(208)
    for _ in range(2):  # the second pass hits the prefix cache
        for first in range(0, len(prompts), 26):
            batch = prompts[first : first + 26]
            expected = plain_server.generate(batch)
            for knob in (None, {"rate": 1}):
                got = server.generate(batch, knob)
                for a, b, ids in zip(expected, got, batch, strict=True):
                    assert a["output_ids"] == b["output_ids"], f"{len(ids)} tokens"
                    assert b["kv_compression"]["skipped"] is None
                    assert b["kv_compression"]["rate_achieved"] == 1


def test_rate_eight_does_not_depend_on_the_cache(server):
    """Cold, after its own full prompt was cached, and after a longer one was: one answer."""
    for seed in range(12):
        tokens = 300 + 61 * seed
        ids = prompt(tokens, seed=1000 + seed)
        server.client().post("/flush_cache", params={"timeout": 10})
        cold = server.generate(ids, {"rate": 8})
        warm = server.generate(ids, {"rate": 8})
        server.client().post("/flush_cache", params={"timeout": 10})
        server.generate(ids + prompt(64, seed=9), None)
        longer = server.generate(ids, {"rate": 8})
        assert cold["meta_info"]["cached_tokens"] == 0
        assert warm["meta_info"]["cached_tokens"] > tokens - 32 - 16
        assert longer["meta_info"]["cached_tokens"] > tokens - 32 - 16
        assert cold["output_ids"] == warm["output_ids"] == longer["output_ids"]
        assert cold["kv_compression"] == warm["kv_compression"] == longer["kv_compression"]


def test_openai_bodies_are_sglangs_own(server, plain_server):
    """Beside the report nothing is added to, changed in or missing from a response."""
    text = " ".join(f"w{i * 37 % 500}" for i in range(300))
    common = {"model": "m", "max_tokens": 8, "temperature": 0}
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ("/v1/completions", {"prompt": text}),
    ):
        with server.client() as ours, plain_server.client() as theirs:
            got = ours.post(path, json=common | body).json()
            expected = theirs.post(path, json=common | body).json()
        assert got.pop("kv_compression")["skipped"] is None
        for answer in (got, expected):
            for changing in ("id", "created", "usage"):
                answer.pop(changing)
        assert got == expected
