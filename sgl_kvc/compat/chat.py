"""``"question": "last_message"``: the tokens of a chat's question, counted with its template.

A client that gives ``question_tokens`` has to render the template as the server does. Here the
rendered prompt is at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from sgl_kvc.compat.hook import Hook
from sgl_kvc.compat.http import knob_in_header
from sgl_kvc.spec import CUSTOM_PARAM, LAST_MESSAGE

#: What is put in the last message's place. Whatever its content begins with, the prompt with one of
#: them differs there: with none of it, or with a letter.
_OTHERS = ("", "a")


def count_question(original, serving, request, raw_request=None) -> Any:
    """``OpenAIServingChat._convert_to_internal_request``: `question` becomes `question_tokens`.

    A knob that asks for both, and prompts that are no lists of tokens here (images, or the
    request's own ``input_ids``), are left alone; `http.py` refuses them.
    """
    adapted, request = original(serving, request, raw_request)
    sampling = adapted.sampling_params
    custom = sampling.get("custom_params")
    custom = custom if isinstance(custom, dict) else {}
    knob = custom.get(CUSTOM_PARAM)
    if knob is None and raw_request is not None:
        knob = knob_in_header(raw_request)
    if not isinstance(knob, Mapping) or knob.get("question") != LAST_MESSAGE:
        return adapted, request
    if knob.get("question_tokens") or request.input_ids is not None or not adapted.input_ids:
        return adapted, request

    def render(text: str) -> Sequence[int]:
        last = request.messages[-1].model_copy(update={"content": text})
        messages = [*request.messages[:-1], last]
        other = request.model_copy(update={"messages": messages})
        return serving._process_messages(other, False).prompt_ids

    counted = {name: value for name, value in knob.items() if name != "question"}
    counted["question_tokens"] = question_tokens(adapted.input_ids, render)
    sampling["custom_params"] = custom | {CUSTOM_PARAM: counted}
    return adapted, request


def question_tokens(prompt: Sequence[int], render: Callable[[str], Sequence[int]]) -> int:
    """Tokens from where the content of a chat's last message begins, to the prompt's end.

    Parameters
    ----------
    prompt : token ids of the chat.
    render : the same chat's with another last message.
    """
    return len(prompt) - min(_common(prompt, render(text)) for text in _OTHERS)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens that both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


HOOKS = (
    Hook(
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat"
        "._convert_to_internal_request",
        "AROUND",
        count_question,
        "only there are a chat's messages and its tokens known",
    ),
)
