"""Answers put into the model's mouth: the engine's likelihoods are those that masking gives."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest
import torch
from kvc_eval import forced
from kvc_eval.endpoint import Endpoint
from kvc_eval.grid import AFTER, INSIDE, OFF, Cell
from kvc_eval.sample import Sample
from kvc_recall import model_path
from kvc_recall.tasks import sample

from bench.offline import MaskedModel
from sgl_kvc.spec import parse
from tests.evaluation.test_runs import answers, cells, evaluate
from tests.gateways import Gateway

CELLS = (
    Cell(512, INSIDE, OFF, 1),
    Cell(512, INSIDE, "kv-compress", 16),
    Cell(512, INSIDE, "snapkv", 8),
    Cell(512, AFTER, "kv-compress", 4),
    Cell(512, AFTER, "keydiff", 4),
)
WORDS_OF_LEAD = 3


def spoken(task: str, seed: int) -> Sample:
    """A prompt of the embedded model's; the answer's first words are its lead."""
    prompt = sample(task, 512, Random(f"forced {seed}"))
    document, question = prompt.text.rsplit(" . ", 1)
    answer = prompt.answer.split()
    lead, rest = answer[:WORDS_OF_LEAD], answer[WORDS_OF_LEAD:]
    return Sample(
        task, document + " . ", question, (" ".join(rest),), "exact", 40, lead=" ".join(lead)
    )


@pytest.fixture(scope="module")
def masked() -> MaskedModel:
    return MaskedModel(model_path())


async def ask(url: str, samples: list[Sample], cell: Cell) -> list[tuple]:
    async with Endpoint(url, None, None, 300) as endpoint:
        await endpoint.probe()
        head = await endpoint.head()
        prompts = [await forced.force(endpoint, made, head) for made in samples]
        knobs = [cell.knob(prompt.asked, prompt.spoken) for prompt in prompts]
        answers = await forced.ask(endpoint, prompts, knobs)
    return list(zip(prompts, knobs, answers, strict=True))


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.question} {cell.policy}")
def test_the_engines_likelihoods_are_the_masked_models(
    gateway: Gateway, masked: MaskedModel, cell: Cell
) -> None:
    samples = [spoken(task, seed) for seed in range(3) for task in ("copy32", "questions8")]
    seen = []
    for made, (prompt, knob, answer) in zip(
        samples, asyncio.run(ask(gateway.url, samples, cell)), strict=True
    ):
        assert (len(prompt.ids) - prompt.spoken) % forced.BLOCK == 0
        assert prompt.asked == prompt.spoken + len(made.question.split()) + 1  # the template's
        spec = parse(knob)
        logprobs = masked.force(list(prompt.ids), spec, prompt.answer)
        wanted = torch.tensor(prompt.ids[-prompt.answer :])
        right = (logprobs.argmax(-1) == wanted).float().mean().item()
        mean = logprobs.gather(1, wanted[:, None]).mean().item()
        assert answer.skipped is None
        assert answer.tokens_right == pytest.approx(right, abs=1e-6)
        assert answer.log_likelihood == pytest.approx(mean, abs=2e-3)
        seen.append(answer)
    if cell.policy == OFF:
        assert all(answer.tokens_right == 1 for answer in seen)
    else:
        assert any(0 < answer.tokens_right < 1 for answer in seen), "a weak test"


def test_a_chat_completion_tells_the_tokens_where_tokenize_fails(gateway: Gateway) -> None:
    async def both() -> list[list[int]]:
        chat = spoken("copy32", 1).answered("the code")
        async with Endpoint(gateway.url, None, None, 300) as endpoint:
            await endpoint.probe()
            told = [await endpoint.token_ids(chat)]
            endpoint._tokenizes = False
            return [*told, await endpoint.token_ids(chat)]

    one, other = asyncio.run(both())
    assert one == other
    assert len(one) > 500


def test_an_evaluation_on_natural_text_forces_answers(gateway: Gateway, tmp_path: Path) -> None:
    """The recall model knows hardly a word of it; its likelihoods are told all the same."""
    assert evaluate(
        gateway.url, tmp_path, "--suite", "text", "--tasks", "numbers", "quote", "--length", "512",
        "--n", "4", "--question", "inside", "after", "--policies", "random", "--rates", "4",
    ) == 0  # fmt: skip
    asked = {}
    for answer in answers(tmp_path):
        _, question, policy, _ = answer["cell"]
        asked[answer["sample"], question, policy] = answer.get("question_tokens")
        assert not {"failed", "answer"} & set(answer), "nothing was decoded"
        assert answer["log_likelihood"] <= 0
        assert answer["score"] == (answer["tokens_right"] == 1)
    assert len(asked) == 4 * 2 * 2
    for index in range(4):
        assert asked[index, "inside", "off"] is None
        inside, after = asked[index, "inside", "random"], asked[index, "after", "random"]
        assert 0 < inside < after - 5, "lead and answer; and the question before them"
    for (_, policy, _), cell in cells(tmp_path).items():
        assert ("lost" in cell) == (policy != "off")
        assert cell["tokens_right"]["n"] == 4
