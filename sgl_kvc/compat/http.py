"""The knob into and the report out of SGLang's HTTP process.

``/generate`` forwards ``meta_info``, the OpenAI endpoints drop it. So the report is lifted
to the top level of every response body here, and the gateway has nothing to re-model.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from typing import Any

from sgl_kvc.compat import BACKEND
from sgl_kvc.compat.hook import Hook
from sgl_kvc.spec import (
    CUSTOM_PARAM,
    KNOB_HEADER,
    NAMESPACE_HEADER,
    TIME_PARAM,
    SpecError,
    parse,
    routed,
)

_RESPONSES = "sglang.srt.entrypoints.openai.serving_responses.OpenAIServingResponses"
_MESSAGES = "sglang.srt.entrypoints.anthropic.serving.AnthropicServing"
_CHAT = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat"
_COMPLETION = "sglang.srt.entrypoints.openai.serving_completions.OpenAIServingCompletion"
_DONE = "data: [DONE]\n\n"
_UNCOUNTED = (
    "is counted in the messages of a chat (POST /v1/chat/completions) without images; "
    "elsewhere give question_tokens"
)


async def generate_request(original, manager, obj, request=None) -> AsyncIterator[Any]:
    """``TokenizerManager.generate_request``: validate the knob, lift the report."""
    if request is not None:
        _take_header(obj, request)
        request.state.kvc_generated = obj
    _validate(obj, manager.server_args)
    async for response in original(manager, obj, request):
        for item in response if isinstance(response, list) else [response]:
            report = _take_report(item.get("meta_info", {}))
            if report is not None:
                item[CUSTOM_PARAM] = report | {"completion_tokens": _answered(item)}
        _remember(obj, response)
        yield response


async def non_streaming(original, serving, adapted, request, raw_request) -> Any:
    """``_handle_non_streaming_request`` of the OpenAI endpoints: add the report."""
    from fastapi.responses import JSONResponse
    from pydantic import BaseModel

    response = await original(serving, adapted, request, raw_request)
    report = _report(adapted)
    if report is None or _translated(raw_request) or not isinstance(response, BaseModel):
        return response
    return JSONResponse(response.model_dump(mode="json") | {CUSTOM_PARAM: report})


async def stream(original, serving, adapted, request, raw_request) -> AsyncIterator[str]:
    """The SSE generators of the OpenAI endpoints: add the report to the last chunk.

    Chunks pass at once; only the one before ``[DONE]`` could have to wait, and which one
    that is shows when a report is there: it arrives with its choice's last token.
    """
    held: str | None = None
    passed = _translated(raw_request)
    async for chunk in original(serving, adapted, request, raw_request):
        if passed:
            yield chunk
            continue
        if held is not None:
            yield held if chunk != _DONE else _with_report(held, _report(adapted))
            held = None
        if chunk != _DONE and _report(adapted) is not None:
            held = chunk
        else:
            yield chunk
    if held is not None:
        yield held


async def messages(original, serving, request, raw_request) -> Any:
    """``handle_messages``: the chat endpoint's answer in Anthropic's words, and the report."""
    from fastapi.responses import StreamingResponse

    raw_request.state.kvc_translated = True
    response = await original(serving, request, raw_request)
    if isinstance(response, StreamingResponse):
        response.body_iterator = _with_last(response.body_iterator, "message_stop", raw_request)
        return response
    return _with_field(response, raw_request)


async def responses(original, serving, request, raw_request=None) -> Any:
    """``create_responses``: an answer of the Responses API, and the report."""
    logging.getLogger(_RESPONSES.rpartition(".")[0]).addFilter(_without_input)
    response = await original(serving, request, raw_request)
    if raw_request is None:
        return response
    if isinstance(response, AsyncGenerator):
        return _with_last(response, "response.completed", raw_request)
    return _with_field(response, raw_request)


def _without_input(record: logging.LogRecord) -> bool:
    """A filter: of Pydantic's errors the log gets field and problem, not what was sent there."""
    from pydantic import ValidationError

    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, ValidationError):
        told = [(each["loc"], each["msg"]) for each in error.errors(include_input=False)]
        record.msg, record.args = f"{record.getMessage()}: {told}", ()
        record.exc_info = None
    return True


