"""What cannot be compressed, said in one sentence before anything is served wrongly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.radix_attention import RadixAttention


#: What ``--kv-cache-dtype`` may be.
_CACHE_DTYPES = ("auto", "float32", "float16", "bfloat16", "bf16", "fp8_e4m3", "fp8_e5m2")


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


def check_server(args: Any) -> None:
    """Raise UnsupportedError for a server option that moves KVs behind the arena's back."""
    refused = {
        "--speculative-algorithm": args.speculative_algorithm is not None,
        "--disaggregation-mode": args.disaggregation_mode != "null",
        "--enable-hierarchical-cache": args.enable_hierarchical_cache,
        "--pp-size above 1": args.pp_size > 1,
        "--disable-radix-cache": args.disable_radix_cache,
        "--enable-streaming-session": args.enable_streaming_session,
        "--page-size below 8": args.page_size is None or args.page_size < 8,
        f"--kv-cache-dtype {args.kv_cache_dtype}": args.kv_cache_dtype not in _CACHE_DTYPES,
    }
    for option, given in refused.items():
        if given:
            raise UnsupportedError(f"{option} cannot be combined with --attention-backend kvc")


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
