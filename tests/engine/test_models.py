"""Architectures, head layouts, cache types and block sizes; and what is refused."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from kvc_server import launch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.server_args import ServerArgs

from sgl_kvc.attention.support import UnsupportedError, check_model, check_server
from tests import tiny_models
from tests.engine.conftest import prompt
from tests.servers import assert_no_leak, sglang


@pytest.mark.parametrize(
    ("model", "args"),
    [
        ({"architecture": "qwen2", "kv_heads": 8}, ("--dtype", "bfloat16", "--page-size", "8")),
        ({"architecture": "qwen3", "kv_heads": 1}, ("--dtype", "float16", "--page-size", "32")),
        ({}, ("--kv-cache-dtype", "fp8_e4m3", "--page-size", "16")),
    ],
    ids=["qwen2 MHA bf16 page 8", "qwen3 MQA fp16 page 32", "llama GQA fp8 page 16"],
)
def test_served_and_compressed(tmp_path, model, args):
    page = int(args[-1])
    folder = tiny_models.write(tmp_path, **model)
    mixed = ("--enable-mixed-chunk", "--chunked-prefill-size", "256", "--skip-tokenizer-init")
    with sglang(folder, *args, *mixed, "--max-total-tokens", "8192") as server:
        batch = [prompt(n, seed=n) for n in (700, 300, 650, 40)]
        for knob in ({"rate": 1}, {"rate": 8}):
            answers = server.generate(batch, knob, max_new_tokens=24, ignore_eos=True)
            assert [len(a["output_ids"]) for a in answers] == [24] * 4
            report = answers[0]["kv_compression"]
        whole, rest = divmod(700, page)
        segment = -(-whole // 8)
        assert report["blocks"]["after"] == segment + (1 if rest else 0)
        assert_no_leak(server)


def _edit(folder: Path, **changes) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


MLA = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "first_k_dense_replace": 4,
    "moe_layer_freq": 1,
}
SLIDING = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": 64,
}
HYBRID = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "layer_types": ["linear_attention", "full_attention"] * 2,
}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (MLA, "multi-head latent attention (MLA) is not supported"),
        (SLIDING, "sliding-window attention is not supported"),
        (HYBRID, "hybrid state-space or linear attention is not supported"),
    ],
    ids=["MLA", "sliding window", "hybrid state"],
)
def test_models_that_are_refused(tmp_path, changes, sentence):
    folder = _edit(tiny_models.write(tmp_path), **changes)
    with pytest.raises(UnsupportedError, match=re.escape(sentence)):
        check_model(ModelConfig(str(folder)))


def test_a_plain_model_is_not_refused(tiny_llama):
    check_model(ModelConfig(str(tiny_llama)))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"kv_cache_dtype": "fp4_e2m1"}, "--kv-cache-dtype fp4_e2m1"),
        ({"page_size": 4}, "--page-size"),
        ({"disable_radix_cache": True}, "--disable-radix-cache"),
        ({"pp_size": 2}, "--pp-size"),
    ],
)
def test_options_that_are_refused(tiny_llama, options, sentence):
    args = ServerArgs(model_path=str(tiny_llama), device="cpu", page_size=16)
    check_server(args)
    with pytest.raises(UnsupportedError, match=re.escape(sentence)):
        check_server(copy_with(args, options))


def copy_with(args: ServerArgs, options: dict) -> ServerArgs:
    """`args` with fields set past their own resolution, as a user's flags would end up."""
    changed = copy.copy(args)
    for name, value in options.items():
        object.__setattr__(changed, name, value)
    return changed


def test_a_refused_server_stops_and_says_why(tmp_path):
    folder = _edit(tiny_models.write(tmp_path / "model"), **MLA)
    log = tmp_path / "log"
    with launch.started(launch.sglang(folder, "--attention-backend", "kvc"), log=log) as server:
        assert server.process.wait(180) != 0
    said = [line for line in log.read_text().splitlines() if "sgl-kvc cannot serve" in line]
    assert said, log.read_text()[-3000:]
    assert "multi-head latent attention (MLA) is not supported" in said[0]


def test_another_sglang_is_refused_by_name():
    """As if 0.5.23 were installed: its metadata says so, nothing else is changed."""
    script = (
        "import importlib.metadata as m; real = m.version;"
        "m.version = lambda name: '0.5.23' if name == 'sglang' else real(name);"
        "from sgl_kvc.plugin import register; register()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode != 0
    assert "SGLang 0.5.23 is installed; sgl-kvc supports 0.5.17" in done.stderr


def test_a_missing_seam_is_refused_by_name():
    """A rename upstream stops the process, with the name that is gone."""
    script = (
        "from sglang.srt.managers.schedule_batch import ScheduleBatch as B;"
        "del B.prepare_for_extend;"
        "from sgl_kvc.plugin import register; register()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode != 0
    assert "SGLang has no sglang.srt.managers.schedule_batch" in done.stderr
    assert "prepare_for_extend" in done.stderr
