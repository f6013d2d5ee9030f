"""The arithmetic of "will it fit": blocks, bytes and requests. No files, no tables.

Units: lengths in tokens, sizes in bytes, everything the pool gives out in blocks of
`page_size` tokens. A block holds the keys and values of its tokens for all layers and heads.
"""

from __future__ import annotations

import dataclasses
import math

from sgl_kvc.spec import CompressionSpec, Extent

RATES = (1, 2, 4, 8, 16, 32, 64)


class PlanError(ValueError):
    """A plan that cannot be made; the message names the field or option."""


@dataclasses.dataclass(frozen=True)
class KVShape:
    """What one token costs: layers L, KV heads H, head dim D, and bytes of one number."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    dtype_bytes: int

    @property
    def bytes_per_token(self) -> int:
        """2·L·H·D·bytes: a key and a value for every head of every layer."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes


@dataclasses.dataclass(frozen=True)
class RequestBlocks:
    """Blocks of one request after compression, and at the peak of its prefill.

    Attributes
    ----------
    before : blocks of prompt and output, uncompressed.
    segment : blocks of the compressed prompt; 0 when the prompt is served uncompressed.
    tail : blocks of the last partial prompt block and of the output, and of the whole
        prompt when it is served uncompressed.
    prefill_peak : blocks held while the prompt is compressed: all of it, and the segment.
    """

    before: int
    segment: int
    tail: int
    prefill_peak: int

    @property
    def after(self) -> int:
        """Blocks held when the last token is decoded."""
        return self.segment + self.tail


def request_blocks(prompt: int, output: int, rate: float, page_size: int) -> RequestBlocks:
    """Blocks of a request of `prompt` + `output` tokens at `rate` (KVs before / KVs after).

    `sgl_kvc.spec.Extent` says what is compressed to how many blocks, as it does for the engine.
    """
    extent = Extent.of(CompressionSpec(rate=rate), prompt, page_size)
    segment = extent.segment_blocks if extent.compressed else 0
    return RequestBlocks(
        before=math.ceil((prompt + output) / page_size),
        segment=segment,
        tail=extent.tail_blocks(prompt + output),
        prefill_peak=math.ceil(prompt / page_size) + segment,
    )


@dataclasses.dataclass(frozen=True)
class Row:
    """What a pool holds at one rate.

    Attributes
    ----------
    tokens : prompt tokens the whole pool can hold at this rate.
    requests : finished-length requests that fit side by side.
    requests_with_prefill : the same while the last of them is still being prefilled.
    """

    rate: int
    blocks: RequestBlocks
    bytes_per_request: int
    tokens: int
    requests: int
    requests_with_prefill: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """A pool in a memory, and what fits in it at each rate.

    Attributes
    ----------
    memory : bytes given; `weights` : bytes of it that the model takes, None when unknown.
    pool_blocks : whole blocks in the rest.
    """

    shape: KVShape
    memory: int
    weights: int | None
    page_size: int
    input_len: int
    output_len: int
    pool_blocks: int
    rows: tuple[Row, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.page_size * self.shape.bytes_per_token

    @property
    def pool_tokens(self) -> int:
        """Tokens the pool holds uncompressed."""
        return self.pool_blocks * self.page_size


def make_plan(
    shape: KVShape,
    memory: int,
    *,
    weights: int | None = None,
    input_len: int = 1024,
    output_len: int = 256,
    page_size: int = 16,
) -> Plan:
    """Fill `memory` bytes, less `weights`, with blocks and requests. Raises PlanError."""
    for option, value in (
        ("--page-size", page_size),
        ("--input-len", input_len),
        ("--output-len", output_len),
    ):
        if value < 1:
            raise PlanError(f"{option} must be at least 1 (got {value})")
    if memory <= (weights or 0):
        raise PlanError(
            f"the weights alone take {weights} bytes; --memory gives {memory}"
            if weights
            else f"--memory must be positive (got {memory})"
        )
    block_bytes = page_size * shape.bytes_per_token
    pool = (memory - (weights or 0)) // block_bytes
    rows = []
    for rate in RATES:
        blocks = request_blocks(input_len, output_len, rate, page_size)
        requests = pool // blocks.after
        room = pool - blocks.prefill_peak
        prefilling = min(requests, 1 + room // blocks.after) if room >= 0 else 0
        rows.append(
            Row(
                rate=rate,
                blocks=blocks,
                bytes_per_request=blocks.after * block_bytes,
                tokens=pool * rate * page_size,
                requests=requests,
                requests_with_prefill=prefilling,
            )
        )
    return Plan(shape, memory, weights, page_size, input_len, output_len, pool, tuple(rows))
