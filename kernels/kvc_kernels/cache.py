"""What the kernels read: the arenas, and the spans that say where KVs lie in them."""

from __future__ import annotations

import dataclasses
import functools

import torch


@dataclasses.dataclass(frozen=True, eq=False)
class Spans:
    """Where the KVs of every request lie, by request row.

    A request's row of ``req_to_token`` has four ranges, each possibly empty::

        [ shared )[ released )[ own )[ tail )

        shared   : blocks other requests read too; nothing here writes to them
        released : positions without blocks
        own      : the request's own segment
        tail     : ordinary blocks, from S to the request's length

    Span 0 is the shared range and span 1 the own one. A head's pages in a span are ``count``
    places of the span's run of blocks, ``first``, ``first + stride`` and so on; all are full. The
    heads' pages lie one head after the other in a packed span (stride 1), and each in its place
    of every block in a canonical one (``first = layer * H + head``, stride ``L * H``). The tail
    is canonical; its last page may be partly filled. An uncompressed request is all zeros: it has
    nothing but a tail from position 0.

    Attributes
    ----------
    begin : int32 [rows, 3], the positions where shared, own and tail begin, multiples of P.
    first : int32 [rows, 2, L*H], the first place of every head in spans 0 and 1.
    count : int32 [rows, 2, L*H], how many pages it has there.
    stride : int32 [rows, 2], from one page of a head to its next.
    """

    begin: torch.Tensor
    first: torch.Tensor
    count: torch.Tensor
    stride: torch.Tensor

    @classmethod
    def uncompressed(cls, rows: int, layer_heads: int, device: str | torch.device) -> Spans:
        """Spans of `rows` uncompressed requests of ``L * H = layer_heads`` heads."""
        zeros = functools.partial(torch.zeros, dtype=torch.int32, device=device)
        return cls(
            begin=zeros(rows, 3),
            first=zeros(rows, 2, layer_heads),
            count=zeros(rows, 2, layer_heads),
            stride=zeros(rows, 2),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class KVCache:
    """The arenas and where each request's KVs lie in them: the engine's own tensors.

    Attributes
    ----------
    arena_k, arena_v : [num_blocks, L, H, P, D] and [num_blocks, L, H, P, Dv], contiguous; fp8
        caches with fp8 as their type, not as bytes.
    req_to_token : int32 [rows, max_context], the slot of every position of every request.
    spans : of the same rows.

    Raises
    ------
    ValueError : on tensors that do not fit together.
    """

    arena_k: torch.Tensor
    arena_v: torch.Tensor
    req_to_token: torch.Tensor
    spans: Spans

    def __post_init__(self):
        if self.arena_k.shape[:-1] != self.arena_v.shape[:-1]:
            raise ValueError("arena_k and arena_v differ in blocks, layers, heads or page size")
        rows, layer_heads = len(self.req_to_token), self.layers * self.heads
        shapes = {
            "req_to_token": (rows, *self.req_to_token.shape[1:]),
            "begin": (rows, 3),
            "first": (rows, 2, layer_heads),
            "count": (rows, 2, layer_heads),
            "stride": (rows, 2),
        }
        tables = {"req_to_token": self.req_to_token} | vars(self.spans)
        for name, shape in shapes.items():
            if tables[name].dtype != torch.int32 or tables[name].shape != shape:
                found = f"{tables[name].dtype} {list(tables[name].shape)}"
                raise ValueError(f"{name} is {found}, not int32 {list(shape)}")
        for name, tensor in (tables | {"arena_k": self.arena_k, "arena_v": self.arena_v}).items():
            if not tensor.is_contiguous():
                raise ValueError(f"{name} is not contiguous")

    @property
    def layers(self) -> int:
        return self.arena_k.shape[1]

    @property
    def heads(self) -> int:
        return self.arena_k.shape[2]

    @property
    def page_size(self) -> int:
        return self.arena_k.shape[3]

    @functools.cached_property
    def flat_k(self) -> torch.Tensor:
        """`arena_k` as head pages, [num_blocks * L * H, P, D]."""
        return self.arena_k.flatten(0, 2)

    @functools.cached_property
    def flat_v(self) -> torch.Tensor:
        """`arena_v` as head pages, [num_blocks * L * H, P, Dv]."""
        return self.arena_v.flatten(0, 2)
