"""How much a GPU is launched with to compress a prompt, and that all of it is compiled before."""

from __future__ import annotations

import pytest
import torch

from sgl_kvc.attention.warm_up import warm_up
from sgl_kvc.cache import continual
from sgl_kvc.cache.compaction import compress
from sgl_kvc.spec import PRESETS
from tests.sgl_kvc.fake_gpu import (
    BOTH,
    GROUP,
    HEADS,
    LAYERS,
    N,
    backend_of,
    compressible,
    facts,
    observe_all,
    prefilled,
    scored_batch,
)


@pytest.mark.parametrize(
    ("policy", "kernels"),
    [("kv-compress", 2), ("kvc-paper", 2), ("snapkv", 2), ("ada-kv", 2), ("tova", 1)],
)
@pytest.mark.parametrize("requests", [1, 3])
def test_a_layer_of_all_prompts_is_scored_in_two_launches(
    gpu, gpu_pool, gpu_rows, tmp_path, policy, kernels, requests
):
    """Keys are not gathered, nor values; what the host knows is told once."""
    backend = backend_of(gpu_pool, gpu_rows, tmp_path)
    batch = scored_batch(backend, requests, {"rate": 4, "policy": policy})
    gpu.forget()
    observe_all(backend, batch)
    assert len(gpu.kernels) == kernels * LAYERS
    told = requests + (requests > 1)  # token ids of each, and where they all are
    of_scorer = {"mean": requests * LAYERS} if policy == "tova" else {}  # over a layer's heads
    assert gpu.operations == {"to": told} | of_scorer
    assert all(request.scores.complete for request in gpu_pool.requests.values())


def test_a_second_reading_takes_no_more_launches_for_more_parts(gpu, gpu_pool, gpu_rows, tmp_path):
    """Of 200 tokens there is one part of 256 and there are 13 of 16."""
    backend, counts = backend_of(gpu_pool, gpu_rows, tmp_path), []
    for part in (256, 16):
        knob = {"rate": 4, "policy": "virtual-repeat", "part": part}
        batch = scored_batch(backend, 1, knob, facts())
        gpu.forget()
        observe_all(backend, batch)
        counts.append((len(gpu.kernels), dict(gpu.operations)))
    assert counts[0] == counts[1]


def test_prompts_of_other_scorers_do_not_share(gpu, gpu_pool, gpu_rows, tmp_path):
    backend = backend_of(gpu_pool, gpu_rows, tmp_path)
    batch = scored_batch(backend, 2, {"rate": 4, "policy": "kv-compress"})
    gpu_pool.requests["1"].scores = prefilled({"rate": 4, "policy": "snapkv"}).scores
    gpu.forget()
    observe_all(backend, batch)
    assert len(gpu.kernels) == 4 * LAYERS


@pytest.mark.parametrize(
    ("policy", "most"),
    [("kv-compress", 9), ("snapkv", 4), ("ada-kv", 18), ("pyramidkv", 50), ("fastgen", 54)],
)
def test_selection_sorts_no_scores(gpu, policy, most):
    """Of every head that takes hundreds of launches; what layers share are few numbers."""
    known = facts()
    known.head_weights(1.0)  # for all prompts
    scores = prefilled({"rate": 4, "policy": policy}, known, chunks=BOTH).scores
    gpu.forget()
    scores.select()
    assert gpu.count <= most, (gpu.kernels, gpu.operations)
    assert "topk" not in gpu.operations
    sorts = {"kv-compress": 0, "snapkv": 0, "ada-kv": 0}.get(policy, 2)
    assert gpu.operations["sort"] <= sorts


def test_launches_of_a_compression(gpu, gpu_pool, gpu_rows):
    """From complete scores to a request that reads its segment, whatever the number of layers."""
    cache, req = compressible(
        gpu_pool, gpu_rows, {"rate": 4, "policy": "kv-compress", "force": True}
    )
    gpu_pool.facts.head_weights(1.0)  # for all prompts
    gpu.forget()
    assert compress(cache, req)
    assert gpu.count <= 34, (gpu.kernels, gpu.operations)


def test_no_kernel_is_compiled_for_a_request(gpu, gpu_pool, gpu_rows, tmp_path):
    """All that Triton compiles kernels for was there when the server started."""
    knob = {"budget": 64, "recompress_every": 16}
    cache, req = compressible(gpu_pool, gpu_rows, knob)
    backend = backend_of(gpu_pool, gpu_rows, tmp_path)
    gpu_pool.facts = facts()
    gpu.forget()
    warm_up(gpu_pool, HEADS * GROUP, torch.bfloat16, 0.25)
    ready = set(gpu.kernels)
    names = {kernel.name for kernel in ready}
    gpu.forget()
    own = {"scorer": "attention-window", "apportioner": "adaptive", "group": "mean", "window": 1}
    own |= {"norm": "l2", "pool": 31, "pooling": "mean", "half_life": 0.5}
    for asked in [{"policy": name} for name in PRESETS] + [own]:
        for requests in (1, 3):
            batch = scored_batch(backend, requests, {"rate": 4} | asked, facts())
            observe_all(backend, batch)
            for request in gpu_pool.requests.values():
                request.scores.select()
    assert compress(cache, req)
    req.kv_committed_len = N + 24
    assert continual.recompress(cache, req)
    late = {kernel for kernel in gpu.kernels if kernel not in ready}
    assert not late
    assert {kernel.name for kernel in gpu.kernels} == names, "the check looks at all of them"
