"""What the gateway reads in, and changes of, a stream of events or a body from the worker."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from kvc_server.errors import from_worker_json
from kvc_server.reports import NO_REPORT, Reports
from sgl_kvc.spec import CUSTOM_PARAM

_RESULT_KEY = f'"{CUSTOM_PARAM}"'.encode()
#: How SGLang begins an event that is an error, and its last one.
_ERROR = b'data: {"error"'
_DONE = b"data: [DONE]"
_TOLD = (_RESULT_KEY, _DONE)


class Rewriter:
    """Puts a worker's errors in mid-stream into our shape; all else passes as it came, at once.

    Only a line that begins as an error does is held back until it is whole; where `reports` may
    have something to say, every line is.
    """

    def __init__(self, reports: Reports | None = None) -> None:
        self._reports = reports
        self._held = b""
        self._inside = False  # a line whose begin was passed on

    def feed(self, chunk: bytes) -> bytes:
        """What to pass on of the text so far."""
        text = self._held + chunk
        cut = text.rfind(b"\n") + 1
        whole, last = text[:cut], text[cut:]
        if _ERROR in whole or (self._reports and any(mark in whole for mark in _TOLD)):
            lines = whole.split(b"\n")
            first = int(self._inside)
            whole = b"\n".join([*lines[:first], *map(self._rewritten, lines[first:])])
        self._inside = self._inside and not cut
        if last and not self._inside and (self._reports or _may_be_error(last)):
            self._held = last
            return whole
        self._held = b""
        self._inside = self._inside or bool(last)
        return whole + last

    def rest(self) -> bytes:
        """What is still held back when the stream ends."""
        return self._held


    def _rewritten(self, line: bytes) -> bytes:
        if line.startswith(_ERROR):
            content = error_line(line)
            if content is None:
                return line
            return from_worker_json(stream_status(content), content).to_event().rstrip(b"\n")
        if self._reports is None:
            return line
        if line == _DONE and self._reports.missing:
            self._reports.none()
            return f": {CUSTOM_PARAM}: {NO_REPORT}\n\n".encode() + line
        for event in _with_result(line.removeprefix(b"data:")):
            amended = self._reports.amended(event)
            if amended is not event:
                return b"data: " + json.dumps(amended).encode()
        return line


def _may_be_error(line: bytes) -> bool:
    return line.startswith(_ERROR) or _ERROR.startswith(line)


def error_line(line: bytes) -> dict[str, Any] | None:
    """The object of an event's line that is an error."""
    line = line.removeprefix(b"data:").strip()
    if not line.startswith(b'{"error"'):
        return None
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def stream_status(content: dict[str, Any]) -> int:
    """The status of an error that came in a stream of status 200."""
    code = content["error"].get("code") if isinstance(content["error"], dict) else None
    return code if isinstance(code, int) and 400 <= code <= 599 else 500


class ResultScanner:
    """Finds the `kv_compression` objects in a stream of events, without holding it up."""

    def __init__(self) -> None:
        self._by_index: dict[str, Any] = {}
        self._line = b""

    def feed(self, chunk: bytes) -> None:
        """Look at the lines that `chunk` completes; only those with the key are parsed."""
        lines = self._line + chunk
        cut = lines.rfind(b"\n") + 1
        self._line = lines[cut:]
        if _RESULT_KEY not in lines[:cut]:
            return
        for line in lines[:cut].split(b"\n"):
            for event in _with_result(line.removeprefix(b"data:")):
                self._by_index[str(event.get("index"))] = event[CUSTOM_PARAM]

    def results(self) -> list[Any]:
        """The last object of each choice: of the only one, or of each of a batch."""
        return _flat(self._by_index.values())


def results(body: bytes) -> list[Any]:
    """The `kv_compression` objects of a JSON body: of the object, or of each of a batch."""
    return _flat(item[CUSTOM_PARAM] for item in _with_result(body))


def amended_body(body: bytes, reports: Reports) -> bytes:
    """A JSON body with what `reports` have to say; as it is where that is nothing."""
    told = _with_result(body)
    if told:
        amended = [reports.amended(item) for item in told]
        if all(new is old for new, old in zip(amended, told, strict=True)):
            return body
        content = json.loads(body)
        if isinstance(content, list):
            rest = iter(amended)
            new = [next(rest) if CUSTOM_PARAM in item else item for item in content]
            return json.dumps(new).encode()
        return json.dumps(amended[0]).encode()
    if not reports.missing:
        return body
    report = {CUSTOM_PARAM: reports.none()}
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return body
    return json.dumps(content | report).encode() if isinstance(content, dict) else body


def _flat(found: Iterable[Any]) -> list[Any]:
    """Of several choices the OpenAI endpoints tell in a list."""
    return [one for each in found for one in (each if isinstance(each, list) else [each])]


def _with_result(text: bytes) -> list[dict[str, Any]]:
    if _RESULT_KEY not in text:
        return []
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return []
    items = content if isinstance(content, list) else [content]
    return [item for item in items if isinstance(item, dict) and CUSTOM_PARAM in item]
