"""Real SGLang servers for benchmarks and tests: start one, ask it, stop it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
from kvc_server.process import die_with_parent, reserved_port

START_TIMEOUT_S = 180
#: SGLang's own checks of its memory accounting, after every batch.
STRICT = ("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "SGLANG_CHECK_KV_PAGE_INVARIANTS")


@dataclasses.dataclass
class Server:
    """A running SGLang server."""

    process: subprocess.Popen
    url: str
    log: Path

    def client(self, timeout: float = 300) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=timeout)

    def async_client(self, timeout: float = 300) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(base_url=self.url, timeout=timeout, limits=limits)

    def generate(self, prompt: Any, knob: dict | None = None, **sampling: Any) -> dict:
        with self.client() as client:
            response = client.post("/generate", json=generate_body(prompt, knob, **sampling))
        response.raise_for_status()
        return response.json()


def generate_body(prompt: Any, knob: dict | None = None, **sampling: Any) -> dict:
    """A ``/generate`` body: `prompt` is text, token ids, or a list of either; greedy."""
    batch = isinstance(prompt, list) and isinstance(prompt[0], (str, list))
    single = prompt[0] if batch else prompt
    params = {"temperature": 0, "max_new_tokens": 16} | sampling
    if knob is not None:
        params["custom_params"] = {"kv_compression": knob}
    return {"text" if isinstance(single, str) else "input_ids": prompt, "sampling_params": params}


def popen(model: Path | str, port: int, log: Path, *args: str, **env: str) -> subprocess.Popen:
    """Launch SGLang on `port`, logging to `log`; does not wait."""
    command = [
        sys.executable, "-m", "sglang.launch_server", "--model-path", str(model),
        "--host", "127.0.0.1", "--port", str(port), *args,
    ]  # fmt: skip
    with log.open("w") as out:
        return subprocess.Popen(
            command,
            stdout=out,
            stderr=out,
            env=os.environ | env,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )


def sglang(
    model: Path | str, *args: str, backend: str = "kvc", **env: str
) -> AbstractContextManager[Server]:
    """`launched` with an attention backend, and SGLang's own memory checks on."""
    env = dict.fromkeys(STRICT, "1") | env
    return launched(model, "--attention-backend", backend, *args, **env)


@contextlib.contextmanager
def launched(model: Path | str, *args: str, **env: str) -> Iterator[Server]:
    """An SGLang server that is ready, killed on exit."""
    log = Path(tempfile.mkstemp(prefix="sglang-", suffix=".log")[1])
    with reserved_port() as port:
        process = popen(model, port, log, *args, **env)
        server = Server(process, f"http://127.0.0.1:{port}", log)
        try:
            wait_until_ready(server)
            yield server
        finally:
            kill(process)


def wait_until_ready(server: Server, path: str = "/health") -> None:
    """Wait until `path` says 200. Raises RuntimeError with the log's end when it cannot."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise RuntimeError(f"SGLang stopped while starting:\n{server.log.read_text()[-4000:]}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{server.url}{path}", timeout=5).status_code == 200:
                return
        time.sleep(0.3)
    raise TimeoutError(f"SGLang is not ready:\n{server.log.read_text()[-4000:]}")


def kill(process: subprocess.Popen) -> None:
    """Kill a server and everything it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def assert_no_leak(server: Server) -> None:
    """After the server falls idle: everything is free or in the tree, nothing else."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        load = httpx.get(f"{server.url}/get_load", timeout=10).json()[0]
        if load["num_reqs"] == 0:
            break
        time.sleep(0.2)
    flushed = httpx.post(f"{server.url}/flush_cache", params={"timeout": 10}, timeout=20)
    assert flushed.status_code == 200, flushed.text
    time.sleep(1.0)  # the idle check runs and would stop the server
    log = server.log.read_text()
    assert "leak detected" not in log.lower(), log[-3000:]
    assert server.process.poll() is None, log[-3000:]
