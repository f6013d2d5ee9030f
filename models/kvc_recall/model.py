"""A small Llama in plain torch, for training; `save` writes it as `LlamaForCausalLM`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .vocabulary import BOS, EOS, INDEX, MAX_POSITIONS, PAD, WORDS, save_tokenizer


@dataclass(frozen=True)
class Shape:
    """Sizes of the model. Query heads per KV head is `heads / kv_heads`."""

    layers: int = 4
    width: int = 128
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    ffn: int = 384
    vocabulary: int = len(WORDS)
    theta: float = 1e5
    eps: float = 1e-5


def _linear(fan_in: int, fan_out: int, std: float) -> nn.Linear:
    layer = nn.Linear(fan_in, fan_out, bias=False)
    nn.init.normal_(layer.weight, std=std)
    return layer


class Layer(nn.Module):
    """Attention and gated FFN, each behind an RMS norm."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.shape = s
        inner = s.heads * s.head_dim
        into = 0.7 / s.width**0.5
        self.q_proj = _linear(s.width, inner, into)
        self.k_proj = _linear(s.width, s.kv_heads * s.head_dim, into)
        self.v_proj = _linear(s.width, s.kv_heads * s.head_dim, into)
        self.o_proj = _linear(inner, s.width, 1 / (inner * 2 * s.layers) ** 0.5)
        self.gate_proj = _linear(s.width, s.ffn, into)
        self.up_proj = _linear(s.width, s.ffn, into)
        self.down_proj = _linear(s.ffn, s.width, 1 / (s.ffn * 2 * s.layers) ** 0.5)
        self.input_layernorm = nn.RMSNorm(s.width, s.eps)
        self.post_attention_layernorm = nn.RMSNorm(s.width, s.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`x [B, T, width]` to the same; `cos`, `sin` are `[T, head_dim]`."""
        s, (batch, length, _) = self.shape, x.shape
        h = self.input_layernorm(x)
        q = self.q_proj(h).view(batch, length, s.heads, s.head_dim).transpose(1, 2)
        k = self.k_proj(h).view(batch, length, s.kv_heads, s.head_dim).transpose(1, 2)
        v = self.v_proj(h).view(batch, length, s.kv_heads, s.head_dim).transpose(1, 2)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        groups = s.heads // s.kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        h = F.scaled_dot_product_attention(q, k.to(v.dtype), v, is_causal=True)
        x = x + self.o_proj(h.transpose(1, 2).reshape(batch, length, -1))
        h = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return (x * cos + torch.cat((-b, a), -1) * sin).to(x.dtype)


class Model(nn.Module):
    """Token ids `[B, T]` to final hidden states `[B, T, width]`; `logits` reads them out."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        nn.init.normal_(self.embed_tokens.weight, std=0.08)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, shape.eps)
        pairs = torch.arange(0, shape.head_dim, 2) / shape.head_dim
        angles = torch.outer(torch.arange(MAX_POSITIONS), shape.theta**-pairs).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, self.cos[:length], self.sin[:length])
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits, from the tied embedding."""
        return F.linear(hidden, self.embed_tokens.weight.to(hidden.dtype))


def config(shape: Shape, dtype: str) -> dict:
    """The `config.json` of `LlamaForCausalLM`."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": shape.width, "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary, "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": shape.eps, "rope_theta": shape.theta, "rope_scaling": None,
        "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0,
        "tie_word_embeddings": True, "initializer_range": 0.02, "use_cache": True,
        "bos_token_id": INDEX[BOS], "eos_token_id": INDEX[EOS], "pad_token_id": INDEX[PAD],
        "torch_dtype": dtype,
    }  # fmt: skip


# Where transformers keeps each projection of a layer.
_PARTS = dict.fromkeys("qkvo", "self_attn") | dict.fromkeys(("gate", "up", "down"), "mlp")


def save(model: Model, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write weights, config, generation config and tokenizer to `folder`."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, value in model.state_dict().items():
        for part, module in _PARTS.items():
            name = name.replace(f".{part}_proj.", f".{module}.{part}_proj.")
        tensors[f"model.{name}"] = value.detach().to(dtype).contiguous()
    weights = folder / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors keeps other users out
    name = str(dtype).removeprefix("torch.")
    eos = {"bos_token_id": INDEX[BOS], "eos_token_id": INDEX[EOS], "pad_token_id": INDEX[PAD]}
    for file, content in (
        ("config.json", config(model.shape, name)),
        ("generation_config.json", {"do_sample": False, **eos}),
    ):
        (folder / file).write_text(json.dumps(content, indent=2) + "\n")
    save_tokenizer(folder)
