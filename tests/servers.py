"""SGLang itself for the tests: a server with the engine's own checks on, and what to ask of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from kvc_server import launch
from kvc_server.generate import generate_body

from tests import fork_server

#: SGLang's own checks of its memory accounting, after every batch.
STRICT = ("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "SGLANG_CHECK_KV_PAGE_INVARIANTS")


class Engine(launch.Server):
    """A running SGLang server."""

    def generate(self, prompt: Any, knob: dict | None = None, **sampling: Any) -> dict:
        """The answer of ``/generate``, or the list of them for a list of prompts."""
        try:
            with self.client() as client:
                response = client.post("/generate", json=generate_body(prompt, knob, **sampling))
            response.raise_for_status()
        except httpx.HTTPError as error:
            told = f"{error!r}; the server's log ends with:\n{self.log_end()}"
            raise AssertionError(told) from None
        return response.json()


@contextlib.contextmanager
def sglang(
    model: Path | str, *arguments: str, backend: str = "kvc", **env: str
) -> Iterator[Engine]:
    """SGLang with an attention backend and its memory checks on, ready; killed afterwards."""
    program = launch.sglang(model, "--attention-backend", backend, *arguments)
    variables = dict.fromkeys(STRICT, "1") | env
    with launch.launched(program, env=variables, popen=fork_server.popen) as server:
        yield Engine(**vars(server))


def assert_no_leak(server: launch.Server, *, flush: bool = True) -> None:
    """After the server falls idle: everything is free or in the tree, nothing else.

    With `flush` the tree is emptied.
    """
    with server.client(timeout=120) as client:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if client.get("/get_load").json()[0]["num_reqs"] == 0:
                break
            time.sleep(0.2)
        if flush:
            flushed = client.post("/flush_cache", params={"timeout": 10})
            assert flushed.status_code == 200, flushed.text
    time.sleep(1.0)  # the idle check runs and would stop the server
    log = server.log.read_text()
    assert "leak detected" not in log.lower(), log[-3000:]
    assert server.process.poll() is None, log[-3000:]
