"""``/v1/kv_cache``: documents that are compressed once, kept for a while, and read by many.

The worker stores the segment of whatever is read before a question apart (docs/design.md). Here a
client asks for that before there is a question, and that the segment stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx

from kvc_server import knob, routes
from kvc_server.demand import QUESTIONS, Ask, common
from kvc_server.errors import ApiError, from_worker
from kvc_server.reports import DROPPED
from kvc_server.settings import Settings
from sgl_kvc.spec import CUSTOM_PARAM, PIN_PARAM

_CONTENTS = ("messages", "text", "input_ids")
_FIELDS = (*_CONTENTS, CUSTOM_PARAM, "ttl_s", "cache_salt")
_DEFAULT_TTL_S, _MAX_TTL_S = 3600.0, 30 * 86400.0
_NO_ROOM = "no free blocks to compress into"


@dataclasses.dataclass(frozen=True)
class Owner:
    """Whose documents they are.

    Attributes
    ----------
    settings : the bounds of the knob.
    namespace : of a key: in which its prompts are cached. None where there are no keys.
    priority : of its requests in the worker's queue; None leaves it to the worker.
    reserve : takes so many tokens from what the key may use; raises ApiError 429 or 400.
    """

    settings: Settings
    namespace: str | None = None
    priority: int | None = None
    reserve: Callable[[int], None] | None = None

    def extra_key(self, salt: str | None) -> str | None:
        """What the worker calls the part of its cache that this one means by `salt`."""
        return salt if self.namespace is None else f"{self.namespace}/{salt or ''}"


class Documents:
    """The documents of one worker.

    Parameters
    ----------
    ask : asks the worker.
    """

    def __init__(self, ask: Ask):
        self._ask = ask
        self._timers: dict[str, asyncio.Task[None]] = {}

    async def create(
        self, body: dict[str, Any], header: Sequence[str], owner: Owner
    ) -> dict[str, Any]:
        """Compress and keep what `body` holds; again, to keep it longer.

        Raises
        ------
        ApiError : 400 for a body that cannot be read; 409 where there is nothing to compress;
            413 where it is longer than the worker takes; 507 where there is no room for it.
        """
        content, ttl, salt = _checked(body)
        spec = _knob(body, header, owner.settings)
        info = await self._json(routes.SERVER_INFO)
        with _told():
            page, most = int(info["page_size"]), int(info["max_req_input_len"])
        tokens = await self._tokens(content, body[content])
        end = len(tokens) // page * page
        if not end:
            told = f"{content}: {len(tokens)} tokens are less than a block of {page}"
            raise ApiError(409, told, param=content, code="nothing_to_compress")
        if end + 1 >= most and not spec.get("prefill_block"):
            told = f"{content}: {len(tokens)} tokens; this server takes {most}"
            raise ApiError(413, told, param=content, code="document_too_long")
        if owner.reserve is not None:
            owner.reserve(end + 1)
        expires = time.time() + ttl
        question = tokens[end : end + 1] or tokens[-1:]  # is not kept; some token has to be read
        custom = {
            CUSTOM_PARAM: spec | {"force": True},  # the copy is for others too
            PIN_PARAM: {"expires": expires},
        }
        asked: dict[str, Any] = {
            "input_ids": [*tokens[:end], *question],
            "sampling_params": {"temperature": 0, "max_new_tokens": 1, "custom_params": custom},
            "extra_key": owner.extra_key(salt),
        }
        if owner.priority is not None:
            asked["priority"] = owner.priority
        answer = await self._json("/generate", asked)
        with _told():
            report = answer[CUSTOM_PARAM]
            name, skipped = report.get("pinned"), report["skipped"]
        if name is None:
            raise _refused(skipped, report.get("policy") is not None)
        self._release_later(name, ttl)
        found = [each for each in await self._stored(salt, owner) if each["id"] == name]
        return found[0] if found else {"id": name, "tokens": end, "expires": expires}

    async def all(self, salt: str | None, owner: Owner) -> dict[str, Any]:
        """The stored segments of one owner, also those that its requests left by themselves."""
        return {"object": "list", "data": await self._stored(salt, owner)}

    async def release(self, name: str, salt: str | None, owner: Owner) -> dict[str, Any]:
        """Let a document be evicted like others. Raises ApiError 404 or 409."""
        found = [each for each in await self._stored(salt, owner) if each["id"] == name]
        if not found:
            raise ApiError(404, f"there is no document {name}", code="document_not_found")
        if not found[0]["pinned"]:
            told = f"{name} is not kept: it is evicted when it is the least recently used"
            raise ApiError(409, told, code="document_not_kept")
        await self._release(name)
        return {"id": name, "released": True}

    async def close(self) -> None:
        """End the timers; the worker keeps its documents."""
        for timer in self._timers.values():
            timer.cancel()
        await asyncio.gather(*self._timers.values(), return_exceptions=True)

    async def _tokens(self, content: str, value: Any) -> list[int]:
        if content == "input_ids":
            return list(value)
        if content == "text":
            return await self._tokenized({"prompt": value})
        prompts = [
            await self._tokenized({"messages": [*value, _user(text)]}) for text in QUESTIONS
        ]
        return list(prompts[0][: common(*prompts)])

    async def _tokenized(self, asked: dict[str, Any]) -> list[int]:
        answer = await self._json(routes.TOKENIZE, asked)
        with _told():
            return list(answer["tokens"])

    async def _stored(self, salt: str | None, owner: Owner) -> list[dict[str, Any]]:
        info = await self._json(routes.SERVER_INFO)
        with _told():
            stored = [each for state in info["internal_states"] for each in state["kv_cache"]]
            for each in stored:  # kept before this gateway was started
                if each["expires"] is not None and each["id"] not in self._timers:
                    self._release_later(each["id"], each["expires"] - time.time())
            mine = [each for each in stored if each["cache_salt"] == owner.extra_key(salt)]
        return [each | {"cache_salt": salt} for each in mine]

    def _release_later(self, name: str, seconds: float) -> None:
        if name in self._timers:
            self._timers[name].cancel()
        self._timers[name] = asyncio.create_task(self._expire(name, seconds))

    async def _expire(self, name: str, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds))
        del self._timers[name]
        with contextlib.suppress(ApiError, httpx.HTTPError):  # a worker that ends forgets it
            await self._release(name)

    async def _release(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()
        asked = {"server_args": {f"kv_cache_release/{name}": 1}}
        await self._json(routes.SET_STATE, asked)

    async def _json(self, path: str, content: dict[str, Any] | None = None) -> Any:
        answer = await self._ask(path, None if content is None else json.dumps(content).encode())
        if answer.status_code == 404 and path == routes.SERVER_INFO:
            told = "documents are kept by one worker, not behind a router"
            raise ApiError(501, told, code="behind_a_router")
        if answer.status_code != 200:
            raise from_worker(answer.status_code, answer.content, answer.headers)
        with _told():
            return answer.json()


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Reading what the worker says. Raises ApiError 404 where it is none that keeps documents."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError):
        told = "the worker behind this gateway keeps no documents: it serves without sgl-kvc"
        raise ApiError(404, told, code="no_documents_here") from None


def _checked(body: dict[str, Any]) -> tuple[str, float, str | None]:
    """Which field holds the document, for how long it is kept, and whose it is."""
    for name in body:
        if name not in _FIELDS:
            raise _bad(name, f"unknown field; known are {', '.join(_FIELDS)}")
    given = [name for name in _CONTENTS if body.get(name) is not None]
    if len(given) != 1:
        raise _bad("messages", f"give one of {', '.join(_CONTENTS)}")
    (content,) = given
    value = body[content]
    if content == "text" and not isinstance(value, str):
        raise _bad(content, "must be a string")
    if content != "text" and not (isinstance(value, list) and value):
        raise _bad(content, "must be a list that is not empty")
    if content == "input_ids" and not all(type(token) is int for token in value):
        raise _bad(content, "must be whole numbers")
    ttl = body.get("ttl_s", _DEFAULT_TTL_S)
    number = isinstance(ttl, (int, float)) and not isinstance(ttl, bool)
    if not number or not 0 < ttl <= _MAX_TTL_S:
        raise _bad("ttl_s", f"must be a number of seconds, at most {_MAX_TTL_S:g}")
    salt = body.get("cache_salt")
    if salt is not None and not isinstance(salt, str):
        raise _bad("cache_salt", "must be a string")
    return content, float(ttl), salt


def _knob(body: dict[str, Any], header: Sequence[str], settings: Settings) -> dict[str, Any]:
    """The knob of a request that reads the document, with a question of one token."""
    asked = body.get(CUSTOM_PARAM)
    if asked is None or header:
        given = {name: body[name] for name in (CUSTOM_PARAM,) if name in body}
        placed = knob.place(given, header, native=False, settings=settings)
        asked = {"rate": placed["custom_params"][CUSTOM_PARAM]["rate"]}  # nobody named a policy
    for field in ("question", "question_tokens", "recompress_every", "elastic"):
        if isinstance(asked, dict) and asked.get(field):
            raise _bad(f"{CUSTOM_PARAM}.{field}", "is of a request that reads the document")
    if isinstance(asked, dict):
        asked = asked | {"question_tokens": 1}
    placed = knob.place({CUSTOM_PARAM: asked}, [], native=False, settings=settings)
    spec: dict[str, Any] = placed["custom_params"][CUSTOM_PARAM]
    if spec.get("rate") == 1:
        raise _bad(f"{CUSTOM_PARAM}.rate", "must be more than 1: a document is kept compressed")
    return spec


def _refused(reason: str | None, compressed: bool) -> ApiError:
    if reason is None and not compressed:
        told = f"{DROPPED}; documents are kept by one worker, not behind a router"
        return ApiError(502, told, code="knob_lost")
    if reason is None:
        told = "kept documents may hold half of the pool; release one, or wait until one expires"
        return ApiError(507, told, code="documents_full")
    if reason == _NO_ROOM:
        return ApiError(507, f"{reason}: others hold the memory", code="no_room")
    return ApiError(409, reason, code="nothing_to_compress")


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _bad(field: str, problem: str) -> ApiError:
    return ApiError(400, f"{field}: {problem}", param=field, code="invalid_document")
