"""The knob into and the report out of SGLang's HTTP process.

``/generate`` forwards ``meta_info``, the OpenAI endpoints drop it. So the report is lifted
to the top level of every response body here, and the gateway has nothing to re-model.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from sgl_kvc.compat import BACKEND
from sgl_kvc.compat.hook import Hook
from sgl_kvc.spec import CUSTOM_PARAM, SpecError, parse

_CHAT = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat"
_COMPLETION = "sglang.srt.entrypoints.openai.serving_completions.OpenAIServingCompletion"
_DONE = "data: [DONE]\n\n"
_UNCOUNTED = (
    "is counted in the messages of a chat (POST /v1/chat/completions) without images; "
    "elsewhere give question_tokens"
)


async def generate_request(original, manager, obj, request=None) -> AsyncIterator[Any]:
    """``TokenizerManager.generate_request``: validate the knob, lift the report."""
    _validate(obj, manager.server_args)
    async for response in original(manager, obj, request):
        for item in response if isinstance(response, list) else [response]:
            report = _take_report(item.get("meta_info", {}))
            if report is not None:
                item[CUSTOM_PARAM] = report
        _remember(obj, response)
        yield response


async def non_streaming(original, serving, adapted, request, raw_request) -> Any:
    """``_handle_non_streaming_request`` of the OpenAI endpoints: add the report."""
    from fastapi.responses import JSONResponse
    from pydantic import BaseModel

    response = await original(serving, adapted, request, raw_request)
    report = _report(adapted)
    if report is None or not isinstance(response, BaseModel):
        return response
    return JSONResponse(response.model_dump(mode="json") | {CUSTOM_PARAM: report})


async def stream(original, serving, adapted, request, raw_request) -> AsyncIterator[str]:
    """The SSE generators of the OpenAI endpoints: add the report to the last chunk.

    Chunks pass at once; only the one before ``[DONE]`` could have to wait, and which one
    that is shows when a report is there: it arrives with its choice's last token.
    """
    held: str | None = None
    async for chunk in original(serving, adapted, request, raw_request):
        if held is not None:
            yield held if chunk != _DONE else _with_report(held, _report(adapted))
            held = None
        if chunk != _DONE and _report(adapted) is not None:
            held = chunk
        else:
            yield chunk
    if held is not None:
        yield held


def _validate(obj: Any, server_args: Any) -> None:
    """Raise SpecError for a knob that cannot be used, before the scheduler sees it."""
    params = getattr(obj, "sampling_params", None)
    for one in params if isinstance(params, list) else [params]:
        custom = one.get("custom_params") if isinstance(one, dict) else None
        if isinstance(custom, dict) and CUSTOM_PARAM in custom:
            spec = parse(custom[CUSTOM_PARAM])
            if spec.question is not None:
                raise SpecError("question", _UNCOUNTED)
            if not spec.off and server_args.attention_backend != BACKEND:
                raise SpecError("", "this worker was started without --attention-backend kvc")


def _take_report(meta_info: dict) -> dict | None:
    values = meta_info.pop(CUSTOM_PARAM, None)
    return next((value for value in reversed(values or []) if value is not None), None)


def _remember(obj: Any, response: Any) -> None:
    """Keep the reports of a request's choices on it, by their index, for the OpenAI endpoints."""
    reports = obj.__dict__.setdefault("kvc_reports", {})
    if isinstance(response, list):  # of a batch, whole
        reports.update((index, item.get(CUSTOM_PARAM)) for index, item in enumerate(response))
    elif response.get(CUSTOM_PARAM) is not None:
        reports[response.get("index", 0)] = response[CUSTOM_PARAM]


def _report(obj: Any) -> dict | list | None:
    """What a response tells: the only choice's report, or a list of every choice's; None if none.

    Several choices are those of ``n``, of a list of prompts, or of both.
    """
    reports = getattr(obj, "kvc_reports", {})
    if all(report is None for report in reports.values()):
        return None
    choices = obj.batch_size * getattr(obj, "parallel_sample_num", 1)
    told = [reports.get(index) for index in range(choices)]
    return told if choices > 1 else told[0]


def _with_report(chunk: str, report: dict | list | None) -> str:
    body = json.loads(chunk.removeprefix("data: "))
    return f"data: {json.dumps(body | {CUSTOM_PARAM: report})}\n\n"


HOOKS = (
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
        "AROUND",
        generate_request,
        "custom_params are not validated and meta_info is not lifted upstream",
    ),
    *(
        Hook(f"{serving}._handle_non_streaming_request", "AROUND", non_streaming,
             "the OpenAI endpoints do not forward meta_info")
        for serving in (_CHAT, _COMPLETION)
    ),
    Hook(f"{_CHAT}._generate_chat_stream", "AROUND", stream,
         "the OpenAI endpoints do not forward meta_info"),
    Hook(f"{_COMPLETION}._generate_completion_stream", "AROUND", stream,
         "the OpenAI endpoints do not forward meta_info"),
)
