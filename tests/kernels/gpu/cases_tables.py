"""What of block tables is compiled for GPUs that are not there."""

from __future__ import annotations

from collections.abc import Iterator

from kvc_kernels.gpu.tables import _BLOCK, _block_table, _prefix_blocks

from tests.kernels.gpu.cases_attention import TABLES, case

WRITTEN = {"table": "*i32", "length": "*i32"}
NUMBERS = {"layer": "i32", "context": "i32", "max_pages": "i32", "least": "i32"}


def cases(architecture: int) -> Iterator[tuple]:
    """Page sizes, either type of request row and length, and with its assertion."""
    for page, heads, index, debug, by_head in (
        (8, 3, "*i64", False, False),
        (16, 8, "*i32", False, True),
        (64, 1, "*i64", False, False),
        (16, 8, "*i64", True, False),
    ):
        yield case(
            f"block table P {page}, H {heads}, rows {index}, debug {debug}", _block_table,
            TABLES | WRITTEN | NUMBERS | {"request": index, "seq_len": index},
            {"H": heads, "PER_BLOCK": 32 * heads, "P": page, "BLOCK": _BLOCK,
             "BY_HEAD": by_head},
            debug=debug,
        )  # fmt: skip
    pointers = {"req_to_token": "*i32", "request": "*i64", "indptr": "*i32", "blocks": "*i32"}
    yield case(
        "blocks of prefixes", _prefix_blocks, pointers | {"context": "i32"},
        {"P": 16, "BLOCK": _BLOCK},
    )  # fmt: skip
