"""Attention of one query per request through FlashInfer: every head of a request is a batch row.

FlashInfer knows one length per row, so a row is one (request, KV head): ``B * H`` rows of G query
heads and one KV head, over the arena's flat view [num_blocks * L * H, 1, P, D] (layout "HND").
Which pages a row reads in a layer says `block_table`. Facts about FlashInfer are of 0.6.15.
"""

from __future__ import annotations

import torch

from kvc_kernels.batch import Batch
from kvc_kernels.cache import KVCache
from kvc_kernels.gpu.decode_buffers import DecodeBuffers
from kvc_kernels.gpu.tables import block_table

_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)
#: Programmatic dependent launch: FA2 and XQA's fp8 kernel read lengths before they wait for the
#: kernel in front of them (``griddepcontrol.wait``), and here that one has just written them.
_ENABLE_PDL = False
_E4M3_OR_SIXTEEN_BITS = (torch.float8_e4m3fn, *_SIXTEEN_BITS)


def supported(
    backend: str,
    capability: tuple[int, int],
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    group: int,
) -> str | None:
    """Why a backend cannot serve a model on a GPU, in a sentence; None if it can.

    Parameters
    ----------
    backend : "fa2", "xqa" or "trtllm", as `PagedDecode` takes them.
    capability : compute capability of the GPU, ``(9, 0)``.
    dtype : type of the cache; queries have 16 bits.
    group : query heads per KV head.
    """
    if backend == "fa2":  # attention/prefill.cuh: KernelTraits, page_produce_kv
        needs = [
            (capability >= (8, 0), "compute capability 8.0 or later"),
            (head_dim in (64, 128, 256), "a head dim of 64, 128 or 256"),
            (dtype in _SIXTEEN_BITS + _EIGHT_BITS, "a cache of 16-bit floats or fp8"),
            (dtype not in _EIGHT_BITS or head_dim != 64, "a head dim of 128 or 256 with fp8"),
        ]
    elif backend == "xqa":  # xqa.py, jit/xqa.py, csrc/xqa/mha.cu; e5m2 it would read as 16 bits
        needs = [
            (capability[0] in (9, 10, 12), "compute capability 9, 10 or 12"),
            (head_dim % 16 == 0 and 16 <= head_dim <= 256, "a head dim of 16 to 256, in sixteens"),
            (page_size in (16, 32, 64, 128), "pages of 16, 32, 64 or 128 tokens"),
            (dtype in _E4M3_OR_SIXTEEN_BITS, "a cache of 16-bit floats or fp8 e4m3"),
            (group <= 32, "at most 32 query heads per KV head"),
        ]
    elif backend == "trtllm":  # decode.py, trtllm/fmha; what cubins there are is known at run time
        needs = [
            (capability[0] == 10, "compute capability 10"),
            (head_dim in (64, 128, 256), "a head dim of 64, 128 or 256"),
            (page_size in (16, 32, 64), "pages of 16, 32 or 64 tokens"),
            (dtype in _E4M3_OR_SIXTEEN_BITS, "a cache of 16-bit floats or fp8 e4m3"),
        ]
    else:
        return f"there is no backend {backend!r}: fa2, xqa and trtllm there are"
    missing = [what for met, what in needs if not met]
    return f"FlashInfer's {backend} needs {' and '.join(missing)}" if missing else None


