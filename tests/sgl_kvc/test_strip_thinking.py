"""``--strip-thinking-cache`` with requests that were compressed.

A reasoning request that ends has SGLang ask the cache to release its prompt's positions alone, and
free everything behind by itself. Where compression has released positions behind the prompt, these
are zeros in the request's row: block 0, which is nobody's.
"""

from __future__ import annotations

import pytest
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from sgl_kvc.cache.request import Request
from tests import tiny_models
from tests.sgl_kvc.lives import PAGE
from tests.sgl_kvc.test_cache import Lives


@pytest.fixture(scope="module", autouse=True)
def server_args(tmp_path_factory):
    model = tiny_models.write(tmp_path_factory.mktemp("model"))
    set_global_server_args_for_scheduler(
        ServerArgs(model_path=str(model), device="cpu", strip_thinking_cache=True)
    )


@pytest.fixture
def lives():
    lives = Lives()
    lives.build()
    return lives


def ends(lives: Lives) -> None:
    """The first request ends after some thinking; every block is free or in the tree again."""
    req = lives.world.live[0]
    req.reasoning_tokens = len(req.output_ids)
    assert req.effective_kv_committed_len() == len(req.origin_input_ids) < req.kv_committed_len
    lives.finish(which=0, insert=True)
    free = lives.world.allocator.free_pages.tolist()
    assert 0 not in free
    assert len(free) == len(set(free))
    lives.accounting()
    in_tree = lives.world.cache.evictable_size()
    assert lives.world.allocator.available_size() + in_tree == lives.world.tokens
    lives.teardown()


@pytest.mark.parametrize("prompt", [3 * PAGE, 3 * PAGE + 1, 4 * PAGE - 1])
def test_a_request_without_compression(lives, prompt):
    lives.start(0, prompt, 0, None, 0, keep=True)
    lives.decode(30)
    ends(lives)


@pytest.mark.parametrize("prompt", [10 * PAGE, 10 * PAGE + 1, 11 * PAGE - 1])
def test_a_request_compressed_after_its_prefill(lives, prompt):
    lives.start(0, prompt, 0, {"rate": 4, "min_tokens": 0}, 0, keep=True)
    lives.decode(30)
    assert lives.world.live[0].cache_protected_len < prompt
    ends(lives)


@pytest.mark.parametrize("prompt", [3 * PAGE, 3 * PAGE + 1, 4 * PAGE - 1])
@pytest.mark.parametrize("question", [0, 5])
def test_a_request_compressed_again_in_decode(lives, prompt, question):
    """Its segment ends up behind the prompt, with zeros between them."""
    knob = {"budget": 8, "recompress_every": 4, "min_tokens": 0, "policy": "kv-compress"}
    knob["question_tokens"] = question
    lives.start(0, prompt, 0, knob, 0, keep=True)
    for _ in range(12):
        lives.decode(5)
    if not question:
        assert lives.world.live[0].cache_protected_len > prompt + PAGE
    ends(lives)


@pytest.mark.parametrize("prompt", [3 * PAGE, 3 * PAGE + 1, 4 * PAGE - 1])
def test_a_request_compressed_after_it_was_retracted(lives, prompt):
    """What it had thought is then part of what is prefilled and compressed."""
    knob = {"rate": 8, "min_tokens": 0}
    lives.start(0, prompt, 0, knob, 0, keep=True)
    for _ in range(12):
        lives.decode(5)
    req = lives.world.live.pop()
    release_kv_cache(req, lives.world.cache, is_insert=False)
    req.reset_for_retract()
    resume(lives, req)
    lives.decode(5)
    assert req.cache_protected_len > prompt + PAGE
    ends(lives)


def test_the_peak_is_of_all_that_was_held(lives):
    lives.start(0, 3 * PAGE, 0, {"budget": 8, "recompress_every": 40}, 0, keep=True)
    for _ in range(4):
        lives.decode(5)
    req = lives.world.live[0]
    held = req.kv_committed_len - req.cache_protected_len
    ends(lives)
    assert Request.of(req).report.to_json()["decode"]["kept_per_head_peak"] >= held


def resume(lives: Lives, req) -> None:
    """Prefill a retracted request again, with what it had decoded."""
    assert lives.world.prefill(req, lives.world.admit(req), req.seqlen)
    lives.world.cache.cache_unfinished_req(req)
    lives.world.live.append(req)
