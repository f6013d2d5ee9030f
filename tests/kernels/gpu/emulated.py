"""FlashInfer where there is no GPU.

Its kernels cannot run there. These take their place: they accept what the real functions accept,
write the buffers they write, and read pages as their kernels do.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math

import pytest
import torch

flashinfer = pytest.importorskip("flashinfer")

NOTHING = -5e4  # what FA2 has for the log-sum-exp of no keys: `inf` in math.cuh


def arguments(function, *args, **kwargs) -> dict:
    """What the real `function` would be called with; raises as it would on unknown names."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def attention(query, keys, values, scale, causal=False):
    """[q, Hq, D] over [n, H, D]: the result in float32 and a log-sum-exp of base 2."""
    n, group = len(keys), query.shape[1] // keys.shape[1]
    keys, values = (x.float().repeat_interleave(group, 1) for x in (keys, values))
    logits = torch.einsum("qhd,nhd->qhn", query.float(), keys) * scale
    if causal:
        ahead = torch.arange(n) > torch.arange(len(query))[:, None] + n - len(query)
        logits.masked_fill_(ahead[:, None], -math.inf)
    if not n:
        return torch.zeros_like(query, dtype=torch.float32), torch.full(query.shape[:2], NOTHING)
    out = torch.einsum("qhn,nhd->qhd", logits.softmax(-1), values)
    return out, logits.logsumexp(-1) / math.log(2)


def merge(out_a, lse_a, out_b, lse_b):
    """`merge_state`: MergeStateKernel in cascade.cuh."""
    both = torch.stack([lse_a, lse_b])
    weights = torch.exp2(both - both.amax(0))
    weights = (weights / weights.sum(0))[..., None]
    out = weights[0] * out_a.float() + weights[1] * out_b.float()
    return out.to(out_a.dtype), torch.logsumexp(both * math.log(2), 0) / math.log(2)


def page_length(indptr, last_page, row, page_size) -> int:
    """`get_length` in page.cuh: unsigned 32 bits."""
    pages = int(indptr[row + 1] - indptr[row])
    return ((pages - 1) * page_size + int(last_page[row])) % (1 << 32) if pages else 0


