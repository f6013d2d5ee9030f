"""What cannot be compressed, said in one sentence before anything is served wrongly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvc_kernels.dispatch import interpreted

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.server_args import ServerArgs

#: What ``--kv-cache-dtype`` and ``--page-size`` may be.
_CACHE_DTYPES = ("auto", "float32", "float16", "bfloat16", "bf16", "fp8_e4m3", "fp8_e5m2")
_PAGE_SIZES = (8, 16, 32, 64)
#: The widest head that the Triton kernels have tiles for, and the first GPU that knows fp8 e4m3.
MAX_HEAD_DIM = 256
_FIRST_WITH_E4M3 = (8, 9)

_OTHER_LAYOUT = "the arena's layout is its own"
_OTHER_COPY = "it copies KVs in a layout that the arena does not have"
_PART_OF_A_HEAD = "a rank would hold a part of a head's positions"
_AT_ONCE = "two batches at once would share what the attention backend prepares for one"


class UnsupportedError(ValueError):
    """A model or server option that sgl-kvc cannot serve. The message says which and why."""


def check_model(config: ModelConfig) -> None:
    """Raise UnsupportedError unless all layers hold one plain KV per token and head."""
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import AttentionArch

    name = (config.hf_config.architectures or ["this model"])[0]
    text = config.hf_text_config
    refused = {
        "multi-head latent attention (MLA) is": config.attention_arch != AttentionArch.MHA,
        "sliding-window attention is": config.is_hybrid_swa or _window(text) is not None,
        "hybrid state-space or linear attention is": mambaish_config(config) is not None,
        "chunked local attention is": bool(getattr(text, "attention_chunk_size", None)),
        "encoder-decoder models are": bool(getattr(config, "is_encoder_decoder", False)),
        "models that do not generate are": not config.is_generation,
    }
    for what, found in refused.items():
        if found:
            raise UnsupportedError(f"{name}: {what} not supported")


def check_server(args: ServerArgs) -> None:
    """Raise UnsupportedError for options with which KVs would be moved or read wrongly."""
    if args.attention_backend != "kvc":
        raise UnsupportedError(
            "kvc cannot be the attention backend of prefill or decode alone: "
            "give --attention-backend kvc"
        )
    for option, given, reason in (*_attention_options(args), *_memory_options(args)):
        if given:
            raise UnsupportedError(
                f"{option} cannot be combined with --attention-backend kvc: {reason}"
            )


def check_device(
    config: ModelConfig, cache_dtype: str, capability: tuple[int, int] | None
) -> None:
    """Raise UnsupportedError for a model or cache that no kernel of this device can compute.

    Parameters
    ----------
    cache_dtype : as ``--kv-cache-dtype`` has it.
    capability : compute capability of the GPU; None on a CPU, where torch takes every shape.
    """
    widest = max(config.head_dim, config.v_head_dim)
    if (capability is not None or interpreted()) and widest > MAX_HEAD_DIM:
        raise UnsupportedError(
            f"heads of {widest} numbers are not supported: the Triton kernels take {MAX_HEAD_DIM}"
        )
    if cache_dtype == "fp8_e4m3" and capability is not None and capability < _FIRST_WITH_E4M3:
        raise UnsupportedError(
            "--kv-cache-dtype fp8_e4m3 needs a GPU of compute capability 8.9 or later; "
            f"this one has {capability[0]}.{capability[1]}, where fp8_e5m2 works"
        )


def check_layer(layer: RadixAttention, extras: dict) -> None:
    """Raise UnsupportedError for attention that is more than softmax(QK')V."""
    kind = "cross" if layer.is_cross_attention else layer.attn_type.value
    if kind != "decoder":
        raise UnsupportedError(f"layer {layer.layer_id}: {kind} attention")
    if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
        raise UnsupportedError(f"layer {layer.layer_id}: sliding-window attention")
    if layer.logit_cap:
        raise UnsupportedError(f"layer {layer.layer_id}: attention logit soft-capping")
    used = [name for name, value in extras.items() if value is not None]
    if used:
        raise UnsupportedError(f"layer {layer.layer_id}: attention option {used[0]}")


def _window(text_config: Any) -> int | None:
    """The model's sliding window, None when it has none or does not use it."""
    if getattr(text_config, "use_sliding_window", True) is False:
        return None
    return getattr(text_config, "sliding_window", None)


def _attention_options(args: ServerArgs) -> Iterator[tuple[str, bool, str]]:
    """(option, whether it is given, why not) of what decides how attention is computed."""
    elsewhere = "all attention must read the arena, which only kvc can"
    for phase, backend in (
        ("prefill", args.prefill_attention_backend),
        ("decode", args.decode_attention_backend),
    ):
        yield f"--{phase}-attention-backend {backend}", backend not in (None, "kvc"), elsewhere
    device = args.device
    yield f"--device {device}", device not in ("cpu", "cuda"), "there are no kernels for it"
    graphs = args.cuda_graph_config
    if graphs is not None:
        yield (
            f"--cuda-graph-backend-prefill {graphs.prefill.backend}",
            graphs.prefill.backend not in ("breakable", "disabled"),
            "prompts are scored between layers, which only breakable graphs leave out of the graph",
        )
        yield (
            f"--cuda-graph-backend-decode {graphs.decode.backend}",
            graphs.decode.backend not in ("full", "disabled"),
            "decode steps are captured whole",
        )
    yield from (
        ("--enable-torch-compile", args.enable_torch_compile,
         "compiled code would keep what one step has prepared"),
        ("--speculative-algorithm", args.speculative_algorithm is not None,
         "drafts are verified on KVs of SGLang's layout"),
        ("--dllm-algorithm", args.dllm_algorithm is not None,
         "diffusion models attend to what comes after a token too"),
        ("--enable-mis", args.enable_mis, "items of one prompt must not attend to each other"),
        ("--enable-two-batch-overlap", args.enable_two_batch_overlap, _AT_ONCE),
        ("--enable-pdmux", args.enable_pdmux, _AT_ONCE),
        ("--enable-dp-attention", args.enable_dp_attention, "it has not been tested"),
        ("--dcp-size above 1", args.dcp_size > 1, _PART_OF_A_HEAD),
        ("--attn-cp-size above 1", args.attn_cp_size > 1, _PART_OF_A_HEAD),
        ("--enable-prefill-cp", args.enable_prefill_cp, _PART_OF_A_HEAD),
        ("--pp-size above 1", args.pp_size > 1, "heads of all layers share one budget"),
        ("--enable-hisparse", args.enable_hisparse, "it attends to a selection of its own"),
    )  # fmt: skip


def _memory_options(args: ServerArgs) -> Iterator[tuple[str, bool, str]]:
    """(option, whether it is given, why not) of what decides where KVs lie and go."""
    cache = args.radix_cache_backend
    yield from (
        (f"--page-size {args.page_size}", args.page_size not in _PAGE_SIZES,
         "a block has 8, 16, 32 or 64 tokens"),
        (f"--kv-cache-dtype {args.kv_cache_dtype}", args.kv_cache_dtype not in _CACHE_DTYPES,
         f"it must be one of {', '.join(_CACHE_DTYPES)}"),
        ("--quantization-param-path", args.quantization_param_path is not None,
         "KVs are stored without scales"),
        ("--disable-radix-cache", args.disable_radix_cache,
         "requests are compressed by the radix cache"),
        (f"--radix-cache-backend {cache}", cache != "kvc",
         "requests are compressed by its own radix cache"),
        ("--enable-session-radix-cache", args.enable_session_radix_cache,
         "SGLang has it in another radix cache"),
        ("--enable-streaming-session", args.enable_streaming_session,
         "a session's requests share a row that compression changes"),
        ("--disaggregation-mode", args.disaggregation_mode != "null", _OTHER_COPY),
        ("--enable-hierarchical-cache", args.enable_hierarchical_cache, _OTHER_COPY),
        ("--enable-lmcache", args.enable_lmcache, _OTHER_COPY),
        ("--enable-flexkv", args.enable_flexkv, _OTHER_COPY),
        ("--enable-page-major-kv-layout", args.enable_page_major_kv_layout, _OTHER_LAYOUT),
        ("--enable-unified-memory", args.enable_unified_memory, _OTHER_LAYOUT),
        ("--kv-canary", args.kv_canary != "none", _OTHER_LAYOUT),
        ("--prefill-only-disable-kv-cache", args.prefill_only_disable_kv_cache,
         "there would be nothing to compress"),
    )  # fmt: skip
