"""What the gateway adds to a stream: milliseconds a chunk, with many streams at once.

    python -m bench.gateway --rounds 5 --out bench/results/gateway.json

A worker that only streams (here, without a model), and 500 clients, first straight to it, then
through a gateway that is a process of its own, turn about. Every chunk carries the time at which it
was sent, and every client notes when it came. Compare the two ways of one round: what both have
(clients and worker share one event loop) falls out of the difference. Told are medians over the
chunks that were sent while all streams ran, the median time to a stream's first chunk, the
gateway's CPU time per chunk (with that of the streams' beginnings), and how many came whole;
and how long per chunk the gateway was ready to run while others had the cores (Linux tells).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import resource
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from kvc_server.launch import gateway, started

from bench.machine import describe

WAYS = ("straight", "gateway")
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
_FILES = 4096
_BEGINNINGS_PER_S = 200


class Streaming(asyncio.Protocol):
    """A worker whose answers are streams of `chunks` events, `interval` seconds apart.

    Each looks like one of SGLang's ``/generate``, and has the time of its sending in ``t``.
    """

    def __init__(self, chunks: int, interval: float):
        self._chunks, self._interval = chunks, interval
        self._asked = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._asked += data
        head, gap, body = self._asked.partition(b"\r\n\r\n")
        if not gap:
            return
        if head.startswith(b"GET "):  # a probe
            self._transport.write(_WHOLE)
            self._transport.close()
            return
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        if len(body) == length:
            self._transport.write(_HEAD)
            self._send(0)

    def _send(self, number: int) -> None:
        if self._transport.is_closing():
            return
        if number == self._chunks:
            self._transport.write(b"0\r\n\r\n")
            self._transport.close()
            return
        meta = {"id": "c0ffee", "prompt_tokens": 9, "completion_tokens": number + 1}
        event = {"text": "a word " * number, "n": number, "t": time.perf_counter(), "meta": meta}
        data = b"data: " + json.dumps(event).encode() + b"\n\n"
        self._transport.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        asyncio.get_running_loop().call_later(self._interval, self._send, number + 1)


class Client(asyncio.Protocol):
    """One stream's client.

    Attributes
    ----------
    came : of each event when it was sent, and when it came.
    numbers : the events' numbers, in order.
    asked : when the request was sent.
    over : done when the connection is closed.
    """

    def __init__(self) -> None:
        self.came: list[tuple[float, float]] = []
        self.asked = 0.0
        self.numbers: list[int] = []
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._text = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        body = json.dumps({"text": "a", "stream": True, "kv_compression": {"rate": 8}})
        lines = ("POST /generate HTTP/1.1", "Host: a", "Connection: close",
                 "Content-Type: application/json", f"Content-Length: {len(body)}")  # fmt: skip
        self.asked = time.perf_counter()
        transport.write("\r\n".join([*lines, "", body]).encode())

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        *lines, self._text = (self._text + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                self.came.append((event["t"], now))
                self.numbers.append(event["n"])

    def connection_lost(self, exc: Exception | None) -> None:
        self.over.set_result(None)


async def stream_all(port: int, streams: int) -> list[Client]:
    """So many clients of one server, which begin one after the other."""
    loop = asyncio.get_running_loop()
    clients = []
    for _ in range(streams):
        _, client = await loop.create_connection(Client, "127.0.0.1", port)
        clients.append(client)
        await asyncio.sleep(1 / _BEGINNINGS_PER_S)
    await asyncio.gather(*(client.over for client in clients))
    return clients


def round_of(clients: list[Client], chunks: int) -> dict[str, Any]:
    """Medians and losses of one way's clients."""
    begun = [client for client in clients if client.came]
    all_run = max(client.came[0][1] for client in begun)
    first_ends = min(client.came[-1][0] for client in begun)
    delays = sorted(
        1000 * (came - sent)
        for client in begun
        for sent, came in client.came
        if all_run <= sent <= first_ends
    ) or [math.inf]  # a stream had ended before the last one began
    firsts = [1000 * (client.came[0][1] - client.asked) for client in begun]
    return {
        "median_ms": round(statistics.median(delays), 3),
        "p99_ms": round(delays[int(0.99 * len(delays))], 3),
        "first_ms": round(statistics.median(firsts), 3),
        "chunks": len(delays),
        "whole": sum(client.numbers == list(range(chunks)) for client in clients),
    }


async def measure(
    streams: int, chunks: int, interval: float, rounds: int, until_ms: float | None = None
) -> list[dict[str, Any]]:
    """By way, of every round: see `round_of`; of the gateway also its CPU time per chunk.

    Parameters
    ----------
    until_ms : no more rounds once the gateway has added no more than so much in one.
    """
    loop = asyncio.get_running_loop()
    told = []
    async with await loop.create_server(
        lambda: Streaming(chunks, interval), "127.0.0.1", 0, backlog=1024
    ) as worker:
        port = worker.sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        with started(gateway("--worker-url", url)) as server, more_files():
            await asyncio.to_thread(server.wait_ready)
            process = psutil.Process(server.process.pid)
            ports = {"straight": port, "gateway": int(server.url.rpartition(":")[2])}
            for number in range(rounds):
                found: dict[str, Any] = {}
                for way in WAYS if number % 2 else reversed(WAYS):
                    before, waited = sum(process.cpu_times()[:2]), waited_s(process.pid)
                    clients = await stream_all(ports[way], streams)
                    found[way] = round_of(clients, chunks)
                    if way == "gateway":
                        used = sum(process.cpu_times()[:2]) - before
                        waited = waited_s(process.pid) - waited
                        for name, seconds in (("cpu", used), ("wait", waited)):
                            per_chunk = 1e6 * seconds / (streams * chunks)
                            found[way][f"{name}_us_per_chunk"] = round(per_chunk, 1)
                medians = [found[way]["median_ms"] for way in WAYS]
                found["added_ms"] = round(medians[1] - medians[0], 3)
                told.append(found)
                if until_ms is not None and found["added_ms"] <= until_ms:
                    break
    return told


def waited_s(pid: int) -> float:
    """Seconds for which a process could have run, and others had the cores; 0 if nobody tells."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


@contextmanager
def more_files() -> Iterator[None]:
    """Let this process open as many connections as are needed."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = before[1] if before[1] != resource.RLIM_INFINITY else _FILES
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], min(_FILES, most)), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--chunks", type=int, default=24, help="of each stream")
    parser.add_argument("--interval", type=float, default=0.5, help="seconds between two chunks")
    parser.add_argument("--out", type=Path, help="write the report as JSON")
    args = parser.parse_args()
    rounds = asyncio.run(measure(args.streams, args.chunks, args.interval, args.rounds))
    load = {name: getattr(args, name) for name in ("streams", "chunks", "interval")}
    command = f"python -m bench.gateway --rounds {args.rounds}"
    report = {"command": command, "machine": describe(), **load, "rounds": rounds}
    for found in rounds:
        print(found)
    added = [found["added_ms"] for found in rounds]
    print(f"added ms at the median: {statistics.median(added):.2f} ({min(added)} to {max(added)})")
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
