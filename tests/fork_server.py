"""Servers forked from a process that has imported SGLang already.

A start of SGLang costs some 40 s of CPU time, nearly all of it three processes that each import
it. Here one process imports it, and

* a server is forked from that one and runs what its command line says;
* what the server spawns (`multiprocessing`: scheduler, detokenizer) is forked from a copy of it
  as it was then, so that nothing the server has done since is inherited, and becomes a child of
  the server, as if it had been spawned.

SGLang's and our own code run unmodified, and what the gateway starts is never forked.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import importlib
import os
import pickle
import random
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import util
from typing import Any

import torch
from kvc_server.launch import die_with_parent

_IMPORTED = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",
)
#: Beginnings of environment variables that libraries read when they are imported.
_READ_BY_IMPORTS = ("OMP_", "GOMP_", "TRITON_")
_PR_SET_CHILD_SUBREAPER = 36
_MESSAGE_BYTES = 1 << 20
_DESCRIPTORS = 64  # most that are passed with a request
_OUT_OF_THE_WAY = 1000  # descriptors from here on are nobody's
_POLL_S = 0.02


class Forked:
    """The part of `subprocess.Popen` that servers need, of a process of the fork server."""

    def __init__(self, pid: int, poll: Callable[[int], int | None]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._poll = poll

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._poll(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its return code. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(_POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def popen(
    command: Sequence[str], *, stdout: Any, env: dict[str, str], **others: Any
) -> Forked | subprocess.Popen:
    """As `subprocess.Popen` of a Python `command`; both its outputs go to `stdout`.

    Nothing is forked that reads other variables when it imports than we have, nor where there is
    a GPU, whose driver does not survive it.
    """
    read = {name for name in env | os.environ if name.startswith(_READ_BY_IMPORTS)}
    if torch.cuda.is_available() or any(env.get(name) != os.environ.get(name) for name in read):
        return subprocess.Popen(command, stdout=stdout, env=env, **others)
    server = _fork_server()
    out = stdout if isinstance(stdout, int) else stdout.fileno()
    pid = _ask(server, ("fork", list(command[1:]), env, [1, 2]), [out, out])
    return Forked(pid, lambda pid: _ask(server, ("poll", pid)))


@functools.cache
def _fork_server() -> socket.socket:
    """The socket of this process's fork server, which ends with us."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tests.fork_server", str(its.fileno())]
    one_thread = {"OMP_NUM_THREADS": "1"}  # as the platform asks for with small models
    subprocess.Popen(
        command, pass_fds=[its.fileno()], preexec_fn=die_with_parent(), env=one_thread | os.environ
    )
    its.close()
    return ours


def _ask(server: socket.socket, request: tuple, descriptors: Sequence[int] = ()) -> Any:
    socket.send_fds(server, [pickle.dumps(request)], descriptors)
    answer = server.recv(_MESSAGE_BYTES)
    if not answer:
        raise ChildProcessError("the fork server ended")
    return pickle.loads(answer)


def _serve(connection: socket.socket, fork: Callable[[], int]) -> tuple[list[str], dict, dict]:
    """Answer until a request is to be run by this process, which `fork` made.

    Returns the arguments of the Python interpreter, its environment, and which of our
    descriptors become which of its own.
    """
    while True:
        message, received, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, _DESCRIPTORS)
        if not message:
            os._exit(0)
        kind, *values = pickle.loads(message)
        if kind == "poll":
            answer = _poll(*values)
        else:
            arguments, environment, wanted = values
            answer = fork()
            if answer == 0:
                connection.close()
                return arguments, environment, dict(zip(received, wanted, strict=True))
            for descriptor in received:
                os.close(descriptor)
        connection.send(pickle.dumps(answer))


def _poll(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _fork_a_server() -> int:
    """Fork a process that leads a session of its own and ends with us."""
    end_with_us = die_with_parent()
    pid = os.fork()
    if pid == 0:
        if end_with_us is not None:
            end_with_us()
        os.setsid()
    return pid


def _fork_a_sibling() -> int:
    """Fork a process that becomes a child of the subreaper whose child we are."""
    read, write = os.pipe()
    between = os.fork()
    if between == 0:
        between = os.getpid()
        pid = os.fork()
        if pid:
            os.write(write, pid.to_bytes(4, "little"))
            os._exit(0)
        while os.getppid() == between:
            time.sleep(0.001)
        pid = 0
    else:
        os.waitpid(between, 0)
        pid = int.from_bytes(os.read(read, 4), "little")
    os.close(read)
    os.close(write)
    return pid


def _take(environment: dict[str, str], descriptors: dict[int, int]) -> None:
    """Make these our environment and our descriptors (received: the number it is to have)."""
    wanted = {}
    for received, number in descriptors.items():
        wanted[fcntl.fcntl(received, fcntl.F_DUPFD, _OUT_OF_THE_WAY)] = number
        os.close(received)
    for received, number in wanted.items():
        os.dup2(received, number)
        os.close(received)
    os.environ.clear()
    os.environ.update(environment)
    random.seed()


def _interpret(arguments: list[str]) -> None:
    """Do what a Python interpreter with these arguments does once it has started."""
    if "-m" in arguments:
        at = arguments.index("-m") + 1
        sys.argv = arguments[at:]
        runpy.run_module(arguments[at], run_name="__main__", alter_sys=True)
    else:
        at = arguments.index("-c") + 1
        sys.argv = ["-c", *arguments[at + 1 :]]
        exec(arguments[at], {"__name__": "__main__"})


def _spawn_by_forking() -> None:
    """Have what `multiprocessing` spawns from here on forked from a copy of this process."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end_with_us = die_with_parent()
    if os.fork() == 0:
        if end_with_us is not None:
            end_with_us()
        ours.close()
        arguments, *state = _serve(its, _fork_a_sibling)
        _take(*state)
        _interpret(arguments)
        sys.exit()
    its.close()
    spawn = util.spawnv_passfds

    def spawnv_passfds(path, args, passfds):
        if "--multiprocessing-fork" not in args:
            return spawn(path, args, passfds)
        return _ask(ours, ("fork", args[1:], dict(os.environ), list(passfds)), passfds)

    util.spawnv_passfds = spawnv_passfds


def main() -> None:
    for module in _IMPORTED:
        importlib.import_module(module)
    connection = socket.socket(fileno=int(sys.argv[1]))
    arguments, *state = _serve(connection, _fork_a_server)
    _take(*state)
    _spawn_by_forking()
    _interpret(arguments)


if __name__ == "__main__":
    main()
