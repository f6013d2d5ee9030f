"""Requests that ended the scheduler, and with it everybody else's: each is answered by itself."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
from pathlib import Path

import httpx
import msgspec
import pytest

from tests import tiny_models
from tests.engine.conftest import prompt
from tests.servers import Engine, generate_body

IDS = prompt(200, seed=1)


@pytest.fixture(autouse=True)
def _lives(server):
    """Whatever a test asks for, the next client is served."""
    yield
    assert len(server.generate(IDS, max_new_tokens=2, ignore_eos=True)["output_ids"]) == 2


def status_and_text(server: Engine, path: str, body: dict) -> tuple[int, str]:
    with server.client() as client:
        response = client.post(path, json=body)
    return response.status_code, response.text


REFUSED = {
    "top_k": ({"temperature": 1, "top_k": 1 << 40}, {}),
    "min_new_tokens": ({"min_new_tokens": 1 << 40, "max_new_tokens": None}, {}),
    "logit_bias": ({"temperature": 1, "logit_bias": {"10": 1e39}}, {}),
    "stop_token_ids": ({"stop_token_ids": [100_000], "min_new_tokens": 4}, {}),
    "top_k of a half": ({"temperature": 1, "top_k": 2.5}, {}),
    "max_new_tokens": ({"max_new_tokens": 4.5}, {}),
    "regex": ({"regex": 5}, {}),
    "ignore_eos": ({"ignore_eos": "perhaps"}, {}),
    "sampling_seed": ({"temperature": 1, "sampling_seed": "seven"}, {}),
    "logit_bias of a word": ({"logit_bias": {"10": "high"}}, {}),
    "stream_interval": ({"stream_interval": 0}, {}),
    "stop_regex": ({"stop_regex": "(("}, {}),
    "n": ({"n": 1 << 30}, {}),
    "n of nothing": ({"n": None}, {}),
    "temperature": ({"temperature": "hot"}, {}),
    "warmth": ({"warmth": 1}, {}),
    "sampling_params": ({}, {"sampling_params": []}),
    "session_params": ({}, {"session_params": {"name": "a"}}),
    "return_hidden_states": ({}, {"return_hidden_states": []}),
    "positional_embed_overrides": ({}, {"positional_embed_overrides": 5}),
    "top_logprobs_num": ({}, {"return_logprob": True, "top_logprobs_num": 5000}),
    "input_ids": ({}, {"input_ids": [5, 100_000]}),
    "input_ids below 0": ({}, {"input_ids": [5, -7]}),
    "logprob_start_len": ({}, {"return_logprob": True, "logprob_start_len": -5}),
    "extra_key": ({}, {"extra_key": ["for", "two"]}),
    "bootstrap_host": ({}, {"bootstrap_host": ["a"]}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_the_engine_cannot_hold_are_refused(server, name):
    sampling, fields = REFUSED[name]
    status, text = status_and_text(server, "/generate", generate_body(IDS, **sampling) | fields)
    assert status == 400, text
    assert name.split()[0] in text


def test_the_largest_numbers_that_are_right_are_served(server):
    fields = {"return_logprob": True, "top_logprobs_num": tiny_models.VOCABULARY,
              "input_ids": [0, tiny_models.VOCABULARY - 1]}  # fmt: skip
    sampling = {
        "temperature": 1, "top_k": (1 << 31) - 1, "logit_bias": {"10": 3e38}, "min_new_tokens": 4,
        "stop_token_ids": [tiny_models.VOCABULARY - 1], "max_new_tokens": 4.0, "stream_interval": 1,
        "custom_params": {"of": ["our", {"own": None}]},
    }  # fmt: skip
    status, text = status_and_text(server, "/generate", generate_body(IDS, **sampling) | fields)
    assert status == 200, text


@pytest.mark.parametrize(
    "sampling",
    [
        {"repetition_penalty": 1e-45},
        {"repetition_penalty": 1e-30, "logit_bias": {"10": 3e38}},
        {"logit_bias": {"10": 3e38}, "temperature": 1e-6},
        {"logit_bias": {str(token): -3e38 for token in range(tiny_models.VOCABULARY)}},
    ],
)
def test_logits_beyond_numbers_are_sampled_from(server, sampling):
    """Softmax of them is not a number, and torch.multinomial raised for the whole batch."""
    body = generate_body(IDS, **{"temperature": 1.0} | sampling, max_new_tokens=4, ignore_eos=True)
    status, text = status_and_text(server, "/generate", body)
    assert status == 200, text
    if sampling.get("logit_bias", {}).keys() == {"10"}:
        assert json.loads(text)["output_ids"] == [10] * 4


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/update_weights_from_distributed",
         {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "none"}),
        ("/update_weights_from_disk", {"model_path": "/there is no model"}),
        ("/start_profile", {"activities": ["MEM"]}),
        ("/start_profile", {"activities": ["CUDA_PROFILER"]}),
        ("/start_profile", {"activities": ["RPD"]}),
        ("/stop_profile", {}),
    ],
)  # fmt: skip
def test_an_operation_that_fails_says_so(server, path, body):
    status, _ = status_and_text(server, path, body)
    assert status >= 400


@pytest.mark.parametrize(
    "path", ["/start_expert_distribution_record", "/resume_memory_occupation"]
)
def test_an_operation_without_an_answer_that_could_fail(server, path):
    status_and_text(server, path, {})


def test_a_profile_of_the_cpu(server, tmp_path):
    """`/start_profile` asked the platform for a name that it did not have."""
    body = {"output_dir": str(tmp_path), "num_steps": 3}
    status, text = status_and_text(server, "/start_profile", body)
    assert status == 200, text
    server.generate(IDS, max_new_tokens=8, ignore_eos=True)
    assert list(Path(tmp_path).glob("*.trace.json.gz"))


STRANGE = (
    -5, 0, 1.5, 1 << 40, 1 << 62, True, "a", "", [], [1], ["a", "b"], [[1]], {}, {"a": 1}, None
)  # fmt: skip
#: They name files or hosts, or are the prompt itself, of which the other tests have the cases.
APART = {"image_data", "video_data", "audio_data", "text", "rid"}


def test_no_field_of_a_request_ends_the_engine(server):
    """Every field of `/generate` and every sampling parameter, with values of every kind."""
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    fields = {field.name for field in dataclasses.fields(GenerateReqInput)} - APART
    sampling = {field.name for field in msgspec.structs.fields(SamplingParams)}
    assert len(fields) > 40
    assert len(sampling) > 20
    plain = generate_body(IDS, max_new_tokens=2, temperature=1.0)
    bodies = [plain | {name: value} for name in sorted(fields) for value in STRANGE]
    for name, value in itertools.product(sorted(sampling - {"max_new_tokens"}), STRANGE):
        bodies.append(plain | {"sampling_params": plain["sampling_params"] | {name: value}})
    statuses: dict[int, list] = collections.defaultdict(list)
    alone = httpx.Limits(max_keepalive_connections=0)  # SGLang closes a connection with a 500
    with httpx.Client(base_url=server.url, limits=alone, timeout=300) as client:
        for body in bodies:
            what = {name: value for name, value in body.items() if value != plain.get(name)}
            statuses[client.post("/generate", json=body).status_code].append(what)
    assert len(statuses.pop(400)) > 100
    assert len(statuses.pop(200)) > 100
    assert not statuses
