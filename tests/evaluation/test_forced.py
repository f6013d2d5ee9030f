"""Teacher forcing: tokens and likelihoods by hand; the engine's are in tests/bench."""

from __future__ import annotations

import dataclasses
import math

import pytest
from kvc_eval import measure
from kvc_eval.endpoint import Answer
from kvc_eval.forced import BLOCK, Forced, common, likelihood, trim
from kvc_eval.grid import AFTER, INSIDE, OFF, Cell
from kvc_eval.results import summarise
from kvc_eval.sample import Sample

from tests.evaluation.records import GRID, record


def logprobs(*tokens: tuple[float, int, int]) -> dict:
    """``meta_info`` of (likelihood, token, likeliest token) at every place."""
    return {
        "input_token_logprobs": [[None, 7, None]] + [[math.log(p), t, None] for p, t, _ in tokens],
        "input_top_logprobs": [None] + [[[-0.1, likeliest, None]] for *_, likeliest in tokens],
    }


def test_the_likelihood_of_an_answer_by_hand() -> None:
    meta = logprobs((0.9, 1, 1), (0.5, 2, 2), (0.25, 3, 9), (0.5, 4, 4))
    right, mean = likelihood(meta, 3)
    assert right == pytest.approx(2 / 3)
    assert mean == pytest.approx(math.log(0.5 * 0.25 * 0.5) / 3)
    with pytest.raises(IndexError, match="logprobs of 5 tokens, the answer has 6"):
        likelihood(meta, 6)


def test_prompts_are_cut_to_whole_blocks_before_the_answer() -> None:
    head, document, question, spoken = [1] * 3, list(range(100, 300)), [2] * 10, [3] * 5
    ids = (*head, *document, *question, *spoken)
    cut = trim(Forced(ids, answer=4, spoken=5, asked=15), 3)
    surplus = (3 + 200 + 10) % BLOCK
    assert cut.ids == (*head, *document[surplus:], *question, *spoken)
    assert (len(cut.ids) - cut.spoken) % BLOCK == 0
    assert (cut.answer, cut.spoken, cut.asked) == (4, 5, 15)
    short = Forced(ids[:BLOCK], answer=1, spoken=2, asked=3)
    assert trim(short, 3) == short


def test_common_prefix() -> None:
    assert [common("abc", other) for other in ("abd", "ab", "abcd", "x", "")] == [2, 2, 3, 0, 0]


def test_the_answer_is_read_after_compression() -> None:
    inside, after, off = (
        Cell(1024, question, policy, 8)
        for question, policy in ((INSIDE, "snapkv"), (AFTER, "snapkv"), (INSIDE, OFF))
    )
    assert inside.knob(30, 12)["question_tokens"] == 12
    assert after.knob(30, 12)["question_tokens"] == 30
    assert off.knob(30, 12) == {"rate": 1}


@pytest.mark.parametrize(("right", "score"), [(1.0, 1.0), (0.75, 0.0), (0.0, 0.0)])
def test_only_an_answer_whose_every_token_is_right_is_right(right: float, score: float) -> None:
    """Nothing was decoded, so there is no text to look at or to keep."""
    asked = Sample("numbers", "document", "question", ("",), "exact", 8, lead="It is")
    task = measure._Task(Cell(1024, INSIDE, "snapkv", 8), 3, asked, Forced((1, 2), 1, 4, 9))
    answer = Answer("", 90, 100, 20, None, tokens_right=right, log_likelihood=-0.5)
    made = measure._record(task, answer, None)
    assert (made.score, made.tokens_right, made.log_likelihood) == (score, right, -0.5)
    assert made.answer is None
    assert made.question_tokens == 4


def test_losses_are_of_the_same_prompts() -> None:
    def told(policy: str, rate: float, sample: int, right: float, mean: float):
        return dataclasses.replace(
            record(policy, rate, sample), tokens_right=right, log_likelihood=mean,
            score=float(right == 1),
        )  # fmt: skip

    off, cell = summarise(
        [
            told("off", 1, 0, 1.0, -0.1), told("off", 1, 1, 0.5, -2.0),
            told("kv-compress", 8, 0, 0.5, -0.4), told("kv-compress", 8, 1, 0.5, -2.1),
            told("kv-compress", 8, 3, 0.0, -9.0),  # not asked uncompressed
        ],
        GRID,
    )  # fmt: skip
    assert "lost" not in off
    assert "of_right" not in off
    assert off["tokens_right"]["score"] == 0.75
    assert (cell["of_right"]["n"], cell["of_right"]["score"]) == (1, 0)
    assert cell["lost"]["n"] == 2
    assert cell["lost"]["mean"] == pytest.approx(0.2)  # of 0.3 and 0.1: 1.96 · 0.1414 / √2
    assert cell["lost"]["interval"] == pytest.approx([0.2 - 0.196, 0.2 + 0.196], abs=1e-3)
    assert cell["tasks"]["single"]["lost"] == {"n": 1, "mean": 0.3, "interval": None}
