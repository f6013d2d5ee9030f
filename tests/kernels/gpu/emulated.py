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

EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
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
        self.planned = plan = arguments(self.real.plan, self, *args, **kwargs)
        self._backend = self.made["backend"]
        if self._backend == "auto":  # Hopper's `determine_attention_backend`
            self._backend = "fa2" if plan["kv_data_type"] in EIGHT_BITS else "fa3"

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


def tile_of(plan) -> int:
    """Queries of a work of FA3 (``cta_tile_q`` in scheduler.cuh)."""
    return 192 if plan["head_dim_qk"] == 64 else 128


class Paged(Wrapper):
    """Prefill: FA2 finds lengths in the tensors given to `plan`, FA3 in its works."""

    real = flashinfer.BatchPrefillWithPagedKVCacheWrapper
    same_above = 4096  # works of a head

    def plan(self, *args, **kwargs):
        super().plan(*args, **kwargs)
        plan = self.planned
        for name in "qo_indptr", "paged_kv_indptr", "paged_kv_last_page_len":
            assert plan[name].device.type == "cpu"
            assert plan[name].dtype == torch.int32
        assert plan["paged_kv_indices"].dtype == torch.int32
        self._paged_kv_last_page_len_buf = plan["paged_kv_last_page_len"].clone()
        assert len(plan["paged_kv_indices"]) == plan["paged_kv_indptr"][-1]
        if self._backend == "fa3":
            self._plan_works(plan)

    def _plan_works(self, plan):
        """`PrefillSM90Plan` in scheduler.cuh, as many processors as there are works."""
        ends, lengths = plan["paged_kv_indptr"], plan["seq_lens"]
        if lengths is None:
            last = plan["paged_kv_last_page_len"]
            lengths = flashinfer.page.get_seq_lens(ends, last, plan["page_size"])
        assert lengths.dtype == torch.int32
        tile, works = tile_of(plan), []
        most = -(-int(plan["qo_indptr"][-1]) // tile) + len(plan["qo_indptr"]) - 2
        same_for_all_heads = most > self.same_above
        for head in range(1 if same_for_all_heads else plan["num_qo_heads"]):
            for row, (a, b) in enumerate(itertools.pairwise(plan["qo_indptr"].tolist())):
                begin, length = int(ends[row]), int(lengths[row])
                for nth in reversed(range(-(-(b - a) // tile))):
                    works.append((nth, a, begin, b - a, length, head, row))
        *columns, rows = zip(*works, strict=True) if works else [()] * 7
        self._plan_info, numbers = [], []
        for column in (*columns, range(len(works) + 1), rows):
            numbers += [-7] * (-len(numbers) % 4)  # 16 bytes
            self._plan_info.append(4 * len(numbers))
            numbers += column
        self._plan_info.append(int(same_for_all_heads))
        self._works = len(works)
        self._int_workspace_buffer = torch.full((8 << 20,), 0xF9, dtype=torch.uint8)
        self._int_workspace_buffer.view(torch.int32)[: len(numbers)] = torch.tensor(numbers)

    def run(self, *args, **kwargs):
        given, plan = arguments(self.real.run, self, *args, **kwargs), self.planned
        query, (keys, values) = given["q"], given["paged_kv_cache"]
        assert not plan["causal"]
        assert keys.shape[1:3] == (plan["num_kv_heads"], plan["page_size"]), "HND"
        assert keys.stride() == values.stride()
        assert query.shape[1:] == (plan["num_qo_heads"], plan["head_dim_qk"])
        assert len(query) == plan["qo_indptr"][-1]
        out = torch.zeros(query.shape)
        lse = torch.full(query.shape[:2], math.nan)
        works = self._fa3_works() if self._backend == "fa3" else self._fa2_works()
        group = plan["num_qo_heads"] // plan["num_kv_heads"]
        for tokens, begin, length, heads in works:
            of_heads = slice(heads.start // group, (heads.stop - 1) // group + 1)
            mine = [gather(x, plan["paged_kv_indices"], begin, length) for x in (keys, values)]
            at = tokens, heads
            mine = [x[:, of_heads] for x in mine]
            out[at], lse[at] = attention(query[at], *mine, plan["sm_scale"])
            if self._backend == "fa3" and not length:  # `store_zero` in epilogue.cuh
                lse[at] = -math.inf
        assert not lse.isnan().any(), "every query has been somebody's work"
        return self.result(out, lse, kwargs.get("return_lse"))

    def _fa2_works(self):
        """Rows of tokens, where their pages begin, KVs, heads."""
        plan, last = self.planned, self._paged_kv_last_page_len_buf
        for row, (a, b) in enumerate(itertools.pairwise(plan["qo_indptr"].tolist())):
            length = page_length(plan["paged_kv_indptr"], last, row, plan["page_size"])
            begin = int(plan["paged_kv_indptr"][row])
            yield slice(a, b), begin, length, slice(0, plan["num_qo_heads"])

    def _fa3_works(self):
        """The same of the tiles that the plan's buffer has now (tile_scheduler.cuh)."""
        plan, info = self.planned, self._plan_info
        numbers, tile = self._int_workspace_buffer.view(torch.int32), tile_of(plan)
        columns = [numbers[at // 4 : at // 4 + self._works].tolist() for at in info[:6]]
        for nth, query, begin, new, length, head in zip(*columns, strict=True):
            tokens = slice(query + nth * tile, min(query + (nth + 1) * tile, query + new))
            mine = slice(0, plan["num_qo_heads"]) if info[8] else slice(head, head + 1)
            yield tokens, begin, length, mine


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
