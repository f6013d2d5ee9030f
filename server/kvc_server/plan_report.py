"""`sgl-kvc plan`: read the options, print the plan as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from kvc_server.model_config import kv_shape, read_config, weights_bytes
from kvc_server.plan import Plan, PlanError, make_plan

_UNITS = {"": 1, "K": 1, "M": 2, "G": 3, "T": 4}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B", re.IGNORECASE)


def run(options: argparse.Namespace, _: tuple[str, ...]) -> int:
    """Print the plan; raises PlanError for what cannot be planned."""
    path = Path(options.model)
    plan = make_plan(
        kv_shape(read_config(path), options.kv_dtype),
        parse_size(options.memory),
        weights=weights_bytes(path),
        input_len=options.input_len,
        output_len=options.output_len,
        page_size=options.page_size,
    )
    if options.json:
        print(json.dumps(as_json(plan), indent=2))
    else:
        _print(plan)
    return 0


def parse_size(text: str) -> int:
    """Bytes of a size such as 24GB (10^9) or 20GiB (2^30). Raises PlanError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise PlanError(
            f"--memory must be a number and a unit such as 24GB or 20GiB (got {text!r})"
        )
    number, unit, binary = match.groups()
    power = _UNITS[unit.upper()] if unit else 0
    return int(float(number) * (1024 if binary else 1000) ** power)


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan with units in its names; ``concurrent`` counts requests."""
    shape = plan.shape
    return {
        "layers": shape.layers,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "kv_dtype": shape.dtype,
        "kv_bytes_per_token": shape.bytes_per_token,
        "page_size": plan.page_size,
        "block_bytes": plan.block_bytes,
        "memory_bytes": plan.memory,
        "weights_bytes": plan.weights,
        "pool_blocks": plan.pool_blocks,
        "pool_tokens": plan.pool_tokens,
        "input_len": plan.input_len,
        "output_len": plan.output_len,
        "rates": [
            {
                "rate": row.rate,
                "tokens": row.tokens,
                "blocks_per_request": row.blocks.after,
                "segment_blocks": row.blocks.segment,
                "tail_blocks": row.blocks.tail,
                "bytes_per_request": row.bytes_per_request,
                "concurrent": row.requests,
                "concurrent_with_prefill": row.requests_with_prefill,
                "prefill_peak_blocks": row.blocks.prefill_peak,
                "prefill_peak_bytes": row.blocks.prefill_peak * plan.block_bytes,
            }
            for row in plan.rows
        ],
    }


def size(count: float) -> str:
    """Bytes for people, in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1000:
            return f"{count:.{0 if count >= 100 else 1 if unit != 'B' else 0}f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _print(plan: Plan) -> None:
    shape = plan.shape
    console = Console()
    console.print(
        f"A token's KVs: {size(shape.bytes_per_token)}  "
        f"(2 x {shape.layers} layers x {shape.kv_heads} KV heads x {shape.head_dim} "
        f"x {shape.dtype_bytes} bytes, {shape.dtype})"
    )
    if shape.dtype == "float32":
        console.print(
            "On a GPU SGLang serves float32 checkpoints in float16 unless told otherwise: "
            "--kv-dtype float16 plans that."
        )
    weights = "unknown, not subtracted" if plan.weights is None else size(plan.weights)
    console.print(
        f"Memory {size(plan.memory)}, weights {weights}: {plan.pool_blocks:,} blocks of "
        f"{plan.page_size} tokens, {plan.pool_tokens:,} tokens uncompressed"
    )
    table = Table(
        title=f"Requests of {plan.input_len:,} + {plan.output_len:,} tokens", box=box.SIMPLE_HEAD
    )
    for heading in (
        "rate", "pool holds\ntokens", "blocks of\na request", "its\nbytes", "requests\nthat fit",
        "with one\nin prefill", "peak of\na prefill",
    ):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    for row in plan.rows:
        table.add_row(
            str(row.rate), f"{row.tokens:,}", f"{row.blocks.after:,}",
            size(row.bytes_per_request), f"{row.requests:,}", f"{row.requests_with_prefill:,}",
            size(row.blocks.prefill_peak * plan.block_bytes),
        )  # fmt: skip
    console.print(table)
    console.print(
        "While one prompt is prefilled it holds its own blocks and those of its segment: "
        'its peak. "with one in prefill" counts the requests that fit meanwhile, that one included.'
    )
