"""SGLang programs that use the knob, through a gateway and on its worker, with the real model."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import sglang as sgl
from kvc_recall.tasks import sample

from sgl_kvc.lang import RuntimeEndpoint, gen, kv_compression, select
from sgl_kvc.lang.endpoint import _check_arrived
from sgl_kvc.spec import SpecError
from tests.gateways import Gateway

PROMPT = sample("needles8", 512, Random(7))
DOCUMENT, _, QUESTION = PROMPT.text.rpartition(" . ")
GREEDY = {"temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module", params=["gateway", "worker"])
def backend(request: pytest.FixtureRequest, gateway: Gateway) -> RuntimeEndpoint:
    if request.param == "gateway":
        return RuntimeEndpoint(gateway.url)
    key = gateway.worker_headers()["Authorization"].removeprefix("Bearer ")
    return RuntimeEndpoint(gateway.worker_url(), api_key=key)


@pytest.fixture(scope="module")
def through_gateway(gateway: Gateway) -> RuntimeEndpoint:
    return RuntimeEndpoint(gateway.url)


@sgl.function
def ask(s, text):
    """As anybody would write it who knows nothing of compression."""
    s += text + " <answer>"
    s += sgl.gen("answer", **GREEDY)


def rate(state: Any, name: str = "answer") -> float:
    return state.get_meta_info(name)["kv_compression"]["rate"]


def test_an_unmodified_program_is_compressed_by_what_stands_around_it(backend):
    with kv_compression(rate=8):
        state = ask.run(text=PROMPT.text, backend=backend)
    assert state["answer"].split() == PROMPT.answer.split()
    report = state.get_meta_info("answer")["kv_compression"]
    assert (report["rate"], report["skipped"]) == (8, None)
    assert report["blocks"]["after"] * 8 == report["blocks"]["before"]
    assert rate(ask.run(text=PROMPT.text, backend=backend)) == 1


def test_an_unmodified_program_runs_on_sglangs_own_endpoint(gateway):
    state = ask.run(text=PROMPT.text, backend=sgl.RuntimeEndpoint(gateway.url))
    assert state["answer"].split() == PROMPT.answer.split()


def test_the_innermost_knob_counts(backend):
    @sgl.function
    def nested(s):
        s += PROMPT.text + " <answer>"
        s += sgl.gen("around the program", **GREEDY)
        with kv_compression(rate=4):
            s += sgl.gen("around it", **GREEDY)
            s += gen("its own", kv_compression={"rate": 16}, **GREEDY)
            s += sgl.assistant(sgl.gen("inside a role", **GREEDY))
            s += gen("its own, off", kv_compression=None, **GREEDY)
        s += sgl.gen("around the program again", **GREEDY)

    with kv_compression(rate=2):
        state = nested.run(backend=backend)
    state.sync()
    assert {name: rate(state, name) for name in state.stream_executor.meta_info} == {
        "around the program": 2,
        "around it": 4,
        "its own": 16,
        "inside a role": 4,
        "its own, off": 1,
        "around the program again": 2,
    }


def test_one_expression_in_two_contexts(through_gateway):
    answer = sgl.gen("answer", **GREEDY)

    @sgl.function
    def twice(s):
        s += PROMPT.text + " <answer>"
        one, two = s.fork(2).states
        with kv_compression(rate=4, force=True):
            one += answer
        two += answer
        s["rates"] = [rate(one), rate(two)]

    assert twice.run(backend=through_gateway)["rates"] == [4, 1]


def test_streams(backend):
    @sgl.function
    def long(s):
        s += PROMPT.text + " <answer>"
        s += sgl.gen("answer", temperature=0, max_tokens=64, ignore_eos=True)

    with kv_compression(rate=8):
        state = long.run(backend=backend, stream=True)
    pieces = list(state.text_iter("answer"))
    assert len(pieces) > 4
    assert "".join(pieces).split()[:3] == PROMPT.answer.split()
    assert "".join(pieces) == state["answer"]
    assert rate(state) == 8


def test_batches_run_in_threads_that_know_the_context(backend):
    prompts = [sample("needles8", 256, Random(seed)) for seed in range(4)]
    with kv_compression(rate=4):
        states = ask.run_batch([{"text": each.text} for each in prompts], backend=backend)
    assert [state["answer"].split() for state in states] == [p.answer.split() for p in prompts]
    assert list(map(rate, states)) == [4] * 4


@pytest.mark.parametrize("join", ["gather_variable", "concate_and_append"])
def test_forks_are_compressed_and_joined(through_gateway, join):
    questions = [line for line in DOCUMENT.split(" . ") if line.startswith("the code for")][:2]

    @sgl.function
    def both(s):
        s += DOCUMENT + " . "
        forks = s.fork(len(questions))
        for fork, line in zip(forks.states, questions, strict=True):
            fork += "what is " + line.partition(" is ")[0] + " ? <answer>"
            fork += sgl.gen("answer", **GREEDY)
        forks.join(join)
        s["rates"] = [rate(fork) for fork in forks.states]

    with kv_compression(rate=2, force=True):
        state = both.run(backend=through_gateway)
    expected = [line.partition(" is ")[2].split() for line in questions]
    if join == "gather_variable":
        assert [answer.split() for answer in state["answer"]] == expected
    else:
        assert all(" ".join(each) in state.text() for each in expected)
    assert state["rates"] == [2, 2]


def stored(gateway: Gateway) -> dict[str, int]:
    """The compressed copies that others may read: name to how many began with it."""
    with gateway.client() as client:
        answer = client.get("/v1/kv_cache").raise_for_status()
    return {each["id"]: each["hits"] for each in answer.json()["data"]}


@pytest.mark.parametrize("stream", [False, True])
def test_what_branches_share_is_compressed_once(backend, gateway, stream):
    """Four questions and a choice of different lengths on one document, without `force`."""
    seed = 9 + stream + 2 * (backend.api_key is None)  # a document that nobody has asked about
    text = sample("needles8", 512, Random(seed)).text.rpartition(" . ")[0]
    lines = [line for line in text.split(" . ") if line.startswith("the code for")][:4]
    asked, answers = zip(*(line.split(" is ") for line in lines), strict=True)

    @sgl.function
    def many(s):
        s += text + " . "
        forks = s.fork(5)
        for number, (fork, words) in enumerate(zip(forks.states[:4], asked, strict=True)):
            fork += "and so " * number + "what is " + words + " ? <answer>"
            fork += sgl.gen("answer", **GREEDY)
        last = forks.states[4]
        last += "what is " + asked[0] + " ? <answer>"
        last += select("answer", [f" {answers[1]}", f" {answers[0]}"])
        forks.join()
        s["reports"] = [fork.get_meta_info("answer")["kv_compression"] for fork in forks.states]

    before = stored(gateway)
    with kv_compression(rate=2):
        state = many.run(backend=backend, stream=stream)
        _ = stream and list(state.text_iter())  # to the program's end
    *reports, chosen = state["reports"]
    assert [answer.split() for answer in state["answer"]] == [a.split() for a in answers] + [
        answers[0].split()
    ]
    reports += chosen
    assert [report["skipped"] for report in reports] == [None] * 6
    made = {name: hits for name, hits in stored(gateway).items() if name not in before}
    assert list(made.values()) == [5], "one copy, and all but the first branch begin with it"
    assert len({report["policy"] for report in reports}) == 1


@pytest.mark.parametrize(
    ("shared", "own", "knob"),
    [("the old river waits . ", PROMPT.text, {}), (DOCUMENT, QUESTION, {"question_tokens": 0})],
    ids=["most is its own", "the knob says it"],
)
def test_a_branch_may_be_compressed_by_itself(through_gateway, shared, own, knob):
    @sgl.function
    def branch(s):
        s += shared
        one, _ = s.fork(2).states
        one += own + " <answer>"
        one += gen("answer", kv_compression={"rate": 8, "force": True, **knob}, **GREEDY)
        s["report"] = one.get_meta_info("answer")["kv_compression"]

    report = branch.run(backend=through_gateway)["report"]
    assert (report["policy"], report["skipped"]) == ("kv-compress", None)


@pytest.mark.parametrize("knob", [None, {"rate": 4}])
def test_a_choice_is_read_over_what_was_kept(backend, knob):
    wrong = sample("needles8", 512, Random(8)).answer

    @sgl.function
    def choose(s):
        s += PROMPT.text + " <answer>"
        s += select("answer", [f" {wrong}", f" {PROMPT.answer}"], kv_compression=knob)

    state = choose.run(backend=backend)
    assert state["answer"].split() == PROMPT.answer.split()
    reports = state.get_meta_info("answer").get("kv_compression")
    assert (reports is None) == (knob is None)
    if reports is not None:
        assert [report["skipped"] for report in reports] == [None, None]
        assert all(report["blocks"]["after"] < report["blocks"]["before"] / 2 for report in reports)


def test_several_answers_have_a_report_each(backend):
    @sgl.function
    def several(s):
        s += PROMPT.text + " <answer>"
        s += gen("answer", n=2, kv_compression={"rate": 8, "force": True}, **GREEDY)

    state = several.run(backend=backend)
    assert [answer.split() for answer in state["answer"]] == [PROMPT.answer.split()] * 2
    reports = [info["kv_compression"] for info in state.get_meta_info("answer")]
    assert [report["rate"] for report in reports] == [8, 8]


def test_a_backend_has_a_knob_of_its_own(gateway):
    backend = RuntimeEndpoint(gateway.url, kv_compression={"rate": 2})
    assert rate(ask.run(text=PROMPT.text, backend=backend)) == 2
    with kv_compression(rate=8):
        assert rate(ask.run(text=PROMPT.text, backend=backend)) == 8


@pytest.mark.filterwarnings("ignore:Error in stream_executor")
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_server_refuses_is_the_states_error(through_gateway, stream):
    with kv_compression(rate=100):
        state = ask.run(text=PROMPT.text, backend=through_gateway, stream=stream)
    assert "must be at most 64 on this server" in str(state.error())


def test_a_bad_knob_is_refused_where_it_is_written():
    with pytest.raises(SpecError, match=r"kv_compression\.rate"), kv_compression(rate=0):
        pass
    with pytest.raises(SpecError, match=r"kv_compression\.polcy"):
        gen("answer", kv_compression={"rate": 2, "polcy": "snapkv"})


def test_sglangs_own_endpoint_would_drop_the_knob(gateway):
    stock = sgl.RuntimeEndpoint(gateway.url)
    with kv_compression(rate=8), pytest.raises(RuntimeError, match="cannot send kv_compression"):
        ask.run(text=PROMPT.text, backend=stock)


def test_a_server_without_the_plugin_is_noticed():
    answer = {"text": "", "meta_info": {}}
    _check_arrived(answer, None)
    _check_arrived(answer, {"rate": 1})
    with pytest.raises(RuntimeError, match="does not run with sgl-kvc"):
        _check_arrived(answer, {"rate": 8})
