from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests import tiny_models
from tests.servers import Engine, sglang


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory) -> Path:
    return tiny_models.write(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def server(tiny_llama) -> Engine:
    """A compressing server with room for 16 prompts of 1,000 tokens."""
    with sglang(tiny_llama, "--max-total-tokens", "16384") as running:
        yield running


@pytest.fixture(scope="session")
def plain_server(tiny_llama) -> Engine:
    """SGLang as it comes: its own attention, pool and radix cache."""
    with sglang(tiny_llama, "--max-total-tokens", "16384", backend="torch_native") as running:
        yield running


@pytest.fixture(scope="session")
def small_server(tiny_llama) -> Engine:
    """A compressing server whose pool holds two prompts of 2,000 tokens, logging every step."""
    args = ("--max-total-tokens", "4096", "--decode-log-interval", "1")
    with sglang(tiny_llama, *args) as running:
        yield running


@pytest.fixture(scope="session")
def hasty_server(tiny_llama) -> Engine:
    """The same, and it lets requests in as if most answers were short: some have to leave again."""
    args = ("--max-total-tokens", "4096", "--decode-log-interval", "1")
    with sglang(tiny_llama, *args, "--schedule-conservativeness", "0.1") as running:
        yield running


def prompt(tokens: int, seed: int | str, shared: int = 0) -> list[int]:
    """Random token ids, the first `shared` of them the same for every seed."""
    start = random.Random("shared").choices(range(4, tiny_models.VOCABULARY), k=shared)
    rest = random.Random(seed).choices(range(4, tiny_models.VOCABULARY), k=tokens - shared)
    return start + rest
