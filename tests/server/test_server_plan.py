"""The arithmetic of `sgl-kvc plan`, what it reads, and what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvc_server.cli import main
from kvc_server.model_config import kv_shape, weights_bytes
from kvc_server.plan import RATES, KVShape, PlanError, make_plan, request_blocks
from kvc_server.plan_report import parse_size

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
lengths = st.integers(min_value=1, max_value=20_000)


def write(folder: Path, config: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def test_llama_3_8b() -> None:
    shape = kv_shape(LLAMA)
    assert shape == KVShape(32, 8, 128, "bfloat16", 2)
    assert shape.bytes_per_token == 128 * 1024
    plan = make_plan(shape, 20 * 2**30, input_len=8000, output_len=256)
    assert plan.pool_blocks == 10_240
    by_rate = {row.rate: row for row in plan.rows}
    assert tuple(by_rate) == RATES
    assert by_rate[1].blocks.after == 516
    assert by_rate[1].blocks.prefill_peak == 500
    assert by_rate[1].requests == 19
    assert (by_rate[8].blocks.segment, by_rate[8].blocks.tail) == (63, 16)
    assert by_rate[8].blocks.prefill_peak == 563
    assert by_rate[8].requests == 10_240 // 79
    assert by_rate[8].requests_with_prefill == 1 + (10_240 - 563) // 79


def test_partial_last_block_stays_in_the_tail() -> None:
    blocks = request_blocks(prompt=1000, output=200, rate=8, page_size=16)
    assert blocks.segment == 8  # 62 whole blocks / 8
    assert blocks.tail == 13  # 8 + 200 tokens
    assert blocks.before == 75
    assert blocks.prefill_peak == 63 + 8


@given(lengths, lengths, st.sampled_from(RATES), st.sampled_from([1, 8, 16, 32]))
def test_blocks_hold_what_they_must(prompt: int, output: int, rate: int, page: int) -> None:
    blocks = request_blocks(prompt, output, rate, page)
    whole = prompt // page
    if blocks.segment:
        assert blocks.segment == max(1, math.ceil(whole / rate))
        assert blocks.tail * page >= prompt - whole * page + output
        assert (blocks.tail - 1) * page < prompt - whole * page + output
        assert blocks.prefill_peak == math.ceil(prompt / page) + blocks.segment
    else:
        assert rate == 1 or prompt < 64 or math.ceil(whole / rate) >= whole
        assert blocks.after == blocks.before == math.ceil((prompt + output) / page)
    assert blocks.after <= blocks.before


@given(st.integers(min_value=2**20, max_value=2**40), lengths, lengths)
def test_what_is_said_to_fit_fits(memory: int, prompt: int, output: int) -> None:
    shape = KVShape(16, 4, 64, "float16", 2)
    plan = make_plan(shape, memory, input_len=prompt, output_len=output)
    assert plan.pool_blocks * plan.block_bytes <= memory
    for row, slower in zip(plan.rows[1:], plan.rows, strict=False):
        assert row.requests >= slower.requests
    for row in plan.rows:
        assert row.requests * row.bytes_per_request <= memory
        assert (row.requests + 1) * row.blocks.after > plan.pool_blocks
        if row.requests_with_prefill:
            others = (row.requests_with_prefill - 1) * row.blocks.after
            assert others + row.blocks.prefill_peak <= plan.pool_blocks


@pytest.mark.parametrize(
    ("change", "shape"),
    [
        ({"num_key_value_heads": None}, (32, 32, 128, 2)),
        ({"head_dim": 64}, (32, 8, 64, 2)),
        ({"torch_dtype": None, "dtype": "float32"}, (32, 8, 128, 4)),
        ({"model_type": "qwen2", "sliding_window": 4096}, (32, 8, 128, 2)),
        ({"sliding_window": 4096, "use_sliding_window": False}, (32, 8, 128, 2)),
        ({"sliding_window": 8192, "max_position_embeddings": 8192}, (32, 8, 128, 2)),
        ({"layer_types": ["full_attention"] * 32}, (32, 8, 128, 2)),
        ({"num_hidden_layers": 3, "text_config": {"num_hidden_layers": 5}}, (5, 8, 128, 2)),
    ],
)
def test_shapes_of_configs(change: dict[str, Any], shape: tuple[int, ...]) -> None:
    found = kv_shape(LLAMA | change)
    assert (found.layers, found.kv_heads, found.head_dim, found.dtype_bytes) == shape


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kv_lora_rank": 512}, "multi-head latent attention (kv_lora_rank)"),
        ({"text_config": {"kv_lora_rank": 512}}, "kv_lora_rank"),
        ({"sliding_window": 4096}, "sliding-window attention (sliding_window)"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window layers"),
        ({"layer_types": ["linear_attention"]}, "state-space or linear layers"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size"),
        ({"mamba_d_state": 16}, "hybrid or state-space layers (mamba_d_state)"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"num_key_value_heads": [2, 4]}, "num_key_value_heads differs from layer to layer"),
        ({"num_hidden_layers": None}, "no num_hidden_layers"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers must be a whole number"),
        ({"torch_dtype": "int3"}, "unknown 'int3'"),
    ],
)
def test_unsupported_configs(
    change: dict[str, Any], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write(tmp_path, LLAMA | change)
    assert main(["plan", str(config), "--memory", "20GiB"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert reason in printed.err
    assert printed.err.startswith("sgl-kvc plan: ")
    assert printed.err.count("\n") == 1


def test_json_of_a_folder_with_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, LLAMA)
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 1000}}')
    assert main(["plan", str(tmp_path), "--memory", "20GiB", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["weights_bytes"] == 1000
    assert plan["kv_bytes_per_token"] == 131_072
    assert plan["pool_blocks"] == (20 * 2**30 - 1000) // (16 * 131_072)
    assert [row["rate"] for row in plan["rates"]] == list(RATES)


def test_weights_are_the_files_when_there_is_no_index(tmp_path: Path) -> None:
    config = write(tmp_path, LLAMA)
    assert weights_bytes(config) is None
    (tmp_path / "model.safetensors").write_bytes(b"0" * 77)
    assert weights_bytes(config) == weights_bytes(tmp_path) == 77


def test_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(write(tmp_path, LLAMA)), "--memory", "24GB"]) == 0
    printed = capsys.readouterr().out
    assert "128 KiB" in printed
    assert "with one" in printed


@pytest.mark.parametrize(
    ("text", "size"), [("24GB", 24 * 10**9), ("20GiB", 20 * 2**30), ("1.5 kib", 1536), ("7b", 7)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["20", "GiB", "-1GB", "20 pounds", "", "1e9GB"])
def test_sizes_without_sense(text: str) -> None:
    with pytest.raises(PlanError, match="--memory"):
        parse_size(text)


@pytest.mark.parametrize(
    "option", [("--page-size", "0"), ("--input-len", "0"), ("--output-len", "-3")]
)
def test_lengths_without_sense(option: tuple[str, str], tmp_path: Path) -> None:
    assert main(["plan", str(write(tmp_path, LLAMA)), "--memory", "1GB", *option]) == 2


def test_memory_below_the_weights() -> None:
    with pytest.raises(PlanError, match="weights alone"):
        make_plan(KVShape(1, 1, 1, "float16", 2), 10, weights=11)


def test_missing_or_broken_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path), "--memory", "1GB"]) == 2
    assert "there is no" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{")
    assert main(["plan", str(tmp_path), "--memory", "1GB"]) == 2
    assert "not a readable JSON file" in capsys.readouterr().err
