"""The size of the worker's KV pool, as the worker tells it."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time

import httpx

from kvc_server import routes
from kvc_server.demand import Ask
from kvc_server.errors import ApiError
from kvc_server.memory import Pool

log = logging.getLogger(__name__)

_FRESH_S = 5.0


@dataclasses.dataclass(frozen=True)
class WorkerMemory:
    """What a worker takes: its pool, and tokens of one prompt at most."""

    pool: Pool
    max_prompt: int


class WorkerPool:
    """Asks the worker now and then; what it said last counts until it has answered again."""

    def __init__(self, ask: Ask):
        self._ask = ask
        self._told: WorkerMemory | None = None
        self._asked = -_FRESH_S
        self._asking: asyncio.Task[None] | None = None

    async def get(self) -> WorkerMemory | None:
        """The worker's memory; None where it does not tell."""
        if self._asking is None and time.monotonic() > self._asked + _FRESH_S:
            self._asking = asyncio.create_task(self._look())
        if self._told is None and self._asking is not None:
            await asyncio.shield(self._asking)
        return self._told

    async def close(self) -> None:
        """End a question that is under way."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    async def _look(self) -> None:
        try:
            answer = await self._ask(routes.SERVER_INFO, None)
            if answer.status_code == 200:
                self._told = _read(answer.json())
            else:
                self._told = await self._behind_router()
        except (ApiError, httpx.HTTPError, ValueError, TypeError, LookupError) as error:
            log.warning("the worker does not tell its KV pool: %r", error)
        finally:
            self._asked = time.monotonic()
            self._asking = None

    async def _behind_router(self) -> WorkerMemory:
        """Of a router's workers together, which are taken to be alike."""
        answer = await self._ask(routes.ROUTED_SERVER_INFO, None)
        one = _read(answer.json())
        workers = (await self._ask(routes.ROUTED_WORKERS, None)).json()["workers"]
        pool = dataclasses.replace(one.pool, blocks=one.pool.blocks * max(1, len(workers)))
        return dataclasses.replace(one, pool=pool)


def _read(info: dict) -> WorkerMemory:
    """Of ``/server_info``. A block of a document that is kept is no request's to have.

    Several replicas behind one address count as one pool.
    """
    page, states = info["page_size"], info["internal_states"]
    blocks = info["max_total_num_tokens"] // page * max(1, len(states))
    kept = sum(
        each["blocks"] for state in states for each in state.get("kv_cache", ()) if each["pinned"]
    )
    return WorkerMemory(Pool(blocks - kept, page), info["max_req_input_len"])
