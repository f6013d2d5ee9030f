"""The operating system's side of starting servers."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
from kvc_server.process import reserved_port, terminate


def test_a_reserved_port_is_for_the_server_that_is_started():
    with reserved_port() as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)):  # SO_REUSEADDR, as servers ask for
            socket.create_connection(("127.0.0.1", port)).close()


@pytest.mark.parametrize("heeds", [True, False])
def test_terminate(heeds):
    ignore = "" if heeds else "signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    script = f"import signal, time; {ignore} print(flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    process.stdout.readline()
    terminate(process, 1)
    assert process.returncode == (-15 if heeds else -9)
    process.stdout.close()
