"""A prompt is scored alike however its prefill is cut, and read no more often than it must be."""

from __future__ import annotations

import pytest
import torch
from kvc_kernels.score import causal_logits

from sgl_kvc.policy import scores as scores_module
from sgl_kvc.policy.base import LayerContext, Method
from sgl_kvc.policy.facts import ModelFacts
from sgl_kvc.policy.kvs import PromptKVs
from sgl_kvc.policy.scores import PromptScores
from sgl_kvc.policy.selection import Selection
from sgl_kvc.spec import Extent, parse

N, HEADS, GROUP, DIM, PAGE = 60, 2, 3, 8, 4
SCALE = DIM**-0.5


@pytest.fixture
def drawn() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(N, HEADS * GROUP, DIM), *torch.randn(2, N, HEADS, DIM)


def watched(keys: torch.Tensor, values: torch.Tensor, read: list[int]) -> PromptKVs:
    """Notes in `read` that keys were asked for, and of how many tokens."""

    def read_keys() -> torch.Tensor:
        read.append(len(keys))
        return keys

    return PromptKVs(len(keys), HEADS, keys.device, read_keys, lambda: values)


def scored(knob: dict, drawn, ends: list[int], *, with_lse: bool) -> tuple[torch.Tensor, list[int]]:
    """Scores after chunks that end so, and the lengths at which keys were read."""
    queries, keys, values = drawn
    logits = torch.cat([x for _, x in causal_logits(queries, keys, SCALE)], dim=2)
    lse = logits.logsumexp(-1).permute(2, 0, 1).flatten(1)
    spec = parse({"rate": 3, "min_tokens": 0} | knob)
    scores = PromptScores(spec, Extent.of(spec, N, PAGE), list(range(N)), PAGE, layers=1)
    read, begin = [], 0
    for end in ends:

        mine = slice(begin, end)
        known = lse[mine] if with_lse else None
        scores.observe(0, queries[mine], watched(keys[:end], values[:end], read), SCALE, known)
        begin = end
    return scores.scores(), read


@pytest.mark.parametrize("with_lse", [True, False])
@pytest.mark.parametrize("ends", [[7, 41, 60], [20, 57, 60], [1, 2, 60]])
@pytest.mark.parametrize(
    "knob", [{"policy": "snapkv", "window": 16}, {"policy": "h2o"}, {"policy": "tova"}], ids=str
)
def test_chunks(drawn, knob, ends, with_lse):
    expected, _ = scored(knob, drawn, [N], with_lse=False)
    got, read = scored(knob, drawn, ends, with_lse=with_lse)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert read == (ends if knob["policy"] == "h2o" else [N])


# ------------------------------------------------------------------ what scorers are told

LAYERS = 3


class Methods:
    """In the place of a scorer and an apportioner: what they were shown, layer by layer."""

    def __init__(self, monkeypatch, observe: bool = False, statistics: bool = False):
        self.scored: list[LayerContext] = []
        self.observed: list[LayerContext] = []
        self.weighed: list[LayerContext] = []
        scorer = Method(self.score, self.observe if observe else None, None)
        apportioner = Method(None, self.weigh if statistics else None, None)
        monkeypatch.setattr(scores_module, "scorer", lambda spec: scorer)
        monkeypatch.setattr(scores_module, "apportioner", lambda spec: apportioner)

    def score(self, context: LayerContext) -> torch.Tensor:
        self.scored.append(context)
        return torch.arange(float(len(context.keys))).expand(HEADS, -1) + 100 * context.layer

    def observe(self, context: LayerContext) -> int:
        self.observed.append(context)
        assert len(context.keys) == context.length
        return (context.state or 0) + len(context.queries)

    def weigh(self, context: LayerContext) -> torch.Tensor:
        self.weighed.append(context)
        return torch.full((2,), float(context.layer))


