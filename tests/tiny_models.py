"""Randomly initialised models of the architectures we support, small enough to write out."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 512
CONTEXT = 4096
_SPECIAL = ("<unk>", "<s>", "</s>", "<pad>")
_CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def write(
    folder: Path,
    architecture: str = "llama",
    *,
    query_heads: int = 8,
    kv_heads: int = 4,
    layers: int = 4,
    head_dim: int = 32,
    tokenizer: Tokenizer | None = None,
) -> Path:
    """Write a model and a tokenizer whose word ``w<i>`` is token ``i + 4``; return `folder`."""
    config_class, model_class = _CLASSES[architecture]
    torch.manual_seed(0)
    config = config_class(
        vocab_size=VOCABULARY,
        hidden_size=query_heads * head_dim,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=query_heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
        initializer_range=0.3,
    )
    model_class(config).float().save_pretrained(folder)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer or _words(),
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    fast.save_pretrained(folder)
    return folder


def _words() -> Tokenizer:
    words = [*_SPECIAL, *(f"w{i}" for i in range(VOCABULARY - 4))]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


def characters() -> Tokenizer:
    """A tokenizer that can write any text: a token for each of the 256 bytes."""
    words = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
