"""Every failure as one OpenAI-shaped error: `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

import httpx
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from sgl_kvc.spec import CUSTOM_PARAM

RETRY_AFTER_S = 5

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_KNOB_FIELD = re.compile(rf"(?:[\w.]+\.)?{CUSTOM_PARAM}(?:\.\w+)?(?=: )")
_STRING = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
#: SGLang's list of validation errors, up to where the first one begins to repeat what was sent.
_VALIDATION = re.compile(
    r"\d+ validation errors?:\n +\{'type': '\w+', "
    rf"'loc': (?P<loc>\((?:{_STRING}|[^'\"()])*\)), 'msg': (?P<msg>{_STRING})"
)
#: Pydantic's own words: a field, its problem, and then what was sent there.
_PROBLEM = re.compile(r"\d+ validation errors? for .*\n(?P<field>.*)\n +(?P<what>.*?) \[type=")
_MESSAGE_LIMIT = 4000
_TOLD = re.compile(r"retry-after(-ms)?|www-authenticate|x-ratelimit-[\w-]+")
_NONE: Mapping[str, str] = {}


class ApiError(Exception):
    """A failure to be told to the client, with the status it is told with."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def __reduce__(self) -> Any:
        """Exceptions are otherwise pickled as their positional arguments."""
        options = {name: getattr(self, name) for name in ("param", "code", "headers")}
        return functools.partial(ApiError, **options), (self.status, self.message)

    def to_json(self) -> bytes:
        """The body. ASCII only, so that a stray surrogate in a message cannot break it."""
        fields = {name: getattr(self, name) for name in ("message", "type", "param", "code")}
        return json.dumps({"error": fields}).encode()

    def to_response(self) -> Response:
        """The whole response of a request that failed before its body began."""
        return Response(
            self.to_json(), self.status, headers=self.headers, media_type="application/json"
        )

    def to_event(self) -> bytes:
        """The last event of a stream that failed after its status was sent."""
        return b"data: " + self.to_json() + b"\n\n"


def worker_down(why: str) -> ApiError:
    """503: nobody to send the request to; the client should come back."""
    return ApiError(
        503,
        f"{why}; try again in a few seconds",
        code="worker_unavailable",
        headers={"Retry-After": str(RETRY_AFTER_S)},
    )


def from_transport(error: httpx.HTTPError) -> ApiError:
    """A connection to the worker that could not be made, or did not hold."""
    if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
        return worker_down("the worker cannot be reached")
    if isinstance(error, httpx.TimeoutException):
        return ApiError(504, "the worker stayed silent for too long", code="worker_timeout")
    return ApiError(
        502, "the worker went away while serving this request; send it again", code="worker_lost"
    )


def from_worker(status: int, body: bytes, headers: Mapping[str, str] = _NONE) -> ApiError:
    """An error response of the worker, in whichever of its shapes, with its own status."""
    try:
        return from_worker_json(status, json.loads(body), headers)
    except (ValueError, RecursionError):
        text = body.decode(errors="replace").strip()
        message = text[:_MESSAGE_LIMIT] or f"the worker answered {status}"
        return ApiError(status, message, headers=_kept(headers))


def from_worker_json(status: int, content: Any, headers: Mapping[str, str] = _NONE) -> ApiError:
    """Like `from_worker`, for parsed JSON.

    Shapes seen: SGLang's ``{"object": "error", "message", "type", "param", "code"}`` and
    ``{"error": {"message"}}``, FastAPI's ``{"detail": [{"loc", "msg"}]}``.
    """
    error = content.get("error", content) if isinstance(content, dict) else content
    if not isinstance(error, dict):
        return ApiError(status, str(error)[:_MESSAGE_LIMIT], headers=_kept(headers))
    message, param, code = error.get("message"), error.get("param"), error.get("code")
    detail = error.get("detail")
    if message is None and isinstance(detail, list) and detail and isinstance(detail[0], dict):
        param, message = _invalid(detail[0].get("loc", ()), detail[0].get("msg"))
    elif isinstance(message, str) and (found := _VALIDATION.match(message)):
        param, message = _invalid(ast.literal_eval(found["loc"]), ast.literal_eval(found["msg"]))
    elif isinstance(message, str) and (found := _PROBLEM.search(message)):
        param, message = found["field"], f"{found['field']}: {found['what']}"
    message = str(message or detail or json.dumps(error))[:_MESSAGE_LIMIT]
    if not isinstance(param, str) and (field := _KNOB_FIELD.match(message)):
        param = field[0]
    return ApiError(
        status,
        message,
        param=param if isinstance(param, str) else None,
        code=code if isinstance(code, str) and not code.isdigit() else None,
        headers=_kept(headers),
    )


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    """Of an error's headers, those that tell the client what to do, or which request it was."""
    return {name: value for name, value in headers.items() if _TOLD.fullmatch(name.lower())}


def _invalid(path: Iterable[Any], problem: Any) -> tuple[str | None, str]:
    """Field and message of one validation error; `path` begins with where the field stands."""
    field = ".".join(str(part) for part in list(path)[1:] if part != "")
    return field or None, f"{field or 'body'}: {problem or 'is not valid'}"


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.to_response()


async def _transport(_: Request, error: Exception) -> Response:
    assert isinstance(error, httpx.HTTPError)
    return from_transport(error).to_response()


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.scope["path"]  # request.url begins with a Host header that is the client's
    known = {404: ("unknown_url", f"there is no {path} here"),
             405: ("method_not_allowed", f"{path} does not take {request.method}")}  # fmt: skip
    code, message = known.get(error.status_code, (None, str(error.detail)))
    return ApiError(error.status_code, message, code=code, headers=error.headers).to_response()


async def _client_left(_: Request, error: Exception) -> Response:
    """Nobody reads this; it is what metrics count."""
    return ApiError(499, "the client left").to_response()


async def _bug(_: Request, error: Exception) -> Response:
    return ApiError(500, f"the gateway failed: {type(error).__name__}").to_response()


Handler = Callable[[Request, Any], Coroutine[Any, Any, Response]]

HANDLERS: dict[int | type[Exception], Handler] = {
    ApiError: _api_error,
    httpx.HTTPError: _transport,
    HTTPException: _http,
    ClientDisconnect: _client_left,
    Exception: _bug,
}
