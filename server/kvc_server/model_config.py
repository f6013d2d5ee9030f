"""Read a Hugging Face config.json, without loading the model, for what its KV cache costs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvc_server.plan import KVShape, PlanError

DTYPE_BYTES = {
    "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
_SHORT = {
    "fp32": "float32", "float": "float32", "fp16": "float16", "half": "float16",
    "bf16": "bfloat16", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2",
}  # fmt: skip
_MLA = ("kv_lora_rank",)
_STATE_SPACE = (
    "ssm_cfg", "mamba_d_state", "mamba_num_heads", "state_size", "ssm_state_size",
    "hybrid_override_pattern", "layers_block_type", "block_types", "attn_type_list",
    "full_attention_interval", "linear_num_key_heads", "lru_width", "rwkv_version",
)  # fmt: skip
_FULL = {"full_attention", "attention", "global"}


def read_config(path: Path) -> dict[str, Any]:
    """The parsed config at `path`, a file or the folder it lies in. Raises PlanError."""
    if path.is_dir():
        path = path / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise PlanError(f"there is no {path}; give a model folder or its config.json") from None
    except (OSError, ValueError) as error:
        raise PlanError(f"{path} is not a readable JSON file: {error}") from None
    if not isinstance(config, dict):
        raise PlanError(f"{path} must hold a JSON object")
    return config


def kv_shape(config: Mapping[str, Any], kv_dtype: str | None = None) -> KVShape:
    """Layers, heads and bytes of the cache. Raises PlanError for a kind we do not compress.

    The text model of a multimodal one stands under ``text_config``.
    """
    text = config.get("text_config")
    merged = {**config, **text} if isinstance(text, Mapping) else dict(config)
    refuse_unsupported(merged)
    heads = _count(merged, "num_attention_heads")
    kv_heads = _count(merged, "num_key_value_heads", heads)
    if merged.get("head_dim") is not None:
        head_dim = _count(merged, "head_dim")
    else:
        head_dim = _count(merged, "hidden_size") // heads
    dtype = str(kv_dtype or merged.get("dtype") or merged.get("torch_dtype") or "float32")
    dtype = dtype.removeprefix("torch.").lower()
    dtype = _SHORT.get(dtype, dtype)
    if dtype not in DTYPE_BYTES:
        raise PlanError(f"--kv-dtype: unknown {dtype!r}; known are {', '.join(DTYPE_BYTES)}")
    return KVShape(
        _count(merged, "num_hidden_layers"), kv_heads, head_dim, dtype, DTYPE_BYTES[dtype]
    )


def refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Raise PlanError, saying why, for a model whose cache is not plain full attention."""
    name = config.get("model_type") or "this model"
    for field in _MLA:
        if config.get(field):
            raise PlanError(
                f"{name} is not supported: multi-head latent attention ({field}) "
                "shares one latent between all heads"
            )
    for field in _STATE_SPACE:
        if config.get(field):
            raise PlanError(
                f"{name} is not supported: hybrid or state-space layers ({field}) "
                "do not keep a KV per token"
            )
    kinds = config.get("layer_types")
    other = {str(kind) for kind in kinds} - _FULL if isinstance(kinds, list) else set()
    for kind in sorted(other):
        what = "sliding-window" if "sliding" in kind or "chunk" in kind else "state-space or linear"
        raise PlanError(f"{name} is not supported: {what} layers ({kind} in layer_types)")
    if not other and (window := _window(config)):
        raise PlanError(
            f"{name} is not supported: sliding-window attention ({window}) already drops KVs"
        )
    if config.get("is_encoder_decoder"):
        raise PlanError(f"{name} is not supported: encoder-decoder models have two caches")


def _window(config: Mapping[str, Any]) -> str | None:
    """The field that says that attention is local, if one does."""
    if config.get("attention_chunk_size"):
        return "attention_chunk_size"
    window = config.get("sliding_window")
    if not isinstance(window, int) or isinstance(window, bool) or window <= 0:
        return None
    qwen = str(config.get("model_type", "")).startswith("qwen")
    used = config.get("use_sliding_window", not qwen)  # Qwen's default is off
    if not used or isinstance(config.get("layer_types"), list):
        return None
    longest = config.get("max_position_embeddings")
    return None if isinstance(longest, int) and window >= longest else "sliding_window"


def weights_bytes(path: Path) -> int | None:
    """Bytes of the safetensors files beside the config, None when there are none."""
    folder = path if path.is_dir() else path.parent
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        metadata = read_config(index).get("metadata")
        size = metadata.get("total_size") if isinstance(metadata, Mapping) else None
        if isinstance(size, (int, float)) and size > 0:
            return int(size)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) or None


def _count(config: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = config.get(field)
    value = default if value is None else value
    if value is None:
        raise PlanError(f"config.json has no {field}")
    if isinstance(value, list):
        raise PlanError(f"{field} differs from layer to layer, which is not supported")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{field} must be a whole number of at least 1 (got {value!r})")
    return value
