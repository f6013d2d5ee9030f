"""Admission by memory: requests are let in while the worker's KV pool has room for them."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Hashable, Sequence

from kvc_server.demand import Ask, Demand, Measured, question_tokens
from kvc_server.footprint import Asked, Prompt
from kvc_server.memory import Memory, Pool, Waiting
from kvc_server.metrics import Metrics
from kvc_server.placing import Placed
from kvc_server.record import Record
from kvc_server.tenants import Tenant
from kvc_server.worker_pool import WorkerMemory, WorkerPool
from sgl_kvc.spec import CompressionSpec, chained_digests

#: Tokens that an answer is taken to have where the request does not bound it.
UNBOUNDED_ANSWER = 512


class Room:
    """The worker's memory, and who is let in.

    Parameters
    ----------
    ask : asks the worker.
    """

    def __init__(self, waiting: Waiting, ask: Ask, metrics: Metrics):
        self._ask = ask
        self._metrics = metrics
        self._worker = WorkerPool(ask)
        self._memory = Memory(waiting)

    async def admit(
        self, placed: Placed, prompts: Sequence[Measured], tenant: Tenant | None, record: Record
    ) -> float | None:
        """Wait until there is room, and hold it as long as the request lasts.

        What cannot be predicted, or what the worker is going to refuse, is let in at once.

        Returns
        -------
        The rate that its knob is raised to; None leaves it as it is.

        Raises
        ------
        ApiError : 429 where there is no room for too long, or too many wait.
        """
        worker = await self._worker.get()
        if worker is None or placed.demand is None:
            return None
        asked = await self._asked(placed, placed.demand, prompts, worker, tenant)
        if asked is None:
            return None
        begin = time.perf_counter()
        claim = await self._memory.admit(asked, worker.pool)
        record.held.callback(self._memory.release, claim)
        self._metrics.memory_wait.observe(time.perf_counter() - begin)
        if claim.rate is not None:
            self._metrics.raised.inc()
        return claim.rate

    async def tell(self) -> None:
        """Bring the gauges up to date."""
        worker = await self._worker.get()
        self._metrics.memory_blocks.labels("admitted").set(self._memory.held)
        self._metrics.memory_blocks.labels("pool").set(worker.pool.blocks if worker else 0)
        self._metrics.memory_waiting.set(self._memory.waiting)

    async def close(self) -> None:
        await self._worker.close()

    async def _asked(
        self,
        placed: Placed,
        demand: Demand,
        prompts: Sequence[Measured],
        worker: WorkerMemory,
        tenant: Tenant | None,
    ) -> Asked | None:
        specs = placed.specs * len(prompts) if len(placed.specs) == 1 else placed.specs
        if not prompts or len(specs) != len(prompts):
            return None
        each = zip(specs, prompts, strict=True)
        whole = (prompt.length for spec, prompt in each if not spec.prefill_block)
        if max(whole, default=0) > worker.max_prompt:
            return None
        space = json.dumps([tenant.namespace if tenant else "", *placed.space])
        found = []
        for spec, prompt in zip(specs, prompts, strict=True):
            spec = await self._counted(spec, demand, prompt)
            answer = UNBOUNDED_ANSWER if demand.answer is None else demand.answer
            if not spec.prefill_block:
                answer = min(answer, worker.max_prompt - prompt.length)
            digests = _digests(prompt, space, worker.pool)
            found.append(Prompt(spec, prompt.length, answer, demand.choices, digests))
        most = placed.elastic.max_rate if placed.elastic else None
        priority = tenant.priority or 0 if tenant else 0
        return Asked(tuple(found), most, priority)

    async def _counted(
        self, spec: CompressionSpec, demand: Demand, prompt: Measured
    ) -> CompressionSpec:
        """The knob with its question counted; as long as the prompt, where nothing tells."""
        if spec.question is None:
            return spec
        count = await question_tokens(demand, prompt, self._ask)
        tokens = prompt.length if count is None else count
        return dataclasses.replace(spec, question=None, question_tokens=tokens)


def _digests(prompt: Measured, space: str, pool: Pool) -> Sequence[Hashable]:
    try:
        return chained_digests(prompt.tokens, space, pool.page_size)
    except TypeError:  # a client's own list of tokens, of something else
        return ()
