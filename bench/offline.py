"""The same policies outside the engine: transformers, and attention masked to what is kept.

    python -m bench.offline --task questions8 --n 32 '{"rate": 8}' '{"rate": 8, "pool": 7}'

prints, for each knob, how many of the prompts that the uncompressed model answers rightly are
still answered so. No server is needed, so this is the quick way to try a scorer or its
parameters; what the engine answers is the same (tests/bench/test_offline.py).

    python -m bench.offline --model FOLDER --task numbers '{"rate": 4, "question_tokens": "all"}'

asks a model of language (a folder in Hugging Face's format) for numbers in an English text, and
only after compression: "all" are the tokens that follow the prompt's document. `"oracle": true`
scores keys by what the answer will attend to: how good any scores could be with the same bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from kvc_kernels.extend import attend
from kvc_kernels.score import window_attention
from kvc_recall import model_path
from kvc_recall.tasks import TASKS, sample
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, DynamicCache

from bench.answers import Records, grade, line
from bench.documents import numbers
from sgl_kvc import profile
from sgl_kvc.policy.facts import ModelFacts
from sgl_kvc.policy.kvs import PromptKVs
from sgl_kvc.policy.scores import PromptScores
from sgl_kvc.policy.selection import Selection, select
from sgl_kvc.spec import OFF, CompressionSpec, Extent, parse

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
        self._end = self.config.eos_token_id
        self.facts = self._read_facts(folder)
        self._hidden: torch.Tensor | None = None  # bool [L, H, S], keys a head has lost
        self._seen: list[tuple[torch.Tensor, ...]] | None = None  # while `layers` runs
        self._tokens: list[int] | None = None  # what `layers` was last asked for

    @torch.inference_mode()
    def prefill(self, tokens: list[int]) -> None:
        """One forward over `tokens`, for its time."""
        self._hidden = self._seen = None
        self.model(torch.tensor([tokens]), past_key_values=DynamicCache(), logits_to_keep=1)

    @torch.inference_mode()
    def layers(self, tokens: list[int]) -> list[tuple[torch.Tensor, ...]]:
        """Of every layer queries [n, H*G, D], keys and values [n, H, D], rotated, and the queries'
        log-sum-exp [n, H*G]. Those of the last `tokens` are remembered, for its beginnings too."""
        known = self._tokens or []
        if not tokens or known[: len(tokens)] != tokens:
            self._hidden, self._seen, self._cache = None, [], DynamicCache()
            batch = torch.tensor([tokens])
            out = self.model(batch, past_key_values=self._cache, logits_to_keep=1)
            self._tokens, self._logits = tokens, out.logits
            self._layers, self._seen = self._seen, None
        elif len(known) > len(tokens):
            self._tokens, self._logits = tokens, None
            self._layers = [tuple(x[: len(tokens)] for x in layer) for layer in self._layers]
        self._cache.crop(len(tokens))
        return self._layers

    @torch.inference_mode()
    def generate(self, tokens: list[int], spec: CompressionSpec, most: int) -> list[int]:
        """Up to `most` tokens, the end of sequence included."""
        logits = self._compress(tokens, spec)
        out = [int(logits[0, -1].argmax())]
        while len(out) < most and out[-1] != self._end:
            logits = self._forward(out[-1:])
            out.append(int(logits[0, -1].argmax()))
        return out

    @torch.inference_mode()
    def answer(
        self, tokens: list[int], spec: CompressionSpec, said: list[int], most: int,
        oracle: bool = False,
    ) -> dict[str, list[int]]:
        """What comes of an answer that the uncompressed model gave, as token ids.

        Parameters
        ----------
        said : its tokens.
        most : tokens generated.
        oracle : keep what `said` will attend to, instead of what the spec's scorer says.

        Returns
        -------
        forced : the most likely token at each place of `said`, where all before are as in it.
        generated : greedily, up to `most`, no further than `said` if the same.
        """  # fmt: skip
        logits = self._compress(tokens, spec, said if oracle else None)[:, -1:]
        if len(said) > 1:
            logits = torch.cat((logits, self._forward(said[:-1])), dim=1)
        forced = logits[0].argmax(dim=-1).tolist()
        same = next((i for i, token in enumerate(said) if token != forced[i]), len(said))
        generated = forced[: same + 1]
        self._cache.crop(len(tokens) + same)
        while same < len(said) and len(generated) < most and generated[-1] != self._end:
            generated.append(int(self._forward(generated[-1:])[0, -1].argmax()))
        return {"forced": forced, "generated": generated}

    @torch.inference_mode()
    def force(self, tokens: list[int], spec: CompressionSpec, answer: int) -> torch.Tensor:
        """Log-likelihoods [answer, vocabulary] at each of the last `answer` of `tokens`.

        These have to be read after compression: the spec's ``question_tokens`` covers them.
        """
        if Extent.of(spec, len(tokens), self.page_size).compressed:
            logits = self._compress(tokens, spec)
        else:
            self._hidden = self._seen = None
            batch, cache = torch.tensor([tokens]), DynamicCache()
            logits = self.model(batch, past_key_values=cache, logits_to_keep=answer + 1).logits
        return logits[0, -answer - 1 : -1].log_softmax(-1)

    def _forward(self, tokens: list[int]) -> torch.Tensor:
        return self.model(torch.tensor([tokens]), past_key_values=self._cache).logits

    def _compress(
        self, tokens: list[int], spec: CompressionSpec, answer: list[int] | None = None
    ) -> torch.Tensor:
        """Read `tokens`, what follows the cut with what was kept; logits of the last.

        Parameters
        ----------
        answer : keys are scored by what it attends to, and what lies between it and the cut.
        """
        layers, page = self.config.num_hidden_layers, self.page_size
        extent = Extent.of(spec, len(tokens), page)
        seen = self.layers(tokens[: extent.scored])
        if extent.scored == len(tokens) and self._logits is None:
            self._tokens = None
            seen = self.layers(tokens)
        logits, self._hidden = self._logits, None
        if extent.compressed:
            if answer is None:
                chosen = self._scores(seen, tokens, spec, extent).select()
            else:
                chosen = self._foreseen(tokens[extent.scored :] + answer[:-1], spec, extent)
            kept = torch.zeros(layers * self.config.num_key_value_heads, extent.end)
            kept[:, : extent.begin] = 1
            runs = chosen.positions.split((chosen.pages * page).tolist())
            for head, run in zip(kept, runs, strict=True):
                head[run] = 1
            self._hidden = (kept == 0).view(layers, -1, extent.end)
        if extent.scored < len(tokens):
            logits = self._forward(tokens[extent.scored :])
        return logits

    def _scores(
        self, seen: list, tokens: list[int], spec: CompressionSpec, extent: Extent
    ) -> PromptScores:
        scores = PromptScores(spec, extent, tokens, self.page_size, len(seen), self.facts)
        for layer, (queries, *cached, lse) in enumerate(seen):
            scores.observe(layer, queries, PromptKVs.of(*cached), self._scale, lse)
        return scores

    def _foreseen(self, follows: list[int], spec: CompressionSpec, extent: Extent) -> Selection:
        """What is kept if scores are the squared attention of what `follows` the scored."""
        self._seen = []
        self._forward(follows)
        seen, self._seen = self._seen, None
        self._cache.crop(extent.scored)
        scores = [window_attention(q, k, self._scale, 2)[:, : extent.end] for q, k, *_ in seen]
        return select(
            torch.stack(scores), spec, extent.segment_blocks, self.page_size,
            tail=extent.scored - extent.end,
        )  # fmt: skip

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
        queries, *cached = (x[0].transpose(0, 1) for x in (query, key, value))
        out = lse = None
        if self._hidden is None:
            out, lse = attend(queries, key[0], value[0], scaling)
        if self._seen is not None:
            self._scale = scaling
            self._seen.append((queries, *cached, lse))
        if out is not None:
            return out[None], None
        visible = torch.ones(new, total, dtype=torch.bool).tril(total - new)
        visible = visible.expand(key.shape[1], new, total).clone()
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


def asked(args: argparse.Namespace, tokenizer: Any, seed: int) -> tuple[list[int], int, str]:
    """A prompt's tokens, how many of the first are document, and the answer."""
    if args.task == "numbers":
        document, question, answer = numbers(seed, args.tokens)
        text, begin = f"{document}\n\n{question}", document
    else:
        prompt = sample(args.task, args.tokens, Random(SEED + seed))
        text, answer = prompt.text, prompt.answer
        begin = text[: text.rindex(" . ") + 2]
    whole, before = (prompt_tokens(tokenizer, each) for each in (text, begin))
    same = next((i for i, (a, b) in enumerate(zip(whole, before, strict=False)) if a != b), 0)
    return whole, same or min(len(whole), len(before)), answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("knobs", nargs="+", type=json.loads, help="kv_compression objects")
    parser.add_argument("--model", type=Path, default=model_path(), help="a folder")
    parser.add_argument("--task", choices=[*TASKS, "numbers"], default="questions8")
    parser.add_argument("--n", type=int, default=32, help="prompts answered uncompressed")
    parser.add_argument("--first", type=int, default=0, help="the first prompt's seed")
    parser.add_argument("--tokens", type=int, default=1024, help="of a prompt")
    parser.add_argument("--out", type=Path, help="records, which a later run goes on with")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which it stops")
    args = parser.parse_args()
    torch.set_num_threads(1)
    masked, tokenizer = MaskedModel(args.model), AutoTokenizer.from_pretrained(args.model)
    records, grades, seed, seen = Records(args.out), [[] for _ in args.knobs], args.first, 0
    begin = time.monotonic()
    while seen < args.n and time.monotonic() - begin < args.seconds:
        of, seed = [args.task, args.tokens, seed], seed + 1
        tokens, document, answer = asked(args, tokenizer, of[-1])
        most = len(answer.split()) + (32 if args.task == "numbers" else 2)
        if of not in records:
            said = masked.generate(tokens, OFF, most)
            ends = [i for i in range(1, len(said) + 1) if answer in tokenizer.decode(said[:i])]
            records[of] = said[: ends[0]] if ends else None
        said = records[of]
        if said is None:
            continue  # not a prompt that compression could spoil
        seen += 1
        for given, row in zip(args.knobs, grades, strict=True):
            if [of, given] not in records:
                knob = {key: value for key, value in given.items() if key != "oracle"}
                if knob.get("question_tokens") == "all":
                    knob["question_tokens"] = len(tokens) - document
                got = masked.answer(tokens, parse(knob), said, most, given.get("oracle", False))
                records[[of, given]] = grade(tokenizer, said, answer, got)
            row.append(records[[of, given]])
        told = [sum(each["right"] for each in row) for row in grades]
        print(f"{seen} of {seed - args.first}: {told}", file=sys.stderr, flush=True)
    print(f"{seen} of {seed - args.first} prompts answered uncompressed; of these right [95 %],")
    print("in the same words, tokens right after the uncompressed model's:")
    for knob, row in zip(args.knobs, grades, strict=True):
        print(line(knob, row))


if __name__ == "__main__":
    main()