def gather(cache, indices, begin, length):
    """KVs [n, H, D] of a row from a cache [pages, H, P, D]."""
    page_size = cache.shape[2]
    mine = indices[begin : begin + -(-length // page_size)].long()
    return cache[mine].transpose(1, 2).flatten(0, 1)[:length]


class Wrapper:
    """The wrappers' constructor, and `plan` outside CUDA graphs."""

    def __init__(self, *args, **kwargs):
        self.made = arguments(self.real.__init__, self, *args, **kwargs)

    def plan(self, *args, **kwargs):
        self.planned = arguments(self.real.plan, self, *args, **kwargs)

    def result(self, out, lse, return_lse):
        out = out.to(self.planned["q_data_type"])
        return (out, lse) if return_lse else out


class Ragged(Wrapper):
    real = flashinfer.BatchPrefillWithRaggedKVCacheWrapper

    def run(self, *args, **kwargs):
        given, plan = arguments(self.real.run, self, *args, **kwargs), self.planned
        query, spans = given["q"], list(itertools.pairwise(plan["qo_indptr"].tolist()))
        assert given["k"].dtype == plan["kv_data_type"]
        assert plan["causal"]
        assert plan["kv_indptr"].equal(plan["qo_indptr"])
        assert len(query) == spans[-1][1]
        parts = [
            attention(query[a:b], given["k"][a:b], given["v"][a:b], plan["sm_scale"], causal=True)
            for a, b in spans
        ]
        return self.result(*map(torch.cat, zip(*parts, strict=True)), kwargs.get("return_lse"))


class Paged(Wrapper):
    real = flashinfer.BatchPrefillWithPagedKVCacheWrapper

    def run(self, *args, **kwargs):
        given, plan = arguments(self.real.run, self, *args, **kwargs), self.planned
        query, (keys, values) = given["q"], given["paged_kv_cache"]
        assert not plan["causal"]
        assert keys.shape[1:3] == (plan["num_kv_heads"], plan["page_size"]), "HND"
        assert keys.stride() == values.stride()
        indptr, last = plan["paged_kv_indptr"], plan["paged_kv_last_page_len"]
        assert len(plan["paged_kv_indices"]) == indptr[-1]
        parts = []
        for row, (a, b) in enumerate(itertools.pairwise(plan["qo_indptr"].tolist())):
            span = int(indptr[row]), page_length(indptr, last, row, plan["page_size"])
            mine = [gather(x, plan["paged_kv_indices"], *span) for x in (keys, values)]
            parts.append(attention(query[a:b], *mine, plan["sm_scale"]))
        return self.result(*map(torch.cat, zip(*parts, strict=True)), kwargs.get("return_lse"))


class Decode(Wrapper):
    """In CUDA-graph mode: `plan` writes the given buffers, and `run` reads them as they are then.

    Work is split by the planned bounds into chunks of two pages; the kernel cuts every chunk at
    the length it finds on the device (BatchPrefillWithPagedKVCacheDevice in prefill.cuh).
    """

    real = flashinfer.BatchDecodeWithPagedKVCacheWrapper

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        assert int_workspace_buffer.numel() == 8 << 20, "as large as the one it had"
        assert float_workspace_buffer is self.made["float_workspace_buffer"]
        self.plans = int_workspace_buffer

    def plan(self, *args, **kwargs):
        self.planned = plan = arguments(self.real._plan_impl, self, *args, **kwargs)
        made = self.made
        assert made["use_cuda_graph"]
        assert made["use_tensor_cores"]
        assert made["backend"] == "fa2"
        assert plan["indptr"].device.type == plan["last_page_len"].device.type == "cpu"
        made["paged_kv_indptr_buffer"].copy_(plan["indptr"])
        made["paged_kv_last_page_len_buffer"].copy_(plan["last_page_len"])
        made["paged_kv_indices_buffer"][: len(plan["indices"])].copy_(plan["indices"])

    def run(self, *args, **kwargs):
        given, plan, made = arguments(self.real.run, self, *args, **kwargs), self.planned, self.made
        query, (keys, values) = given["q"], given["paged_kv_cache"]
        indptr, indices = made["paged_kv_indptr_buffer"], made["paged_kv_indices_buffer"]
        last, chunk = made["paged_kv_last_page_len_buffer"], 2 * plan["page_size"]
        assert given["enable_pdl"] is False
        assert query.shape[1] == plan["num_qo_heads"]
        assert keys.shape[1] == plan["num_kv_heads"] == 1
        out = torch.empty_like(query)
        for row, pages in enumerate(plan["indptr"].diff().tolist()):
            length = page_length(indptr, last, row, plan["page_size"])
            mine = [gather(x, indices, int(indptr[row]), length) for x in (keys, values)]
            parts = [
                attention(query[[row]], *(x[at : at + chunk] for x in mine), plan["sm_scale"])
                for at in range(0, max(pages, 1) * plan["page_size"], chunk)
            ]
            out[row] = functools.reduce(lambda a, b: merge(*a, *b), parts)[0]
        return out


REAL_FROM_TABLE = flashinfer.decode.trtllm_batch_decode_with_kv_cache


def from_table(*args, **kwargs):
    """`trtllm_batch_decode_with_kv_cache`, for "xqa" and "trtllm-gen"."""
    given = arguments(REAL_FROM_TABLE, *args, **kwargs)
    query, (keys, values), table = given["query"], given["kv_cache"], given["block_tables"]
    assert given["kv_layout"] == "HND"
    assert given["enable_pdl"] is False
    assert query.is_contiguous()
    assert table.dtype == given["seq_lens"].dtype == torch.int32
    assert given["max_seq_len"] == table.shape[1] * keys.shape[2]
    fp8_query = given["backend"] == "trtllm-gen" and keys.dtype == torch.float8_e4m3fn
    assert (query.dtype == torch.float8_e4m3fn) == fp8_query
    out = torch.empty_like(query, dtype=given["out_dtype"])
    for row, length in enumerate(given["seq_lens"].tolist()):
        assert length >= 1
        mine = [gather(x, table[row], 0, length) for x in (keys.float(), values.float())]
        out[row] = attention(query[[row]], *mine, given["bmm1_scale"])[0]
    return out


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the emulation in FlashInfer's place."""
    for wrapper in Ragged, Paged, Decode:
        monkeypatch.setattr(flashinfer, wrapper.real.__name__, wrapper)
    monkeypatch.setattr(flashinfer, "merge_state", merge)
    monkeypatch.setattr(flashinfer.decode, "trtllm_batch_decode_with_kv_cache", from_table)
