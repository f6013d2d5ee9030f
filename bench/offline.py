"""The same policies outside the engine: transformers, and attention masked to what is kept.

    python -m bench.offline --task questions8 --n 32 '{"rate": 8}' '{"rate": 8, "pool": 7}'

prints the share of answers that are right, for each knob on the same prompts. No server is
needed, so this is the quick way to try a scorer or its parameters; what the engine answers is the
same (tests/bench/test_offline.py).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from kvc_recall import model_path
from kvc_recall.tasks import TASKS, sample
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, DynamicCache

from sgl_kvc import profile
from sgl_kvc.policy.base import ModelFacts
from sgl_kvc.policy.scores import PromptScores
from sgl_kvc.spec import CompressionSpec, Extent, parse

SEED = 31_000_000  # far from the training's


class MaskedModel:
    """Greedy decoding with a full cache of which every head sees what its policy keeps.

    Parameters
    ----------
    folder : a model in Hugging Face's format.
    page_size : of the engine that is compared with.
    """

    def __init__(self, folder: Path, page_size: int = 16):
        AttentionInterface.register("kvc_offline", self._attention)
        self.model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="kvc_offline")
        self.config, self.page_size = self.model.config, page_size
        self.facts = self._read_facts(folder)
        self._scores: PromptScores | None = None
        self._hidden: torch.Tensor | None = None  # bool [L, H, S], keys a head has lost
        self._seen: list[tuple[torch.Tensor, ...]] | None = None

    @torch.inference_mode()
    def prefill(self, tokens: list[int]) -> None:
        """One forward over `tokens`, for its time."""
        self._scores = self._hidden = None
        self.model(torch.tensor([tokens]), past_key_values=DynamicCache(), logits_to_keep=1)

    @torch.inference_mode()
    def layers(self, tokens: list[int]) -> list[tuple[torch.Tensor, ...]]:
        """Of every layer queries [n, H*G, D], keys and values [n, H, D], rotated."""
        self._seen = []
        self.prefill(tokens)
        seen, self._seen = self._seen, None
        return seen

    @torch.inference_mode()
    def generate(self, tokens: list[int], spec: CompressionSpec, most: int) -> list[int]:
        """Up to `most` tokens, the end of sequence included."""
        logits, cache = self._compressed(tokens, spec)
        out = [int(logits[-1].argmax())]
        while len(out) < most and out[-1] != self.config.eos_token_id:
            logits = self.model(torch.tensor([out[-1:]]), past_key_values=cache).logits[0]
            out.append(int(logits[-1].argmax()))
        return out

    @torch.inference_mode()
    def force(self, tokens: list[int], spec: CompressionSpec, answer: int) -> torch.Tensor:
        """Log-likelihoods [answer, vocabulary] at each of the last `answer` of `tokens`.

        These have to be read after compression: the spec's ``question_tokens`` covers them.
        """
        logits, _ = self._compressed(tokens, spec)
        return logits[-answer - 1 : -1].log_softmax(-1)

    def _compressed(
        self, tokens: list[int], spec: CompressionSpec
    ) -> tuple[torch.Tensor, DynamicCache]:
        """Read a prompt: the logits of what is read last, and the cache; what is lost is hidden."""
        layers, page = self.config.num_hidden_layers, self.page_size
        extent = Extent.of(spec, len(tokens), page)
        self._scores = self._hidden = None
        cache = DynamicCache()
        if not extent.compressed:
            return self.model(torch.tensor([tokens]), past_key_values=cache).logits[0], cache
        scores = self._scores = PromptScores(spec, extent, tokens, page, layers, self.facts)
        logits = self.model(torch.tensor([tokens[: extent.scored]]), past_key_values=cache).logits
        self._scores = None
        chosen = scores.select()
        kept = torch.zeros(layers * self.config.num_key_value_heads, extent.end)
        kept[:, : extent.begin] = 1
        runs = chosen.positions.split((chosen.pages * page).tolist())
        for head, run in zip(kept, runs, strict=True):
            head[run] = 1
        self._hidden = (kept == 0).view(layers, -1, extent.end)
        if extent.scored < len(tokens):
            rest = torch.tensor([tokens[extent.scored :]])
            logits = self.model(rest, past_key_values=cache).logits
        return logits[0], cache

    @torch.inference_mode()
    def _read_facts(self, folder: Path) -> ModelFacts:
        body, half = self.model.model, self.config.head_dim // 2
        positions = torch.arange(self.config.max_position_embeddings)[None]
        cos, sin = body.rotary_emb(torch.zeros(1), positions)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        marks = [i for i in range(len(tokenizer)) if tokenizer.decode([i]).strip() in set(".,;:?")]
        file = folder / profile.FILE_NAME
        return ModelFacts(
            cos_sin=torch.cat((cos[0, :, :half], sin[0, :, :half]), -1),
            output_projection=[layer.self_attn.o_proj.weight for layer in body.layers],
            special_tokens=torch.tensor(tokenizer.all_special_ids),
            punctuation=torch.tensor(marks),
            head_profile=profile.read(file) if file.is_file() else None,
        )

    def _attention(self, module, query, key, value, attention_mask, scaling, **_kwargs):
        """`query [1, Hq, t, D]`, `key` and `value [1, H, n, D]` with the new tokens last."""
        new, total = query.shape[2], key.shape[2]
        by_token = tuple(x[0].transpose(0, 1) for x in (query, key, value))
        if self._seen is not None:
            self._seen.append(by_token)
        if self._scores is not None:
            queries, *cached = by_token
            self._scores.observe(module.layer_idx, queries, total, lambda: cached, scaling)
        if self._hidden is None and new == total:
            out = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scaling, enable_gqa=True
            )
            return out.transpose(1, 2), None
        visible = torch.ones(new, total, dtype=torch.bool).tril(total - new)
        visible = visible.expand(key.shape[1], new, total)
        if self._hidden is not None:
            visible = visible.clone()
            hidden = self._hidden[module.layer_idx]
            visible[:, :, : hidden.shape[-1]] &= ~hidden[:, None]
        visible = visible.repeat_interleave(query.shape[1] // key.shape[1], 0)
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=visible[None], scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None


def prompt_tokens(tokenizer, text: str) -> list[int]:
    """Token ids of a user message in the model's chat template."""
    message = [{"role": "user", "content": text}]
    whole = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    return tokenizer(whole, add_special_tokens=False)["input_ids"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("knobs", nargs="+", type=json.loads, help="kv_compression objects")
    parser.add_argument("--task", choices=list(TASKS), default="questions8")
    parser.add_argument("--n", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=1024)
    args = parser.parse_args()
    masked = MaskedModel(model_path())
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    right = [0] * len(args.knobs)
    for i in range(args.n):
        prompt = sample(args.task, args.tokens, Random(SEED + i))
        tokens, most = prompt_tokens(tokenizer, prompt.text), len(prompt.answer.split()) + 2
        for k, knob in enumerate(args.knobs):
            answer = tokenizer.decode(masked.generate(tokens, parse(knob), most))
            right[k] += answer.removesuffix(tokenizer.eos_token).split() == prompt.answer.split()
    for knob, count in zip(args.knobs, right, strict=True):
        print(f"{count / args.n:.3f}  {json.dumps(knob)}")


if __name__ == "__main__":
    main()
