"""Asks every prompt of every cell, as many at once as the endpoint is to be given.

Prompts go in blocks. Of a block every cell is asked before the next block begins, the
uncompressed one first, so that the prefix cache pays for its prefill once.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any

from kvc_eval import forced, metrics
from kvc_eval.endpoint import Answer, Endpoint, Question, RequestFailed
from kvc_eval.forced import Forced
from kvc_eval.grid import AFTER, OFF, TURNS, Cell, Grid
from kvc_eval.sample import Sample, Suite
from kvc_eval.store import Record, Store

_TURN_TOKENS = 32  # at most, of what a chat template puts around a question and its answer
BATCHES = 3  # so that the engine has work while answers are on their way


class EndpointLost(Exception):
    """Nothing is answered any more; the message says with what."""


@dataclasses.dataclass(frozen=True)
class Load:
    """How the endpoint is loaded.

    Attributes
    ----------
    concurrent : prompts asked at once; also the prompts of a block.
    batched : whether `concurrent` prompts go in one HTTP request, and `BATCHES` of those at
        once, or every prompt in its own.
    """

    concurrent: int
    batched: bool

    @property
    def group(self) -> int:
        """Prompts of one HTTP request."""
        return self.concurrent if self.batched else 1

    @property
    def requests(self) -> int:
        """HTTP requests at once."""
        return BATCHES if self.batched else self.concurrent


@dataclasses.dataclass(frozen=True)
class _Task:
    cell: Cell
    index: int
    sample: Sample
    forced: Forced | None

    def knob(self) -> dict[str, Any]:
        """What it is asked with."""
        if self.forced is not None:
            return self.cell.knob(self.forced.asked, self.forced.spoken)
        return self.cell.knob(self.sample.question_tokens)


async def measure(
    endpoints: Sequence[Endpoint],
    suite: Suite,
    grid: Grid,
    store: Store,
    load: Load,
    advance: Callable[[int], object] = lambda n: None,
) -> None:
    """Fill `store` with an answer of every cell and prompt that it lacks.

    Each endpoint takes the next block when it is done with one; they have to serve the same.
    `advance` is told how many answers there are more. A request that fails is recorded as
    failed. Raises EndpointLost when nothing of a block's uncompressed or compressed prompts is
    answered.
    """
    for length in grid.lengths:
        await suite.prepare(endpoints[0], length)
    step = max(suite.turns, load.concurrent // suite.turns * suite.turns)  # chats stay together
    blocks = (
        (length, range(first, min(grid.n, first + step)))
        for length in grid.lengths
        for first in range(0, grid.n, step)
    )

    async def work(endpoint: Endpoint) -> None:
        for length, indices in blocks:
            await _ask_block(endpoint, suite, grid, length, indices, store, load, advance)

    await _all(work(endpoint) for endpoint in endpoints)


async def _ask_block(
    endpoint: Endpoint,
    suite: Suite,
    grid: Grid,
    length: int,
    indices: range,
    store: Store,
    load: Load,
    advance: Callable[[int], object],
) -> None:
    cells = grid.cells(length)
    missing = [(c, i) for c in cells for i in _missing(c, suite.turns, indices, store)]
    advance(len(cells) * len(indices) - len(missing))
    samples = {i: suite.sample(length, i) for i in {i for _, i in missing}}
    prompts: dict[int, Forced] = {}
    if grid.forced and samples:
        prompts = await _force(endpoint, samples)
    elif any(cell.question == AFTER for cell, _ in missing):
        await _count_questions(endpoint, samples)
    tasks = [_Task(cell, i, samples[i], prompts.get(i)) for cell, i in missing]
    for turn in range(suite.turns):  # a turn begins with what the one before has left
        mine = [task for task in tasks if task.index % suite.turns == turn]
        for part in (
            [task for task in mine if task.cell.policy == OFF],
            [task for task in mine if task.cell.policy != OFF],
        ):
            await _ask_all(endpoint, part, store, load, advance)


def _missing(cell: Cell, turns: int, indices: range, store: Store) -> list[int]:
    """The prompts to ask; of a chat whose turns follow from each other all, if any is missing."""
    missing = [index for index in indices if not store.has(cell, index)]
    if cell.question != TURNS:
        return missing
    chats = {index // turns for index in missing}
    return [index for index in indices if index // turns in chats]


async def _force(endpoint: Endpoint, samples: dict[int, Sample]) -> dict[int, Forced]:
    """The samples with their answers, as tokens."""
    head = await endpoint.head()
    made = await asyncio.gather(*(forced.force(endpoint, s, head) for s in samples.values()))
    return dict(zip(samples, made, strict=True))


async def _count_questions(endpoint: Endpoint, samples: dict[int, Sample]) -> None:
    """Fill in the `question_tokens` that are not known; mutates `samples`.

    The question alone is counted with the whole chat template, so the policy may miss a few of
    the document's last tokens but never sees a token of the question.
    """
    unknown = [i for i, sample in samples.items() if sample.question_tokens is None]
    said = [samples[i].text.removeprefix(samples[i].document) for i in unknown]
    counts = await asyncio.gather(*map(endpoint.count_tokens, said))
    for i, count in zip(unknown, counts, strict=True):
        tokens = count + 1 + _TURN_TOKENS * len(samples[i].turns)
        samples[i] = dataclasses.replace(samples[i], question_tokens=tokens)


async def _ask_all(
    endpoint: Endpoint,
    tasks: list[_Task],
    store: Store,
    load: Load,
    advance: Callable[[int], object],
) -> None:
    groups: Iterator[list[_Task]] = (
        tasks[i : i + load.group] for i in range(0, len(tasks), load.group)
    )
    failures: list[str] = []

    async def work() -> None:
        for group in groups:
            records = await _ask_group(endpoint, group, load.batched)
            store.add(records)
            failures.extend(record.failed for record in records if record.failed)
            advance(len(records))

    await _all(work() for _ in range(load.requests))
    if tasks and len(failures) == len(tasks):
        raise EndpointLost(f"none of {len(tasks)} requests was answered, the last: {failures[-1]}")


async def _all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run everything; when one raises, cancel the others."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _ask_group(endpoint: Endpoint, group: list[_Task], batched: bool) -> list[Record]:
    try:
        answers = await _answers(endpoint, group, batched)
    except RequestFailed as error:
        return [_record(task, None, str(error)) for task in group]
    return [_record(task, answer, None) for task, answer in zip(group, answers, strict=True)]


async def _answers(endpoint: Endpoint, group: list[_Task], batched: bool) -> list[Answer]:
    prompts = [task.forced for task in group if task.forced is not None]
    if prompts:
        return await forced.ask(endpoint, prompts, [task.knob() for task in group])
    questions = [
        Question(task.sample, task.knob() if endpoint.compresses else None) for task in group
    ]
    if batched:
        return await endpoint.ask_many(questions)
    return [await endpoint.ask(question) for question in questions]


def _record(task: _Task, answer: Answer | None, failed: str | None) -> Record:
    record = Record(
        cell=task.cell,
        sample=task.index,
        task=task.sample.task,
        question_tokens=task.knob().get("question_tokens"),
        failed=failed,
    )
    if answer is None:
        return record
    right = answer.tokens_right
    return dataclasses.replace(
        record,
        score=metrics.score(task.sample, answer.text) if right is None else float(right == 1),
        answer=answer.text if right is None else None,
        prompt_tokens=answer.prompt_tokens,
        before=answer.before,
        after=answer.after,
        skipped=answer.skipped,
        tokens_right=right,
        log_likelihood=answer.log_likelihood,
    )
