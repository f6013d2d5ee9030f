"""What methods may know about the model that SGLang serves, read when one first asks."""

from __future__ import annotations

import functools
import os
import re
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from sgl_kvc import profile
from sgl_kvc.policy.facts import FactsError, ModelFacts

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

#: Names a head profile; without it the one beside the model's weights is read, if there.
PROFILE_VARIABLE = "SGL_KVC_HEAD_PROFILE"

_OUTPUT = re.compile(r"(?:^|\.)layers\.(\d+)\.self_attn\.o_proj$")


def read_facts(model_runner: ModelRunner) -> ModelFacts:
    """The facts about a loaded model. All but the head profile are found when asked for.

    Raises
    ------
    FactsError : when there is a head profile that cannot be read, or is another model's.
    """
    facts = _LoadedFacts(model_runner)
    _ = facts.head_profile
    return facts


class _LoadedFacts(ModelFacts):
    """`ModelFacts` whose attributes are found on first use."""

    _runner: ModelRunner

    def __init__(self, model_runner: ModelRunner):
        # The base's fields stay class attributes, so that the properties below are seen.
        object.__setattr__(self, "_runner", model_runner)

    __eq__, __hash__, __repr__ = object.__eq__, object.__hash__, object.__repr__

    @property
    def cos_sin(self) -> torch.Tensor | None:
        """SGLang's own table, read anew each time: it grows with the longest prompt."""
        return getattr(self._rotary, "cos_sin_cache", None)

    @property
    def neox(self) -> bool:
        return getattr(self._rotary, "is_neox_style", True)

    @functools.cached_property
    def output_projection(self) -> list[torch.Tensor] | None:
        """References to the weights; None unless every layer has a plain one."""
        found = {
            int(match[1]): _plain_weight(module)
            for name, module in self._runner.model.named_modules()
            if (match := _OUTPUT.search(name))
        }
        weights = [weight for _, weight in sorted(found.items()) if weight is not None]
        whole = len(weights) == len(found) == self._runner.token_to_kv_pool.layer_num
        return weights if whole else None

    @functools.cached_property
    def special_tokens(self) -> torch.Tensor | None:
        if self._tokenizer is None:
            return None
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        ids = {token for token, entry in added.items() if entry.special}
        return torch.tensor(sorted(ids | set(self._tokenizer.all_special_ids)), dtype=torch.int64)

    @functools.cached_property
    def punctuation(self) -> torch.Tensor | None:
        """Tokens whose text is nothing but punctuation, spaces around it aside.

        Decodes the whole vocabulary, once: about a second for 150,000 tokens.
        """
        if self._tokenizer is None:
            return None
        texts = self._tokenizer.batch_decode([[token] for token in range(len(self._tokenizer))])
        special = set() if self.special_tokens is None else set(self.special_tokens.tolist())
        ids = [
            token
            for token, text in enumerate(texts)
            if token not in special and _is_punctuation(text.strip())
        ]
        return torch.tensor(ids, dtype=torch.int64)

    @functools.cached_property
    def head_profile(self) -> torch.Tensor | None:
        """From the file that SGL_KVC_HEAD_PROFILE names, or the one in the model's folder.

        Of the heads this rank holds.
        """
        given = os.environ.get(PROFILE_VARIABLE)
        path = Path(given or Path(self._runner.server_args.model_path) / profile.FILE_NAME)
        if not given and not path.is_file():
            return None
        heads = self._runner.model_config.get_total_num_kv_heads()
        whole = _read_profile(path, self._runner.token_to_kv_pool.layer_num, heads)
        return whole[:, self._held_heads(heads)].to(self._runner.device)

    def _held_heads(self, heads: int) -> slice:
        """Which of the model's KV heads this rank holds.

        With more tensor-parallel ranks than heads, several ranks in a row hold the same one.
        """
        ranks, rank = self._runner.ps.attn_tp_size, self._runner.ps.attn_tp_rank
        first = rank * heads // ranks
        return slice(first, first + max(1, heads // ranks))

    @functools.cached_property
    def _rotary(self) -> nn.Module | None:
        modules = self._runner.model.modules()
        return next((module for module in modules if hasattr(module, "cos_sin_cache")), None)

    @functools.cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase | None:
        """None where the server has none, or one of another library (tiktoken)."""
        from sglang.srt.utils.hf_transformers_utils import get_tokenizer

        args = self._runner.server_args
        if args.skip_tokenizer_init:
            return None
        loaded = get_tokenizer(
            args.tokenizer_path or args.model_path,
            tokenizer_mode=args.tokenizer_mode,
            trust_remote_code=args.trust_remote_code,
            revision=args.revision,
        )
        return loaded if isinstance(loaded, PreTrainedTokenizerBase) else None


def _plain_weight(module: nn.Module) -> torch.Tensor | None:
    """A linear layer's weight [out, in] where it is stored as it is used, else None."""
    weight: torch.Tensor | None = getattr(module, "weight", None)
    wide = getattr(module, "input_size_per_partition", None), getattr(module, "output_size", None)
    if (
        weight is not None
        and weight.is_floating_point()
        and weight.element_size() > 1
        and not getattr(module, "use_intel_amx_backend", False)
        and tuple(weight.shape) == (wide[1], wide[0])
    ):
        return weight.detach()
    return None


def _is_punctuation(text: str) -> bool:
    """Marks of Unicode's class P, and ASCII's other symbols."""
    return bool(text) and all(
        unicodedata.category(mark).startswith("P") or mark in "$+<=>^`|~" for mark in text
    )


def _read_profile(path: Path, layers: int, heads: int) -> torch.Tensor:
    """float32 [L, H] of the whole model; raises FactsError."""
    try:
        found = profile.read(path)
    except profile.ProfileError as error:
        raise FactsError(str(error)) from error
    if tuple(found.shape) != (layers, heads):
        shape = " layers of ".join(map(str, found.shape))
        problem = f"of {shape} KV heads; the model has {layers} layers of {heads}"
        raise FactsError(f"{path} is the profile {problem}")
    return found
