"""What is refused before anything is served wrongly, and what is not."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.server_args import ServerArgs

from sgl_kvc.attention.support import UnsupportedError, check_device, check_model, check_server
from tests import tiny_models


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory) -> Path:
    return tiny_models.write(tmp_path_factory.mktemp("llama"))


def edit(folder: Path, **changes) -> Path:
    """The model in `folder`, its configuration changed."""
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
    folder = edit(tiny_models.write(tmp_path), **changes)
    with pytest.raises(UnsupportedError, match=re.escape(sentence)):
        check_model(ModelConfig(str(folder)))


def test_a_plain_model_is_not_refused(tiny_llama):
    check_model(ModelConfig(str(tiny_llama)))


@pytest.mark.parametrize(
    ("part", "changes", "what"),
    [
        ("", {"is_encoder_decoder": True}, "encoder-decoder models are"),
        ("", {"is_generation": False}, "models that do not generate are"),
        ("hf_text_config", {"attention_chunk_size": 64}, "chunked local attention is"),
        ("hf_text_config", {"sliding_window": 64}, "sliding-window attention is"),
        ("hf_text_config", {"sliding_window": 64, "use_sliding_window": False}, None),
    ],
)
@pytest.mark.parametrize("name", ["LlamaForCausalLM", None])
def test_a_refusal_names_the_model_and_what_it_has(tiny_llama, part, changes, what, name):
    """Of configurations as SGLang reads them."""
    config = copy.copy(ModelConfig(str(tiny_llama)))
    config.hf_config, config.hf_text_config = (
        copy.copy(each) for each in (config.hf_config, config.hf_text_config)
    )
    config.hf_config.architectures = name and [name]
    for key, value in changes.items():
        setattr(getattr(config, part) if part else config, key, value)
    if what is None:
        check_model(config)
        return
    with pytest.raises(UnsupportedError) as refused:
        check_model(config)
    assert str(refused.value) == f"{name or 'this model'}: {what} not supported"


@pytest.fixture(scope="module")
def args(tiny_llama) -> ServerArgs:
    """Arguments of a server that is not refused."""
    args = ServerArgs(
        model_path=str(tiny_llama),
        device="cpu",
        page_size=16,
        attention_backend="kvc",
        radix_cache_backend="kvc",
        cuda_graph_backend_prefill="disabled",
    )
    check_server(args)
    return args


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"attention_backend": "triton"}, "give --attention-backend kvc"),
        ({"decode_attention_backend": "fa3"}, "--decode-attention-backend fa3"),
        ({"prefill_attention_backend": "fa3"}, "--prefill-attention-backend fa3"),
        (
            {"attention_backend": None, "decode_attention_backend": "kvc"},
            "give --attention-backend kvc",
        ),
        ({"device": "xpu"}, "--device xpu"),
        ({"enable_torch_compile": True}, "--enable-torch-compile"),
        ({"speculative_algorithm": "NGRAM"}, "--speculative-algorithm"),
        ({"dllm_algorithm": "LowConfidence"}, "--dllm-algorithm"),
        ({"enable_mis": True}, "--enable-mis"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap"),
        ({"enable_pdmux": True}, "--enable-pdmux"),
        ({"enable_dp_attention": True}, "--enable-dp-attention"),
        ({"dcp_size": 2}, "--dcp-size"),
        ({"attn_cp_size": 2}, "--attn-cp-size"),
        ({"enable_prefill_cp": True}, "--enable-prefill-cp"),
        ({"pp_size": 2}, "--pp-size"),
        ({"enable_hisparse": True}, "--enable-hisparse"),
        ({"page_size": None}, "--page-size None"),
        ({"page_size": 4}, "--page-size 4"),
        ({"page_size": 24}, "--page-size 24"),
        ({"page_size": 128}, "--page-size 128"),
        ({"kv_cache_dtype": "fp4_e2m1"}, "--kv-cache-dtype fp4_e2m1"),
        ({"kv_cache_dtype": "mxfp8"}, "--kv-cache-dtype mxfp8"),
        ({"quantization_param_path": "scales.json"}, "--quantization-param-path"),
        ({"disable_radix_cache": True}, "--disable-radix-cache"),
        ({"radix_cache_backend": "flexkv"}, "--radix-cache-backend flexkv"),
        ({"enable_session_radix_cache": True}, "--enable-session-radix-cache"),
        ({"enable_streaming_session": True}, "--enable-streaming-session"),
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
        ({"enable_lmcache": True}, "--enable-lmcache"),
        ({"enable_flexkv": True}, "--enable-flexkv"),
        ({"enable_page_major_kv_layout": True}, "--enable-page-major-kv-layout"),
        ({"enable_unified_memory": True}, "--enable-unified-memory"),
        ({"kv_canary": "log"}, "--kv-canary"),
        ({"prefill_only_disable_kv_cache": True}, "--prefill-only-disable-kv-cache"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(map(str, value.items())),
)
def test_options_that_are_refused(args, options, sentence):
    with pytest.raises(UnsupportedError, match=re.escape(sentence)) as refused:
        check_server(copy_with(args, options))
    if sentence.startswith("--"):  # then a reason follows
        why = r"( above 1)? cannot be combined with --attention-backend kvc: ([a-z]|KVs |SGLang ).*"
        assert re.fullmatch(re.escape(sentence) + why, str(refused.value))


@pytest.mark.parametrize(
    ("phase", "backend"),
    [("prefill", "tc_piecewise"), ("prefill", "full"), ("decode", "breakable")],
)
def test_graphs_that_are_refused(args, phase, backend):
    graphs = copy.deepcopy(args.cuda_graph_config)
    graphs[phase].backend = backend
    with pytest.raises(UnsupportedError, match=f"--cuda-graph-backend-{phase} {backend}"):
        check_server(copy_with(args, {"cuda_graph_config": graphs}))


def test_graphs_that_attention_is_not_in(args):
    graphs = copy.deepcopy(args.cuda_graph_config)
    graphs.prefill.backend = "breakable"
    check_server(copy_with(args, {"cuda_graph_config": graphs}))


@pytest.mark.parametrize(
    "options",
    [
        {"decode_attention_backend": "kvc", "prefill_attention_backend": "kvc"},
        {"device": "cuda"},
        {"page_size": 64},
        {"kv_cache_dtype": "fp8_e5m2"},
        {"dp_size": 2},
        {"kv_events_config": "{}"},
        {"enable_mixed_chunk": True},
    ],
    ids=str,
)
def test_options_that_are_not_refused(args, options):
    check_server(copy_with(args, options))


def test_heads_that_no_kernel_has(tiny_llama, monkeypatch):
    config = ModelConfig(str(tiny_llama))
    for config.head_dim, config.v_head_dim in ((256, 256), (80, 96)):
        check_device(config, "auto", (9, 0))
    for config.head_dim, config.v_head_dim in ((320, 64), (64, 320)):
        check_device(config, "auto", None)
        with pytest.raises(UnsupportedError, match="heads of 320 numbers"):
            check_device(config, "auto", (9, 0))
        with monkeypatch.context() as interpreter:
            interpreter.setenv("TRITON_INTERPRET", "1")
            with pytest.raises(UnsupportedError, match="heads of 320 numbers"):
                check_device(config, "auto", None)


def test_a_gpu_that_does_not_know_the_cache_type(tiny_llama):
    config = ModelConfig(str(tiny_llama))
    for cache_dtype, capability in (
        ("fp8_e4m3", None), ("fp8_e4m3", (8, 9)), ("fp8_e5m2", (8, 0)), ("auto", (8, 0)),
    ):  # fmt: skip
        check_device(config, cache_dtype, capability)
    with pytest.raises(UnsupportedError, match=r"capability 8\.9 or later; this one has 8\.6"):
        check_device(config, "fp8_e4m3", (8, 6))


def copy_with(args: ServerArgs, options: dict) -> ServerArgs:
    """`args` with fields set past their own resolution, as a user's flags would end up."""
    changed = copy.copy(args)
    for name, value in options.items():
        object.__setattr__(changed, name, value)
    return changed
