"""Grammars and sampling parameters: outputs obey, and no request ends the server."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from transformers import AutoTokenizer

from tests import tiny_models
from tests.servers import assert_no_leak, generate_body, sglang

PROMPT = "the quick brown fox jumps over the lazy dog. " * 12
KNOBS = {"uncompressed": {"rate": 1}, "rate 8": {"rate": 8}}
SCHEMA = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}, "unit": {"enum": ["C", "F"]}},
    "required": ["sure", "unit"],
    "additionalProperties": False,
}
TAG = {"begin": "<call>", "schema": SCHEMA, "end": "</call>"}
SEQUENCE = [
    {"type": "const_string", "value": "Answer: "},
    {"type": "json_schema", "json_schema": SCHEMA},
]
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": SCHEMA, "strict": True},
}


def obeys_schema(text: str) -> bool:
    value = json.loads(text)
    return value.keys() == {"sure", "unit"} and value["unit"] in "CF" and value["sure"] in (0, 1)


def obeys_tag(text: str) -> bool:
    found = re.match(r"<call>(.*?)</call>", text, re.DOTALL)
    return found is not None and obeys_schema(found[1])


CONSTRAINTS = {
    "json_schema": (json.dumps(SCHEMA), obeys_schema),
    "regex": ("[0-9]{3}-[a-f]{2}", re.compile("[0-9]{3}-[a-f]{2}").fullmatch),
    "ebnf": ('root ::= "yes" | "no" tail\ntail ::= "t"{1,3}', re.compile("yes|not{1,3}").fullmatch),
    "legacy structural_tag": (
        json.dumps({"type": "structural_tag", "structures": [TAG], "triggers": ["<call>"],
                    "at_least_one": True}),
        obeys_tag,
    ),
    "structural_tag": (
        json.dumps({"type": "structural_tag",
                    "format": {"type": "sequence", "elements": SEQUENCE}}),
        lambda text: text.startswith("Answer: ") and obeys_schema(text.removeprefix("Answer: ")),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return tiny_models.write(folder, tokenizer=tiny_models.characters())


@pytest.fixture(scope="module")
def server(folder):
    arguments = (
        "--max-total-tokens", "16384", "--tool-call-parser", "qwen25",
        "--enable-return-hidden-states", "--enable-custom-logit-processor",
    )  # fmt: skip
    with sglang(folder, *arguments) as running:
        yield running


def biased(folder, characters: str, bias: float) -> dict[str, float]:
    """A `logit_bias` for the tokens of `characters`."""
    ids = AutoTokenizer.from_pretrained(folder)(characters)["input_ids"]
    return {str(token): bias for token in ids}


@pytest.fixture(scope="module")
def no_blanks(folder) -> dict[str, float]:
    """A `logit_bias` that ends white space between JSON's tokens, which may be without end."""
    return biased(folder, " \t\n\r", -100.0)


@pytest.fixture
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0, timeout=120)


@pytest.fixture(autouse=True)
def _lives(server):
    """Whatever a test asks for, the next client is served."""
    yield
    answer = server.generate(PROMPT, {"rate": 8}, max_new_tokens=2, ignore_eos=True)
    assert len(answer["output_ids"]) == 2


def constraint(kind: str) -> dict[str, str]:
    return {kind.removeprefix("legacy "): CONSTRAINTS[kind][0]}


@pytest.mark.parametrize("knob", KNOBS)
@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_a_constrained_request_is_answered_as_it_asked(server, no_blanks, kind, knob):
    """Constrained requests used to end a CPU's scheduler: "Found no NVIDIA driver"."""
    answers = server.generate(
        [PROMPT, PROMPT + "again. "], KNOBS[knob], temperature=1, max_new_tokens=160,
        n=2, logit_bias=no_blanks, **constraint(kind),
    )  # fmt: skip
    assert len(answers) == 4
    for answer in answers:
        assert CONSTRAINTS[kind][1](answer["text"]), answer["text"]
        assert (answer["kv_compression"]["rate_achieved"] > 4) == (knob == "rate 8")


