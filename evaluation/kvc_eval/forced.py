"""Teacher forcing: the right answer is put into the model's mouth, and its tokens' likelihood read.

One request gives more than a decoded answer does, and costs less: whether every token of the answer
is the likeliest after those before it (then greedy decoding says it), which share of them is, and
how likely they are. A model that answers little right can be measured with it all the same.

The prompt of a cell is, in tokens::

    [ chat up to the question ][ question, template ][ lead ][ answer ]
    inside:  compressed together                      read after compression, as if decoded
    after:   compressed         read after compression

The knob's ``question_tokens`` says where compression ends, so what is read after it is read as in
decoding: over what was kept (tests/bench/test_forced.py holds it against masking). Scores end there
too, at a whole block, where in serving they see the prompt's last partial block. So that it is the
same, `trim` cuts prompts to whole blocks.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

from kvc_server.generate import sampling_params

from kvc_eval.endpoint import Answer, Endpoint, answer_from, expected
from kvc_eval.sample import Sample
from sgl_kvc.spec import CUSTOM_PARAM

BLOCK = 64  # the longest page there is; shorter ones divide it


@dataclasses.dataclass(frozen=True)
class Forced:
    """A prompt with its answer, as tokens.

    Attributes
    ----------
    ids : chat, lead and answer.
    answer : how many of the last tokens are the answer, the lead not among them.
    spoken : lead and answer: what the model would decode.
    asked : question, template, lead and answer, of all turns.
    """

    ids: tuple[int, ...]
    answer: int
    spoken: int
    asked: int


async def force(endpoint: Endpoint, sample: Sample, head: Sequence[int]) -> Forced:
    """Render a sample and its first answer as tokens.

    `head` is what the chat template puts before every user message. Raises RequestFailed.
    """
    lead, whole, prompt, document = await asyncio.gather(
        endpoint.token_ids(sample.answered(sample.lead)),
        endpoint.token_ids(sample.answered(f"{sample.lead} {sample.answers[0]}")),
        endpoint.token_ids(sample.messages),
        endpoint.token_ids(sample.before_questions),
    )
    out = Forced(
        ids=tuple(whole),
        answer=len(whole) - common(lead, whole),
        spoken=len(whole) - len(prompt),
        asked=len(whole) - common(document, whole),
    )
    return trim(out, common(head, whole))


def trim(prompt: Forced, head: int) -> Forced:
    """Take away the document's first tokens, so that what comes before the lead is whole blocks.

    `head` tokens stand before the document. A prompt shorter than a block stays as it is.
    """
    before = len(prompt.ids) - prompt.spoken
    surplus = before % BLOCK
    if before < BLOCK + head:
        return prompt
    return dataclasses.replace(prompt, ids=prompt.ids[:head] + prompt.ids[head + surplus :])


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    both = min(len(a), len(b))
    return next((i for i in range(both) if a[i] != b[i]), both)


async def ask(
    endpoint: Endpoint, prompts: Sequence[Forced], knobs: Sequence[dict[str, Any]]
) -> list[Answer]:
    """All at once with SGLang's ``/generate``; texts are empty. Raises RequestFailed for all."""
    answers = await endpoint.generate({
        "input_ids": [prompt.ids for prompt in prompts],
        "sampling_params": [sampling_params(knob, max_new_tokens=1) for knob in knobs],
        "return_logprob": True,
        "logprob_start_len": [len(prompt.ids) - prompt.answer - 1 for prompt in prompts],
        "top_logprobs_num": 1,
    })  # fmt: skip
    out = []
    for prompt, answer in zip(prompts, answers, strict=True):
        with expected("/generate"):
            meta = answer["meta_info"]
            right, mean = likelihood(meta, prompt.answer)
            told = answer_from("", meta["prompt_tokens"], answer[CUSTOM_PARAM])
        out.append(dataclasses.replace(told, tokens_right=right, log_likelihood=mean))
    return out


def likelihood(meta: dict[str, Any], answer: int) -> tuple[float, float]:
    """Of the last `answer` tokens the share that are the likeliest, and the mean log-likelihood.

    `meta` is ``meta_info`` of SGLang's ``/generate``. It lists [logprob, token, text] of every
    token from ``logprob_start_len`` on, and of the likeliest at each place; of the first there is
    none. Log-likelihoods are in nats.
    """
    given = meta["input_token_logprobs"][-answer:]
    likeliest = meta["input_top_logprobs"][-answer:]
    if len(given) < answer:
        raise IndexError(f"logprobs of {len(given)} tokens, the answer has {answer}")
    right = [here[1] == top[0][1] for here, top in zip(given, likeliest, strict=True)]
    return statistics.fmean(right), math.fsum(here[0] for here in given) / answer