def _translated(raw_request: Any) -> bool:
    """Whether another endpoint takes the chat endpoint's answer apart."""
    return raw_request is not None and getattr(raw_request.state, "kvc_translated", False)


def _with_field(response: Any, raw_request: Any) -> Any:
    """A whole answer with the report; as it is if there is none."""
    from fastapi.encoders import jsonable_encoder
    from fastapi.responses import JSONResponse
    from pydantic import BaseModel

    report = _report(getattr(raw_request.state, "kvc_generated", None))
    if report is None:
        return response
    if isinstance(response, BaseModel):
        return JSONResponse(jsonable_encoder(response) | {CUSTOM_PARAM: report})
    if response.status_code != 200:
        return response
    return JSONResponse(json.loads(response.body) | {CUSTOM_PARAM: report})


async def _with_last(chunks: AsyncIterable[Any], last: str, raw_request: Any) -> AsyncGenerator:
    """A stream of events whose event `last` tells the report."""
    begin = f"event: {last}\ndata: "
    async for chunk in chunks:
        report = _report(getattr(raw_request.state, "kvc_generated", None))
        if report is not None and chunk.startswith(begin):
            body = json.loads(chunk.removeprefix(begin)) | {CUSTOM_PARAM: report}
            chunk = f"{begin}{json.dumps(body)}\n\n"
        yield chunk


def _take_header(obj: Any, request: Any) -> None:
    """Take from headers what the gateway tells there, as not every endpoint's body has a place.

    The knob, where the sampling parameters have none; and the namespace of the prefix cache, in
    which what the request itself may say divides further.
    """
    from sglang.srt.managers.io_struct import GenerateReqInput

    if not isinstance(obj, GenerateReqInput):
        return
    if (name := header(request, NAMESPACE_HEADER)) is not None:
        if isinstance(obj.extra_key, list):
            obj.extra_key = [f"{name}/{own or ''}" for own in obj.extra_key]
        else:
            obj.extra_key = f"{name}/{obj.extra_key or ''}"
    knob = knob_in_header(request)
    if knob is None:
        return
    params = obj.sampling_params
    if isinstance(params, list):
        obj.sampling_params = [_with_knob(one, knob) for one in params]
    else:
        obj.sampling_params = _with_knob(params, knob)


def header(request: Any, name: str) -> str | None:
    """A header that the gateway sent, by whichever of its names; None if it is not there."""
    return request.headers.get(name) or request.headers.get(routed(name))


def knob_in_header(request: Any) -> Any:
    """The knob that a header holds; None if none does. Raises SpecError."""
    text = header(request, KNOB_HEADER)
    if text is None:
        return None
    try:
        return json.loads(text)
    except ValueError:
        raise SpecError("", f"the header {KNOB_HEADER} must be JSON") from None


def _with_knob(params: dict | None, knob: Any) -> dict:
    given = params or {}
    custom = given.get("custom_params") or {}
    return {**given, "custom_params": {CUSTOM_PARAM: knob, **custom}}


def _validate(obj: Any, server_args: Any) -> None:
    """Raise SpecError for a knob that cannot be used, before the scheduler sees it.

    Tells the scheduler when the request arrived.
    """
    params = getattr(obj, "sampling_params", None)
    for one in params if isinstance(params, list) else [params]:
        custom = one.get("custom_params") if isinstance(one, dict) else None
        if isinstance(custom, dict) and CUSTOM_PARAM in custom:
            custom[TIME_PARAM] = time.time()
            spec = parse(custom[CUSTOM_PARAM])
            if spec.question is not None:
                raise SpecError("question", _UNCOUNTED)
            if not spec.off and server_args.attention_backend != BACKEND:
                raise SpecError("", "this worker was started without --attention-backend kvc")


def _answered(item: dict) -> int | None:
    """Tokens of an answer so far."""
    return item["meta_info"].get("completion_tokens")


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
    Hook(f"{_RESPONSES}.create_responses", "AROUND", responses,
         "its answers are made of others' and have no place for a report"),
    Hook(f"{_MESSAGES}.handle_messages", "AROUND", messages,
         "its answers are made of the chat endpoint's and have no place for a report"),
)
