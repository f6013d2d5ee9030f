"""Kernels that compression launches, compiled at startup: no request waits for a compiler.

What decode and prefill launch, SGLang's own captures and first request compile as well; layers
differ there, since Triton compiles anew for the numbers 0 and 1.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import torch
from kvc_kernels.batch import Batch
from kvc_kernels.compact import compact, move
from kvc_kernels.decode import decode
from kvc_kernels.extend import extend

from sgl_kvc.cache.request import missing_facts
from sgl_kvc.policy.scores import PromptScores, score_together
from sgl_kvc.policy.selection import select
from sgl_kvc.spec import PRESETS, CompressionSpec, Extent, parse

if TYPE_CHECKING:
    from sgl_kvc.pool.arena import ArenaKVPool

logger = logging.getLogger(__name__)

#: Pages of the prompts that are compressed, and the most layers that differ to Triton.
_PAGES, _LAYERS = 16, 3
#: Every kernel of window attention and every one of smoothing, whatever a request asks for.
_OPTIONS = [
    {"group": "sum", "norm": "l2", "pool": 1, "half_life": 3},
    {"group": "sum", "norm": "l1", "pool": 7, "pooling": "max"},
    {"group": "mean", "norm": "l2", "pool": 7, "pooling": "mean"},
    {"group": "mean", "norm": "l1", "pool": 7, "pooling": "max", "half_life": 3},
    {"group": "mean", "norm": "l1", "pool": 7, "pooling": "mean", "half_life": 3},
]


@torch.inference_mode()
def warm_up(pool: ArenaKVPool, query_heads: int, dtype: torch.dtype, scale: float) -> None:
    """Compress small prompts of zeros by every policy that the model can be served with.

    All of them lie in block 0, which pads batches and is nobody's, and are copied to it.

    Parameters
    ----------
    pool : bound to the rows of requests; nothing but its block 0 is written.
    query_heads : ``H * G``.
    dtype : of the model's queries.
    scale : factor on attention logits.
    """
    begin = time.perf_counter()
    _attend(pool, query_heads, dtype, scale)
    window = {"scorer": "attention-window", "apportioner": "global"}
    for knob in [{"policy": name} for name in PRESETS] + [window | each for each in _OPTIONS]:
        spec = parse({"rate": 4, "min_tokens": 0, **knob})
        if missing_facts(spec, pool.facts) is None:
            for prompts in (1, 2):
                _compress(pool, spec, query_heads, dtype, scale, prompts)
    _compress_again(pool, parse({"rate": 4, "min_tokens": 0}))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    logger.info("kernels of compression are ready, after %.1f s", time.perf_counter() - begin)


def _compress(
    pool: ArenaKVPool,
    spec: CompressionSpec,
    query_heads: int,
    dtype: torch.dtype,
    scale: float,
    prompts: int,
) -> None:
    """As many prompts of a batch, scored together; then one of them is compressed."""
    page, device = pool.page_size, pool.arena_k.device
    tokens = _PAGES * page
    extent = Extent.of(spec, tokens, page)
    assert extent.compressed
    rows = torch.zeros(prompts, tokens, dtype=torch.int32, device=device)
    rows += torch.arange(tokens, dtype=torch.int32, device=device) % page
    dims = pool.arena_k.shape[-1], pool.arena_v.shape[-1]
    queries = torch.zeros(prompts, tokens, query_heads, dims[0], dtype=dtype, device=device)
    lse = torch.zeros(prompts, tokens, query_heads, device=device)
    scored = [
        PromptScores(spec, extent, [0] * tokens, page, pool.layer_num, pool.facts)
        for _ in range(prompts)
    ]
    tables: dict = {}
    for layer in range(pool.layer_num):
        found = []
        for nth, scores in enumerate(scored):
            kvs = pool.prompt(pool.start_layer + layer, rows[nth])
            context = scores.look(layer, queries[nth], kvs, scale, lse[nth])
            assert context is not None
            found.append((scores, context))
        score_together(found, tables)
    chosen = scored[0].select()
    target = torch.zeros(extent.segment_blocks, dtype=torch.int64, device=device)
    compact(pool.arena_k, pool.arena_v, rows[0].clone(), chosen.positions, chosen.pages, target)


def _compress_again(pool: ArenaKVPool, spec: CompressionSpec) -> None:
    """What is launched when a request that decodes is compressed again."""
    page, layers, heads = pool.page_size, pool.layer_num, pool.head_num
    device = pool.arena_k.device
    scores = torch.zeros(layers, heads, _PAGES * page, device=device)
    first = torch.zeros(layers * heads, dtype=torch.int64, device=device)
    chosen = select(scores, spec, 1, page, first=first, facts=pool.facts)
    target = torch.zeros(1, dtype=torch.int64, device=device)
    metric = torch.zeros(1, layers, heads, page, device=device)
    for arena in (pool.arena_k, pool.arena_v, metric):
        places = torch.zeros_like(chosen.positions)
        move(arena, places, places, target)


def _attend(pool: ArenaKVPool, query_heads: int, dtype: torch.dtype, scale: float) -> None:
    """Prefill and decode of row 0, which pads batches; with what decode pays each key, too."""
    cache, device = pool.cache, pool.arena_k.device
    metric = torch.zeros(1, pool.layer_num, pool.head_num, pool.page_size, device=device)
    tracked = torch.zeros(len(pool.cache.req_to_token), dtype=torch.int32, device=device)
    for requests in (1, 2):
        rows = torch.zeros(requests, dtype=torch.int64, device=device)
        ones = torch.ones_like(rows)
        batch = Batch(cache, rows, ones, [1] * requests)
        shape = requests, query_heads, pool.arena_k.shape[-1]
        query = torch.zeros(shape, dtype=dtype, device=device)
        for layer in range(min(_LAYERS, pool.layer_num)):
            extend(query, batch, layer, scale)
            decode(query, batch, layer, scale)
            decode(query, batch, layer, scale, metric=metric, tracked=tracked)
