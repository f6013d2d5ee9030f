"""A GGUF file becomes a folder in Hugging Face's format: `python convert.py FILE FOLDER`.

transformers reads GGUF with the packages `gguf` and `accelerate`, which have to be importable.
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert(gguf: Path, folder: Path) -> None:
    """Write weights in float32, tokenizer, chat template and config to `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    print("  tokenizer ...", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    print("  weights ...", flush=True)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # GGUF does not tell the tokenizer; its own default is more than JSON's integers hold, and a
    # wrong token.
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
