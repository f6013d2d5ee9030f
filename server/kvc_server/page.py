"""The page at ``/``: files of this package, which ask for nothing but our own API."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

_FOLDER = files("kvc_server") / "static"
_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
#: Of every path, the file and its media type.
FILES = {
    "/" if name == "page.html" else f"/page/{name}": (name, _TYPES[name.rpartition(".")[2]])
    for name in sorted(each.name for each in _FOLDER.iterdir())
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    """Serve the page. It holds nothing of anybody's; what it shows it asks for with a key."""
    for path, (name, media_type) in FILES.items():
        content = (_FOLDER / name).read_bytes()
        app.add_api_route(path, _answer(content, media_type), methods=["GET", "HEAD"])


def _answer(content: bytes, media_type: str) -> Callable[[], Coroutine[Any, Any, Response]]:
    async def answer() -> Response:
        return Response(content, headers=_HEADERS, media_type=media_type)

    return answer
