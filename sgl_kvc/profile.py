"""Which heads of a model retrieve: measured once, read by policies that tell heads apart.

RazorAttention (arXiv 2407.15891) finds them on random tokens that are repeated: what a head then
attends to far back it can only have found by its content. A head that attends to the token's
earlier copies is an echo head, one that attends to what followed them an induction head.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

FILE_NAME = "kvc_head_profile.json"
_ATTENTION = "kvc_head_profile"
_MARKUP = re.compile(r"<.*>|\[.*\]", re.DOTALL)
#: Attention weights held at a time.
_BLOCK = 1 << 24


class ProfileError(ValueError):
    """A model that cannot be profiled, or a profile that cannot be read; the message says why."""


def measure(model_path: str, *, tokens: int = 2500, copies: int = 4, seed: int = 0) -> dict:
    """Profile a model: what the profile's file holds.

    The model runs in transformers, on the accelerator if there is one, once over
    ``tokens * copies`` tokens, fewer where its vocabulary or its positions allow no more.

    Parameters
    ----------
    model_path : folder or Hugging Face id.
    tokens : random tokens, all different, in a copy; the paper has 2500.
    copies : times they are repeated; the paper has 4.

    Returns
    -------
    ``model`` and ``method`` in words, and ``heads`` [L][H]: for every KV head the attention mass,
    0 to 1, that tokens of the second and later copies put on their earlier copies or, if that is
    more, on what followed these; the highest of its query heads, the mean over tokens.

    Raises
    ------
    ProfileError : when transformers cannot load the model, or it takes too few tokens.
    """
    from transformers import AttentionInterface, AutoModel, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        model = AutoModel.from_pretrained(model_path, dtype="auto")
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ProfileError(f"transformers cannot load {model_path}: {reason}") from error
    model = model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
    config = model.config.get_text_config()
    words = ordinary_tokens(tokenizer, config.vocab_size)
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    room = getattr(config, "max_position_embeddings", None) or (1 << 30)
    tokens = min(tokens, len(words), (room - len(begin)) // max(copies, 1))
    if tokens < 2 or copies < 2:
        raise ProfileError(
            f"{copies} copies of {tokens} tokens show nothing: both must be at least 2"
        )
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.tensor(words)[torch.randperm(len(words), generator=generator)[:tokens]]
    ids = torch.cat([torch.tensor(begin, dtype=torch.int64), chosen.repeat(copies)])

    layers: dict[int, torch.Tensor] = {}

    def attention(module, query, key, value, mask, scaling=None, **_):  # as transformers calls it
        scale = scaling if scaling is not None else query.shape[-1] ** -0.5
        layers[module.layer_idx] = retrieval(query[0], key[0], scale, tokens, len(begin))
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register(_ATTENTION, attention)
    model.set_attn_implementation(_ATTENTION)
    with torch.inference_mode():
        model(input_ids=ids[None].to(model.device), use_cache=False)
    heads = torch.stack([layers[layer].cpu() for layer in sorted(layers)])
    path = Path(model_path)
    return {
        "model": path.resolve().name if path.is_dir() else model_path,
        "method": "RazorAttention, arXiv 2407.15891: attention to earlier copies of a token or to "
        f"what followed them; {tokens} random tokens x {copies}, seed {seed}",
        "heads": [[round(head, 4) for head in layer] for layer in heads.tolist()],
    }


def ordinary_tokens(tokenizer: Any, vocabulary: int) -> list[int]:
    """Ids of tokens that stand for text: no added or special ones, none in brackets."""
    added = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    texts = tokenizer.convert_ids_to_tokens(range(min(vocabulary, len(tokenizer))))
    return [
        number
        for number, text in enumerate(texts)
        if text is not None and number not in added and not _MARKUP.fullmatch(text)
    ]


def retrieval(
    queries: torch.Tensor, keys: torch.Tensor, scale: float, length: int, begin: int
) -> torch.Tensor:
    """How much each KV head retrieves on a text of `length` tokens repeated: float32 [H].

    Parameters
    ----------
    queries : [H*G, T, D], rotated; query head ``h*G + g`` reads KV head ``h``.
    keys : [H, T, D], rotated.
    length : tokens of a copy, at least 2.
    begin : tokens before the first copy; T is `begin` plus copies * `length`.
    """
    heads, total = keys.shape[:2]
    grouped = queries.unflatten(0, (heads, -1))
    rows = max(1, _BLOCK // (queries.shape[0] * total))
    positions = torch.arange(total, device=keys.device)
    mass = torch.zeros(2, *grouped.shape[:2], device=keys.device)
    for first in range(begin + length, total, rows):
        here = positions[first : first + rows, None]
        logits = grouped[:, :, first : first + rows] @ keys[:, None].transpose(-1, -2)
        logits = (logits.float() * scale).masked_fill_(positions > here, float("-inf"))
        attention = logits.softmax(dim=-1)
        for kind in range(2):  # echo, induction: the copy itself, what follows it
            source = positions - kind
            copy = (source >= begin) & (source < here) & ((here - source) % length == 0)
            mass[kind] += (attention * copy).sum(dim=(-1, -2))
    return (mass / (total - begin - length)).amax(dim=(0, 2))


def read(path: str | Path) -> torch.Tensor:
    """The profile in a file: float32 [L, H]. Raises ProfileError for anything else."""
    try:
        heads = json.loads(Path(path).read_text(encoding="utf-8"))["heads"]
        profile = torch.tensor(heads, dtype=torch.float32)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ProfileError(f"{path} is no head profile: {error!r}") from error
    if profile.dim() != 2 or not bool(((profile >= 0) & (profile <= 1)).all()):
        raise ProfileError(f"{path}: heads must be a list of layers of numbers from 0 to 1")
    return profile


def write(profile: dict, path: Path) -> None:
    """Write what `measure` returned, a layer a line."""
    layers = ",\n    ".join(json.dumps(layer) for layer in profile["heads"])
    fields = [f"{json.dumps(key)}: {json.dumps(profile[key])}" for key in ("model", "method")]
    fields.append(f'"heads": [\n    {layers}\n  ]')
    path.write_text("{\n  " + ",\n  ".join(fields) + "\n}\n", encoding="utf-8")