def observe(scores: PromptScores, begin: int, end: int, drawn, layers=range(LAYERS), lse=None):
    """Show a chunk to some layers; how often keys were read."""
    queries, keys, values = drawn
    read = []

    for layer in layers:
        kvs = watched(keys[:end], values[:end], read)
        scores.observe(layer, queries[begin:end], kvs, SCALE, lse)
    return len(read)


def new(knob: dict, **how) -> PromptScores:
    spec = parse({"rate": 3, "min_tokens": 0, "window": 16} | knob)
    return PromptScores(
        spec, Extent.of(spec, N, PAGE), list(range(100, 100 + N)), PAGE, LAYERS, **how
    )


def test_what_a_scorer_is_told(drawn, monkeypatch):
    seen, facts = Methods(monkeypatch, statistics=True), ModelFacts(neox=False)
    scores = new({}, facts=facts)
    lse = torch.randn(N, HEADS * GROUP)
    assert observe(scores, 0, N, drawn, lse=lse) == LAYERS
    queries, keys, values = drawn
    assert [context.layer for context in seen.scored] == [0, 1, 2]
    for context in (*seen.scored, *seen.weighed):
        assert context.layers == LAYERS
        assert torch.equal(context.queries, queries[-16:])
        assert torch.equal(context.lse, lse[-16:])
        assert torch.equal(context.keys, keys)
        assert torch.equal(context.values, values)
        assert context.scale == SCALE
        assert context.spec is scores.spec
        assert context.tokens.tolist() == list(range(100, 160))
        assert context.kept == scores.extent.segment_blocks * PAGE == 20
        assert context.facts is facts
        assert context.state is None
    assert [context.scores for context in seen.scored] == [None] * LAYERS
    told = [context.previous for context in seen.scored]
    assert told[0] is None
    assert [int(previous[0, 0]) for previous in told[1:]] == [0, 100]
    assert [int(context.scores[0, 0]) for context in seen.weighed] == [0, 100, 200]
    assert scores.complete
    assert scores.scores().shape == (LAYERS, HEADS, N)
    assert scores.scores().dtype == torch.float32
    assert scores.scores()[:, 0, 0].tolist() == [0, 100, 200]
    assert new({})._facts == ModelFacts()


def test_scores_are_complete_when_every_layer_is(drawn, monkeypatch):
    Methods(monkeypatch)
    scores = new({})
    for layer in range(LAYERS):
        assert not scores.complete
        with pytest.raises(RuntimeError, match="before every layer was observed"):
            scores.scores()
        observe(scores, 0, N, drawn, [layer])
    assert scores.complete
    assert not scores._windows


def test_a_question_is_not_scored(drawn, monkeypatch):
    seen = Methods(monkeypatch, observe=True)
    scores = new({"question_tokens": 18, "policy": "kv-compress"})
    assert scores.extent.scored == 40
    assert observe(scores, 0, 40, drawn) == LAYERS
    assert observe(scores, 40, N, drawn) == 0
    assert len(seen.scored) == len(seen.observed) == LAYERS
    assert seen.scored[0].tokens.tolist() == list(range(100, 140))
    assert scores.scores().shape[-1] == 40


def test_the_window_is_gathered_over_chunks(drawn, monkeypatch):
    """Each layer its own; views of whole chunks would keep them alive."""
    seen, lse = Methods(monkeypatch), torch.randn(N, HEADS * GROUP)
    scores, queries = new({}), drawn[0]
    for begin, end in ((0, 30), (30, 50), (50, N)):
        read = observe(scores, begin, end, drawn, lse=lse[begin:end])
        assert read == (LAYERS if end == N else 0)
        for window, known in scores._windows.values():
            assert len(window) == len(known) == 16
            assert window.untyped_storage().nbytes() == window.nbytes
            assert known.untyped_storage().nbytes() == known.nbytes
    for context in seen.scored:
        assert torch.equal(context.queries, queries[-16:])
        assert torch.equal(context.lse, lse[-16:])
    assert not scores._windows, "nothing is held once it is scored"