class PagedDecode:
    """Decode steps of a fixed number of requests; make one per batch size and keep it.

    It writes to buffers that others share, in the order of the stream that they all run in.

    "fa2" : the FA2 tensor-core kernel, which splits work by a plan made on the host from upper
        bounds. It clamps every tile to the row's length on the device, so that one plan serves
        all layers: a tile behind the end merges with weight zero (``chunk_end`` and
        ``finalize_m`` in attention/prefill.cuh). The CUDA-core decode kernel does not clamp
        and must never get such a plan. Compiled by nvcc at the first plan; that takes minutes.
    "xqa" : reads lengths and tables on the device, no plan. Every row must hold a KV: one of a
        request that is gone is taken to hold one, of whatever its table says. KVs behind the end
        of a head's last page may be multiplied by zero, so an arena begins as zeros, never as NaN.
    "trtllm" : likewise; compiled kernels come from NVIDIA's server at the first call, unless
        the package flashinfer-cubin is installed. An fp8 cache needs an fp8 query: it is cast.

    CUDA graphs: call `plan` and `run` once before the capture (something is compiled or
    allocated), then capture `run` of every layer. The batch's tensors are read at replay
    and have to be the graph's own buffers. "xqa" and "trtllm" need nothing else; for "fa2"
    call `plan` before every replay, on the same stream: it writes to buffers that the graph reads.
    FlashInfer stages that write in one pinned buffer (8 MiB, of each batch size its own), so plan
    a step only when the one before has begun to run.

    Parameters
    ----------
    backend : "fa2", "xqa" or "trtllm".
    cache : where KVs are; fp8 caches with fp8 as their type, not as bytes.
    batch : requests of a step.
    query_heads : ``H * G``.
    dtype : type of queries and results, float16 or bfloat16.
    scale : factor on the logits.
    buffers : of at least as many requests. Their ``max_pages`` is the most that a head may ever
        hold; ``ceil(longest context / P)`` always is.

    Raises
    ------
    ValueError : if FlashInfer cannot serve this, and why.
    """

    def __init__(
        self,
        backend: str,
        cache: KVCache,
        batch: int,
        query_heads: int,
        dtype: torch.dtype,
        scale: float,
        buffers: DecodeBuffers,
    ) -> None:
        dim, self._kv_dtype = cache.arena_k.shape[-1], cache.arena_k.dtype
        self._group, rest = divmod(query_heads, cache.heads)
        device = cache.arena_k.device
        if device.type == "cuda":
            capability = torch.cuda.get_device_capability(device)
            model = dim, cache.page_size, self._kv_dtype, self._group
            if reason := supported(backend, capability, *model):
                raise ValueError(reason)
        if rest or cache.arena_v.shape != cache.arena_k.shape:
            raise ValueError(f"{query_heads} query heads over {cache.heads}, or values unlike keys")
        if dtype not in _SIXTEEN_BITS or self._kv_dtype not in (dtype, *_EIGHT_BITS):
            raise ValueError(f"{dtype} queries of a {self._kv_dtype} cache: 16 bits, alike, or fp8")
        self.backend, self._cache, self._dtype, self._scale = backend, cache, dtype, scale
        self._rows, self._max_pages = batch * cache.heads, buffers.max_pages
        if not 0 < self._rows <= buffers.rows:
            raise ValueError(f"{batch} requests are none, or more than the buffers are for")
        self.buffers, self._workspace = buffers, buffers.workspace
        self._flat = tuple(
            arena.view(-1, 1, cache.page_size, dim) for arena in (cache.arena_k, cache.arena_v)
        )
        self.table, self._length = buffers.table[: self._rows], buffers.length[: self._rows]
        if backend == "fa2":
            self._make_wrapper()

    def plan(self, batch: Batch, pages: list[int] | None = None) -> None:
        """Say what the next `run` of every layer is about; waits for nothing on the device.

        Parameters
        ----------
        batch : of the cache given at first; kept, and its tensors read by `run`.
        pages : per request, the most pages that any of its heads holds in any layer;
            ``ceil(seq_len / P)`` always is, and the tighter they are the better work is shared
            out. Only "fa2" reads them. A bound too low loses KVs without a word.
        """
        self._batch = batch
        if self.backend == "fa2":
            self._plan_work(pages)

    def run(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Attention of `query` [B, H*G, D] over what each head holds in `layer`: [B, H*G, D]."""
        least = 0 if self.backend == "fa2" else 1  # see above
        block_table(self._batch, layer, self._max_pages, (self.table, self._length), least=least)
        rows = query.reshape(self._rows, self._group, -1).contiguous()
        run = self._run_fa2 if self.backend == "fa2" else self._run_from_table
        return run(rows).view(query.shape)

    def _run_from_table(self, rows: torch.Tensor) -> torch.Tensor:
        """XQA and TensorRT-LLM take the same arguments."""
        from flashinfer import decode

        if self.backend == "trtllm" and self._kv_dtype in _EIGHT_BITS:
            rows = rows.to(self._kv_dtype)
        return decode.trtllm_batch_decode_with_kv_cache(
            rows,
            self._flat,
            self._workspace,
            self.table,
            self._length,
            self._max_pages * self._cache.page_size,
            bmm1_scale=self._scale,
            bmm2_scale=1.0,
            out_dtype=self._dtype,
            kv_layout="HND",
            enable_pdl=_ENABLE_PDL,
            backend="xqa" if self.backend == "xqa" else "trtllm-gen",
        )

    def _make_wrapper(self) -> None:
        """FlashInfer's wrapper over our own buffers, row r's pages at ``r * max_pages``."""
        import flashinfer

        buffers = self.buffers
        self._begin, self._indptr = (x[: self._rows + 1] for x in (buffers.begin, buffers.indptr))
        self._last_page = buffers.last_page[: self._rows]
        self._wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "HND",
            use_cuda_graph=True,  # nothing is replaced by `plan`, all of it is written in place
            use_tensor_cores=True,
            paged_kv_indptr_buffer=self._indptr,
            paged_kv_indices_buffer=self.table.view(-1),
            paged_kv_last_page_len_buffer=self._last_page,
            backend="fa2",
        )
        # It has made itself a buffer of its own, which all batch sizes together would not need.
        self._wrapper.reset_workspace_buffer(self._workspace, buffers.plan)

    def _plan_work(self, pages: list[int] | None) -> None:
        """Share out work by the bounds, then let rows begin where the table has them again."""
        heads, page_size = self._cache.heads, self._cache.page_size
        if pages is None or len(pages) * heads != self._rows or max(pages) > self._max_pages:
            raise ValueError(f"fa2 needs {self._rows // heads} bounds of at most {self._max_pages}")
        self._wrapper.plan(
            bounds_indptr(pages, heads),
            self.table.view(-1)[:0],  # the table is filled later, layer by layer
            torch.full((self._rows,), page_size, dtype=torch.int32),
            self._group,
            1,
            self._flat[0].shape[-1],
            page_size,
            q_data_type=self._dtype,
            kv_data_type=self._kv_dtype,
            sm_scale=self._scale,
        )
        self._indptr.copy_(self._begin)

    def _run_fa2(self, rows: torch.Tensor) -> torch.Tensor:
        last_page_len(self._length, self._max_pages, self._cache.page_size, self._last_page)
        return self._wrapper.run(rows, self._flat, enable_pdl=_ENABLE_PDL)


def bounds_indptr(pages: list[int], heads: int) -> torch.Tensor:
    """int32 [B*H + 1] on the host, what "fa2" is planned with: all heads of a request alike."""
    indptr = torch.zeros(len(pages) * heads + 1, dtype=torch.int32)
    torch.cumsum(torch.tensor(pages).repeat_interleave(heads), 0, out=indptr[1:])
    return indptr


def last_page_len(
    length: torch.Tensor, max_pages: int, page_size: int, out: torch.Tensor
) -> torch.Tensor:
    """The ``last_page_len`` with which FlashInfer finds `length` in rows of `max_pages`.

    It computes ``(pages - 1) * P + last_page_len`` in unsigned 32 bits (``get_length`` in
    page.cuh) with the row's width for ``pages``. So this is negative for most rows, and the sum
    comes out right: it was run on a CPU for lengths of 0, 1 and all.
    """
    return torch.sub(length, (max_pages - 1) * page_size, out=out)
