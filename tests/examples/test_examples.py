"""The examples, run as a reader would, against the tests' gateway or an engine of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gateways import Gateway

EXAMPLES = Path(__file__).parents[2] / "examples"
CODE = "tango seven kilo"


def run(name: str, **env: str) -> str:
    """What an example prints. It has to end by itself, without an error."""
    program = ["bash"] if name.endswith(".sh") else [sys.executable]
    done = subprocess.run(
        [*program, str(EXAMPLES / name)],
        env=os.environ | env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    "name", ["openai_client.py", "langchain_chat.py", "llamaindex_chat.py", "curl.sh"]
)
def test_a_client_is_answered_and_told_what_was_kept(gateway: Gateway, name: str) -> None:
    printed = run(name, SGL_KVC_URL=gateway.url).replace('"', "'").replace("|", "")
    ways = 1 if name == "curl.sh" else 2  # whole, and streamed
    assert " ".join(printed.split()).count(CODE) == ways
    assert printed.count("'rate': 8.0" if ways == 2 else "'rate':8.0") == ways


def test_a_program_forks_and_is_told_what_each_branch_kept(gateway: Gateway) -> None:
    printed = run("sglang_program.py", SGL_KVC_URL=gateway.url)
    assert CODE in printed
    assert "delta two echo" in printed
    assert printed.count("'rate': 4.0") == 2


def test_an_engine_without_a_server() -> None:
    printed = run("offline_engine.py").replace("|", "")
    assert " ".join(printed.split()).count(CODE) == 7  # alone, a batch, a stream, a fork
    assert printed.count("'rate': 8.0") == 6
    assert printed.count("'policy': 'virtual-repeat'") == 2  # what the branches share


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.iterdir()} == {
        "openai_client.py", "langchain_chat.py", "llamaindex_chat.py", "curl.sh",
        "sglang_program.py", "offline_engine.py",
    }  # fmt: skip
