"""How many tokens a request may take, before it runs: its prompts' and its answers'."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Awaitable, Callable, Sequence
from itertools import takewhile
from typing import Any

import httpx

from kvc_server import routes

#: Asks the worker: path and body (None is GET) to its answer.
Ask = Callable[[str, bytes | None], Awaitable[httpx.Response]]

_CHAT = ("model", "messages", "tools", "tool_choice", "reasoning_effort", "continue_final_message",
         "chat_template_kwargs")  # fmt: skip
_MESSAGES = ("model", "messages", "system", "thinking", "tools", "tool_choice")
#: Last messages that differ at once, for the tokens that precede the content of any.
QUESTIONS = ("", "a")
#: What SGLang takes where a request does not say how long its answer may be.
_COMPLETION_ANSWER, _NATIVE_ANSWER = 16, 128


@dataclasses.dataclass(frozen=True)
class Demand:
    """What is known of a request from its body alone.

    Attributes
    ----------
    tokens : of each prompt, where they are given as tokens; else empty.
    ask : path and body of what the worker is asked for them; None if nothing tells.
    answer : tokens of an answer at most; None is as many as the context has room for.
    choices : answers per prompt.
    """

    tokens: tuple[Sequence[int], ...] = ()
    ask: tuple[str, bytes] | None = None
    answer: int | None = None
    choices: int = 1

    def most(self, prompts: Sequence[Measured], context: int) -> int:
        """Tokens that a request with these `prompts` takes at most; every choice has its prompt.

        Of a prompt that nothing tells, the whole `context`.
        """
        total = 0
        for length in [prompt.length for prompt in prompts] or [context]:
            room = max(0, context - length)
            total += length + (room if self.answer is None else min(self.answer, room))
        return self.choices * total


@dataclasses.dataclass(frozen=True)
class Measured:
    """A prompt's tokens: how many, and which, where that is known."""

    length: int
    tokens: Sequence[int] = ()


def demand_of(path: str, body: dict[str, Any]) -> Demand:
    """The demand of a request to the endpoint `path`. A body that is no good is the worker's."""
    if path == "/generate":
        return _native(body)
    choices = _whole(body.get("n")) or 1
    if path == "/v1/completions":
        answer = _whole(body.get("max_tokens"))
        answer = _COMPLETION_ANSWER if answer is None else answer
        return _prompts(body.get("prompt"), answer, choices)
    if path == "/v1/chat/completions":
        answer = _whole(body.get("max_completion_tokens")) or _whole(body.get("max_tokens"))
        return Demand(ask=_question("/v1/tokenize", body, _CHAT), answer=answer, choices=choices)
    if path == "/v1/messages":
        ask = _question("/v1/messages/count_tokens", body, _MESSAGES)
        return Demand(ask=ask, answer=_whole(body.get("max_tokens")))
    answer = _whole(body.get("max_output_tokens"))
    text, system = body.get("input"), body.get("instructions")
    if not isinstance(text, str) or body.get("previous_response_id") or body.get("tools"):
        return Demand(answer=answer)
    chat = [{"role": "system", "content": system}] if system else []
    chat.append({"role": "user", "content": text})
    return Demand(ask=_question("/v1/tokenize", {"messages": chat}, _CHAT), answer=answer)


async def measure(demand: Demand, ask: Ask) -> tuple[Measured, ...]:
    """Each prompt of a request, as the worker tells; empty if nothing does."""
    if demand.tokens:
        return tuple(Measured(len(tokens), tokens) for tokens in demand.tokens)
    if demand.ask is None:
        return ()
    answer = await ask(*demand.ask)
    try:
        told = answer.json()
        count = told.get("count", told.get("input_tokens"))
        counts = list(map(int, count if isinstance(count, list) else [count]))
        tokens = told.get("tokens") or [()] * len(counts)
        each = tokens if isinstance(count, list) or tokens == [()] else [tokens]
        prompts = tuple(map(Measured, counts, each))
    except (ValueError, TypeError, AttributeError):
        return ()
    return prompts if answer.status_code == 200 else ()


async def question_tokens(demand: Demand, prompt: Measured, ask: Ask) -> int | None:
    """Tokens from where the content of a chat's last message begins; None if nothing tells.

    The worker counts the same way (`sgl_kvc.compat.chat`).
    """
    if demand.ask is None or not prompt.tokens:
        return None
    path, body = demand.ask
    asked = json.loads(body)
    alike = prompt.length
    for text in QUESTIONS:
        try:
            *before, last = asked["messages"]
            other = asked | {"messages": [*before, {**last, "content": text}]}
        except (KeyError, TypeError, ValueError):
            return None
        (told,) = await measure(Demand(ask=(path, json.dumps(other).encode())), ask) or (None,)
        if told is None:
            return None
        alike = min(alike, common(prompt.tokens, told.tokens))
    return prompt.length - alike


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens that both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


async def context_length(ask: Ask) -> int | None:
    """Tokens that the worker's model takes at most, prompt and answer; None if it does not tell."""
    answer = await ask(routes.MODELS, None)
    try:
        return max(int(card["max_model_len"] or 0) for card in answer.json()["data"]) or None
    except (ValueError, TypeError, LookupError):
        return None


def _native(body: dict[str, Any]) -> Demand:
    given = body.get("sampling_params")
    params = [each for each in (given if isinstance(given, list) else [given])
              if isinstance(each, dict)]  # fmt: skip
    answers = [_whole(each.get("max_new_tokens")) for each in params]
    longest = max((_NATIVE_ANSWER if each is None else each for each in answers),
                  default=_NATIVE_ANSWER)  # fmt: skip
    choices = max((_whole(each.get("n")) or 1 for each in params), default=1)
    prompt = body.get("text")
    return _prompts(body.get("input_ids") if prompt is None else prompt, longest, choices)


def _prompts(prompt: Any, answer: int, choices: int) -> Demand:
    """Of a text, a list of texts, token ids, or a list of these."""
    demand = Demand(answer=answer, choices=choices)
    several = prompt if isinstance(prompt, list) else [prompt]
    if several and all(isinstance(one, str) for one in several):
        ask = _question("/v1/tokenize", {"prompt": prompt}, ("prompt",))
        return dataclasses.replace(demand, ask=ask)
    if several and all(isinstance(one, int) for one in several):
        return dataclasses.replace(demand, tokens=(several,))
    if several and all(isinstance(one, list) for one in several):
        return dataclasses.replace(demand, tokens=tuple(several))
    return demand


def _question(path: str, body: dict[str, Any], fields: tuple[str, ...]) -> tuple[str, bytes]:
    asked = {name: body[name] for name in fields if body.get(name) is not None}
    return path, json.dumps(asked).encode()


def _whole(value: Any) -> int | None:
    """A number of tokens, None for what is none."""
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return value if whole else None
