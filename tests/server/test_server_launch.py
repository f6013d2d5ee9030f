"""Starting and ending servers: ports, readiness, what is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from kvc_server.launch import (
    LaunchFailed,
    Program,
    gateway,
    how_ended,
    launched,
    reserved_port,
    sglang,
    started,
)

SERVE = """
import http.server, signal, subprocess, sys
{before}
port = int(sys.argv[sys.argv.index("--port") + 1])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
print("listening", flush=True)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def program(before: str = "", **options: float) -> Program:
    """A server of a few lines that runs `before` first."""
    return Program(("-c", SERVE.format(before=before)), **options)


def gone(pid: int, within_s: float = 60) -> bool:
    """Whether a process ends, seen as a zombie or not at all."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def wait_for(text: str, log: Path) -> None:
    deadline = time.monotonic() + 120
    while text not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def test_a_reserved_port_is_for_the_server_that_is_started() -> None:
    with reserved_port() as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)):  # SO_REUSEADDR, as servers ask for
            socket.create_connection(("127.0.0.1", port)).close()


def test_command_lines() -> None:
    worker = sglang("m", "--page-size", "8").command(1234)
    assert worker[:3] == [sys.executable, "-m", "sglang.launch_server"]
    assert worker[worker.index("--port") + 1] == "1234"
    assert worker[-2:] == ["--page-size", "8"], "the user's arguments are last and win"
    served = gateway("--log-level", "info", "--", "--tp", "2").command(1234)
    assert served[2:6] == ["kvc_server.cli", "serve", "--port", "1234"]
    assert served[-3:] == ["--", "--tp", "2"]


def test_a_launched_server_serves_and_is_gone_afterwards(tmp_path: Path) -> None:
    tells = program("import os; print(os.environ['SPICE'])")
    with launched(tells, env={"SPICE": "mace"}) as server:
        with server.client() as client:
            assert client.get("/health").status_code == 200
        assert server.log_end().startswith("mace\nlistening")
        assert os.getpgid(server.process.pid) == server.process.pid
    assert server.process.returncode == -signal.SIGKILL
    assert not server.log.exists()
    with launched(program(), log=tmp_path / "log"):
        pass
    assert "listening" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("heeds", [True, False])
def test_a_server_is_asked_to_end_before_it_is_killed(heeds: bool, tmp_path: Path) -> None:
    ignore = "" if heeds else "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    with started(program(ignore, stop_s=1), log=tmp_path / "log") as server:
        wait_for("listening", server.log)
    assert server.process.returncode == (-signal.SIGTERM if heeds else -signal.SIGKILL)
    server.stop()  # again


def test_a_stopped_server_takes_its_children_along(tmp_path: Path) -> None:
    child = "print(subprocess.Popen(['sleep', '60']).pid, flush=True)"
    with started(program(child), log=tmp_path / "log") as server:
        wait_for("listening", server.log)
        pid = int(server.log.read_text().split()[0])
        assert psutil.pid_exists(pid)
    assert gone(pid)


def test_a_server_that_ends_tells_the_end_of_its_log() -> None:
    with pytest.raises(LaunchFailed) as caught, launched(program("sys.exit('no such model')")):
        pass
    message = str(caught.value)
    assert message.startswith("the server ended (exit code 1) before it was ready; its log is ")
    assert message.endswith("no such model")
    log = Path(message.split(" ends with:")[0].removesuffix(" and").rsplit(" ", 1)[-1])
    assert "no such model" in log.read_text(), "a temporary log stays to be looked into"
    log.unlink()


def test_a_server_that_is_never_ready_is_given_up(tmp_path: Path) -> None:
    never, log = program(ready="/never"), tmp_path / "log"
    with (
        pytest.raises(LaunchFailed, match=r"was not ready within 1 s.*(\n.*)*404"),
        launched(never, within_s=1, log=log),
    ):
        pass


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's business")
def test_a_server_dies_with_who_started_it(tmp_path: Path) -> None:
    """A killed `demo`, `eval` or bench must leave no server behind."""
    log = tmp_path / "log"
    script = (
        "import sys, time; from pathlib import Path\n"
        "from kvc_server.launch import Program, launched\n"
        f"with launched(Program(('-c', sys.argv[1])), log=Path({str(log)!r})) as server:\n"
        "    print(server.process.pid, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", script, SERVE.format(before="")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        server = int(owner.stdout.readline())
        owner.kill()
    assert gone(server)


def test_how_a_process_ended_in_words() -> None:
    assert [how_ended(code) for code in (0, 3, -9, -99)] == [
        "exit code 0", "exit code 3", "SIGKILL", "signal 99",
    ]  # fmt: skip
