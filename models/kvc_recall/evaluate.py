"""Exact match per task: `python -m kvc_recall.evaluate --model DIR --length 1024 --n 200`.

Prompts are drawn from seeds that training never uses, and decoded greedily by transformers'
`LlamaForCausalLM` in batches of one length, so there is no padding. An answer counts if every
token is right, the end included.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn

from . import model_path
from .tasks import TASKS, Prompt, sample
from .vocabulary import EOS, INDEX, PAD, WORDS, encode, render

logger = logging.getLogger("kvc_recall.evaluate")

HELD_OUT = "held out"


def held_out(task: str, length: int, index: int, **options: Any) -> Prompt:
    """Prompt number `index` of a task, from a random stream of its own.

    Training seeds its one stream with an integer; this one is seeded with a string.
    """
    return sample(task, length, Random(f"{HELD_OUT} {task} {length} {index}"), **options)


@torch.inference_mode()
def complete(model: nn.Module, prompts: list[str], most: int) -> list[str]:
    """Greedy completions of prompts of one length, each cut before its `<eos>`.

    `prompts` are user messages. Decodes `most` tokens at most, fewer if all rows have ended.
    """
    ids = torch.tensor([encode(render(text)) for text in prompts])
    out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    token = out.logits[:, -1].argmax(-1)
    tokens, ended = [token], token == INDEX[EOS]
    while len(tokens) < most and not ended.all():
        out = model(input_ids=token[:, None], past_key_values=out.past_key_values, use_cache=True)
        token = out.logits[:, -1].argmax(-1)
        tokens.append(token)
        ended |= token == INDEX[EOS]
    rows = torch.stack(tokens, 1).tolist()
    return [" ".join(WORDS[i] for i in row).split(f" {EOS}")[0] for row in rows]


@torch.inference_mode()
def recalled(model: nn.Module, prompts: list[Prompt]) -> list[bool]:
    """Whether each answer is the greedy completion, in one pass and without decoding.

    It is if every token of it, `<eos>` included, is the likeliest after those before it.
    `prompts` are of one length.
    """
    rows = [encode(f"{render(p.text)} {p.answer} {EOS}") for p in prompts]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [INDEX[PAD]] * (longest - len(row)) for row in rows])
    begin = len(encode(render(prompts[0].text)))
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=longest - begin + 1).logits
    right = (logits[:, :-1].argmax(-1) == ids[:, begin:]) | (ids[:, begin:] == INDEX[PAD])
    return right.all(1).tolist()


def accuracy(
    model: nn.Module,
    task: str,
    length: int,
    n: int,
    batch: int = 16,
    first: int = 0,
    **options: Any,
) -> dict:
    """Share of held-out prompts `first` to `first + n` answered exactly, and of their parts."""
    exact = parts = asked = 0
    wrong: list[tuple[str, str]] = []
    for begin in range(first, first + n, batch):
        indices = range(begin, min(first + n, begin + batch))
        prompts = [held_out(task, length, i, **options) for i in indices]
        most = max(len(p.answer.split()) for p in prompts) + 2
        completions = complete(model, [p.text for p in prompts], most)
        for prompt, got in zip(prompts, completions, strict=True):
            exact += got == prompt.answer
            if got != prompt.answer:
                wrong.append((prompt.answer, got))
            pieces = got.split(" ; ")
            for i, part in enumerate(prompt.answers):
                asked += 1
                parts += i < len(pieces) and pieces[i].endswith(f" is {part}")
    result = {"task": task, "length": length, "n": n, "exact": exact / n}
    if asked:
        result["parts"] = parts / asked
    return result | {"wrong": wrong[:3]}


def main() -> None:
    """Print a table and a line of JSON per task."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=model_path())
    parser.add_argument("--length", type=int, nargs="+", default=[1024])
    parser.add_argument("--n", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="number of the first prompt")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--wrong", action="store_true", help="show some wrong answers")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(args.threads)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    results = []
    for length in args.length:
        for task in args.tasks:
            started = time.time()
            result = accuracy(model, task, length, args.n, first=args.first)
            wrong = result.pop("wrong")
            parts = f"  parts {result['parts']:.3f}" if "parts" in result else ""
            seconds = time.time() - started
            logger.info(f"{task:12} {length:5} {result['exact']:.3f}{parts}  ({seconds:.0f} s)")
            results.append(result)
            for expected, got in wrong if args.wrong else []:
                logger.info(f"    expected {expected}\n    got      {got}")
    logger.info(json.dumps({"model": args.model.name, "results": results}))


if __name__ == "__main__":
    main()
