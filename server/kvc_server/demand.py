"""How many tokens a request may take, before it runs: its prompts' and its answers'."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from kvc_server import routes

#: Asks the worker: path and body (None is GET) to its answer.
Ask = Callable[[str, bytes | None], Awaitable[httpx.Response]]

_CHAT = ("model", "messages", "tools", "tool_choice", "reasoning_effort", "continue_final_message",
         "chat_template_kwargs")  # fmt: skip
_MESSAGES = ("model", "messages", "system", "thinking", "tools", "tool_choice")
#: What SGLang takes where a request does not say how long its answer may be.
_COMPLETION_ANSWER, _NATIVE_ANSWER = 16, 128


@dataclasses.dataclass(frozen=True)
class Demand:
    """What is known of a request from its body alone.

    Attributes
    ----------
    lengths : tokens of each prompt, where they are given as tokens; else empty.
    ask : path and body of what the worker is asked for them; None if nothing tells.
    answer : tokens of an answer at most; None is as many as the context has room for.
    choices : answers per prompt.
    """

    lengths: tuple[int, ...] = ()
    ask: tuple[str, bytes] | None = None
    answer: int | None = None
    choices: int = 1

    def tokens(self, lengths: tuple[int, ...], context: int) -> int:
        """What a request with prompts of `lengths` takes at most; every choice has its prompt."""
        total = 0
        for length in lengths:
            room = max(0, context - length)
            total += length + (room if self.answer is None else min(self.answer, room))
        return self.choices * total


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


async def prompt_lengths(demand: Demand, context: int, ask: Ask) -> tuple[int, ...]:
    """Tokens of each prompt; of one that nothing tells, the whole `context`."""
    if demand.lengths:
        return demand.lengths
    if demand.ask is None:
        return (context,)
    answer = await ask(*demand.ask)
    try:
        told = answer.json()
        count = told.get("count", told.get("input_tokens"))
        counts = tuple(map(int, count if isinstance(count, list) else [count]))
    except (ValueError, TypeError, AttributeError):
        return (context,)
    return counts if answer.status_code == 200 and counts else (context,)


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
        return dataclasses.replace(demand, lengths=(len(several),))
    if several and all(isinstance(one, list) for one in several):
        return dataclasses.replace(demand, lengths=tuple(map(len, several)))
    return demand


def _question(path: str, body: dict[str, Any], fields: tuple[str, ...]) -> tuple[str, bytes]:
    asked = {name: body[name] for name in fields if body.get(name) is not None}
    return path, json.dumps(asked).encode()


def _whole(value: Any) -> int | None:
    """A number of tokens, None for what is none."""
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return value if whole else None