@pytest.mark.parametrize("knob", KNOBS)
def test_json_schema_by_openai(client, no_blanks, knob):
    asked = {
        "model": "-",
        "messages": [{"role": "user", "content": PROMPT}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
        },
        "logit_bias": no_blanks,
        "max_tokens": 160,
        "n": 2,
        "extra_body": {"custom_params": {"kv_compression": KNOBS[knob]}},
    }
    whole = client.chat.completions.create(**asked)
    assert [obeys_schema(choice.message.content) for choice in whole.choices] == [True] * 2
    texts = ["", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert [obeys_schema(text) for text in texts] == [True] * 2


@pytest.mark.parametrize("knob", KNOBS)
@pytest.mark.parametrize("choice", ["required", {"type": "function",
                                                 "function": {"name": "weather"}}],
                         ids=["required", "named"])  # fmt: skip
def test_tool_calls_by_openai(client, no_blanks, choice, knob):
    asked = {
        "model": "-",
        "messages": [{"role": "user", "content": PROMPT}],
        "tools": [TOOL],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "logit_bias": no_blanks,
        "max_tokens": 200,
        "extra_body": {"custom_params": {"kv_compression": KNOBS[knob]}},
    }
    call = client.chat.completions.create(**asked).choices[0].message.tool_calls[0]
    assert call.function.name == "weather"
    assert obeys_schema(call.function.arguments)
    name, arguments = "", ""
    for chunk in client.chat.completions.create(**asked, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or [] if chunk.choices else []:
            if delta.index == 0:
                name += delta.function.name or ""
                arguments += delta.function.arguments or ""
    assert name == "weather"
    assert obeys_schema(arguments)


def test_clients_at_once(server, no_blanks):
    """Constrained and free requests, compressed and not, share batches."""

    def ask(number: int) -> bool:
        kinds = [*CONSTRAINTS, None]
        kind, knob = kinds[number % len(kinds)], list(KNOBS.values())[number % 2]
        asked = constraint(kind) if kind else {"ignore_eos": True}
        answer = server.generate(
            PROMPT * 2 + str(number), knob, temperature=1, max_new_tokens=160,
            logit_bias=no_blanks, **asked,
        )  # fmt: skip
        if kind is None:
            return answer["meta_info"]["completion_tokens"] == 160
        return bool(CONSTRAINTS[kind][1](answer["text"]))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(24))) == [True] * 24
    assert_no_leak(server)


@pytest.mark.parametrize(
    "wrong",
    [{"regex": "(("}, {"json_schema": "{nope"}, {"ebnf": "root ::= "}, {"structural_tag": "{}"}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_grammar_that_cannot_be_read_is_refused_alone(server, wrong):
    with server.client() as client:
        response = client.post("/generate", json=generate_body(PROMPT, **wrong))
    assert response.status_code == 400
    assert "Failed to compile" in response.text


@pytest.mark.parametrize("backend", ["llguidance", "outlines"])
def test_other_grammar_backends(folder, backend):
    arguments = ("--grammar-backend", backend, "--max-total-tokens", "8192")
    with sglang(folder, *arguments) as running:
        answer = running.generate(PROMPT, {"rate": 8}, **constraint("regex"))
        assert CONSTRAINTS["regex"][1](answer["text"])


SAMPLING = {
    "penalties": {"frequency_penalty": 0.5, "presence_penalty": -0.5, "repetition_penalty": 1.3,
                  "min_new_tokens": 6},
    "penalties and grammar": {"frequency_penalty": 2.0, "regex": "[ab]{6}"},
    "logit_bias": {"logit_bias": {"5": 4.0, "6": -100}},
    "min_p": {"temperature": 1, "min_p": 0.1},
    "top_k": {"temperature": 1, "top_k": 5},
    "top_p": {"temperature": 1, "top_p": 0.5},
    "all of them": {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05},
    "very cold": {"temperature": 1.1e-6},
    "very hot": {"temperature": 1e30},
    "seed": {"temperature": 1, "sampling_seed": 7},
    "stop": {"stop": ["e", "<"], "no_stop_trim": True},
    "stop_token_ids": {"stop_token_ids": [30, 31], "min_new_tokens": 3},
    "stop_regex": {"stop_regex": "[a-z]{2}"},
    "special tokens": {"skip_special_tokens": False, "spaces_between_special_tokens": False},
}  # fmt: skip


@pytest.mark.parametrize("knob", KNOBS)
@pytest.mark.parametrize("name", SAMPLING)
def test_sampling_parameters(server, name, knob):
    answer = server.generate(PROMPT, KNOBS[knob], **SAMPLING[name])
    assert answer["meta_info"]["completion_tokens"] > 0
    assert (answer["kv_compression"]["rate_achieved"] > 4) == (knob == "rate 8")


ASKED_FOR = {
    "logprobs": {"return_logprob": True, "top_logprobs_num": 5, "logprob_start_len": 0,
                 "return_text_in_logprobs": True},
    "logprobs of tokens": {"return_logprob": True, "token_ids_logprob": [5, 6, 7]},
    "hidden states": {"return_hidden_states": True},
}  # fmt: skip


@pytest.mark.parametrize("knob", KNOBS)
@pytest.mark.parametrize("name", ASKED_FOR)
def test_what_can_be_returned(server, name, knob):
    body = generate_body(PROMPT, KNOBS[knob], max_new_tokens=4, ignore_eos=True) | ASKED_FOR[name]
    with server.client() as client:
        found = client.post("/generate", json=body).json()["meta_info"]
    if name == "hidden states":
        assert len(found["hidden_states"]) == 4
    else:
        assert len(found["output_token_logprobs"]) == 4


def test_logprobs_by_openai(client, folder):
    """Letters only: SGLang reports alternatives by their text, and most bytes have none."""
    answer = client.chat.completions.create(
        model="-", messages=[{"role": "user", "content": PROMPT}], max_tokens=4,
        logprobs=True, top_logprobs=3, seed=3, logit_bias=biased(folder, "abcdefgh", 100.0),
    )  # fmt: skip
    found = answer.choices[0].logprobs.content
    assert [len(one.top_logprobs) for one in found] == [3] * 4
    assert all(one.token in "abcdefgh" for one in found)