@pytest.mark.parametrize("known", [(True, False), (False, True)])
def test_a_chunk_without_lse_makes_the_windows_unknown(drawn, monkeypatch, known):
    seen, lse = Methods(monkeypatch), torch.randn(N, HEADS * GROUP)
    scores = new({})
    observe(scores, 0, 50, drawn, lse=lse[:50] if known[0] else None)
    observe(scores, 50, N, drawn, lse=lse[50:] if known[1] else None)
    assert seen.scored[0].lse is None
    assert len(seen.scored[0].queries) == 16


def test_a_scorer_of_all_queries_sees_every_chunk(drawn, monkeypatch):
    seen, lse = Methods(monkeypatch, observe=True), torch.randn(N, HEADS * GROUP)
    scores = new({})
    assert observe(scores, 0, 30, drawn, lse=lse[:30]) == LAYERS
    assert observe(scores, 30, N, drawn, lse=lse[30:]) == LAYERS
    assert [len(context.queries) for context in seen.observed] == [30] * 6
    assert [len(context.tokens) for context in seen.observed] == [30] * 3 + [60] * 3
    assert [context.state for context in seen.observed] == [None] * 3 + [30] * 3
    assert [context.last_chunk for context in seen.observed] == [False] * 3 + [True] * 3
    assert torch.equal(seen.observed[0].lse, lse[:30])
    assert scores.states == [60] * 3
    assert [context.state for context in seen.scored] == [60] * 3
    assert [len(context.queries) for context in seen.scored] == [16] * 3


def test_states_of_the_same_prompt_are_not_gathered_again(drawn, monkeypatch):
    """The prompt begins where the prefix cache ends."""
    seen = Methods(monkeypatch, observe=True)
    states = [5, 6, 7]
    scores = new({}, states=states)
    assert observe(scores, 40, 50, drawn) == 0
    assert observe(scores, 50, N, drawn) == LAYERS
    assert seen.observed == []
    assert [context.state for context in seen.scored] == states
    assert scores.states == states


@pytest.mark.parametrize("statistics", [True, False])
def test_what_is_selected(drawn, monkeypatch, statistics):
    """Of what lies between the prefix and the tail; positions count from the first token."""
    Methods(monkeypatch, statistics=statistics)
    told = {}

    def select(given: torch.Tensor, spec, blocks: int, page: int, **how) -> Selection:
        told.update(how, scores=given, spec=spec, blocks=blocks, page=page)
        return Selection(torch.tensor([1]), torch.tensor([8, 11, 15]))

    monkeypatch.setattr(scores_module, "select", select)
    facts = ModelFacts(neox=False)
    scores = new({"prefix_tokens": 9}, facts=facts)
    with pytest.raises(RuntimeError):
        scores.select()
    observe(scores, 0, 58, drawn)
    observe(scores, 58, N, drawn)
    chosen = scores.select()
    extent = scores.extent
    assert (extent.begin, extent.end) == (8, 60)
    assert torch.equal(told["scores"], scores.scores()[..., 8:60])
    assert told["scores"].is_contiguous()
    assert told["spec"] is scores.spec
    assert (told["blocks"], told["page"]) == (extent.segment_blocks, PAGE)
    assert (told["tail"], told["before"], told["begin"]) == (0, 8, 8)
    assert told["facts"] is facts
    assert chosen.positions.tolist() == [8, 11, 15]
    assert chosen.pages.tolist() == [1]
    if statistics:
        assert told["statistics"].tolist() == [[0, 0], [1, 1], [2, 2]]
    else:
        assert told["statistics"] is None


def test_the_tail_that_is_scored_is_told(drawn, monkeypatch):
    Methods(monkeypatch)
    told = {}
    monkeypatch.setattr(
        scores_module, "select",
        lambda *_, **how: told.update(how) or Selection(torch.ones(1), torch.zeros(1)),
    )  # fmt: skip
    spec = parse({"rate": 3, "min_tokens": 0})
    scores = PromptScores(spec, Extent.of(spec, 59, PAGE), list(range(59)), PAGE, LAYERS)
    observe(scores, 0, 59, drawn)
    scores.select()
    assert told["tail"] == 3
