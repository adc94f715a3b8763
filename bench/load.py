"""A closed loop of clients in one process: each sends its next request when the last is answered.

`python bench/load.py` reads one JSON line a run from standard input: {"address", "method",
"clients", "seconds", "requests": a file of length-prefixed messages}; it answers with one line, as
Run. Messages are sent and received as bytes, so that every server meets the same cheap client. With
"until_told", a run ends at the next line instead, and not before so many requests.
"""

import asyncio
import json
import struct
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc

_LENGTH = struct.Struct("<I")
# Before an address: requests are bodies to POST, `method` the path.
HTTP = "http://"
_OPTIONS = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]
TIMEOUT = 30


@dataclass
class Run:
    """`starts` on the clock that processes of a machine share, `latencies` of the same calls, both
    in seconds; `failures`: status codes of those that were refused."""

    seconds: float
    starts: list[float]
    latencies: list[float]
    failures: list[str]


def write_requests(path: Path, requests: list[bytes]) -> Path:
    """Length-prefixed messages, for a run."""
    path.write_bytes(b"".join(_LENGTH.pack(len(r)) + r for r in requests))
    return path


def read_requests(path: Path) -> list[bytes]:
    """What `write_requests` wrote."""
    content, start, requests = path.read_bytes(), 0, []
    while start < len(content):
        (length,) = _LENGTH.unpack_from(content, start)
        start += _LENGTH.size + length
        requests.append(content[start - length : start])
    return requests


Call = Callable[[bytes], Awaitable[object]]


async def _client(call: Call, requests: list[bytes], first: int, until: Any, run: Run) -> None:
    number = first
    while not until():
        started = time.monotonic()
        try:
            await call(requests[number % len(requests)])
        except grpc.RpcError as error:
            run.failures.append(error.code().name)
        run.starts.append(started)
        run.latencies.append(time.monotonic() - started)
        number += 1


async def _grpc_call(stack: AsyncExitStack, address: str, method: str) -> Call:
    channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, options=_OPTIONS))
    call: Any = channel.unary_unary(method)
    return lambda request: call(request, timeout=TIMEOUT)


async def _http_call(stack: AsyncExitStack, address: str, path: str) -> Call:
    """One kept-alive connection, and no more of HTTP than it takes."""
    host, port = address.removeprefix(HTTP).split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    stack.callback(writer.close)
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"

    async def call(request: bytes) -> bytes:
        writer.write(f"{head}content-length: {len(request)}\r\n\r\n".encode() + request)
        answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(answer.partition("content-length:")[2].partition("\r\n")[0])
        body = await reader.readexactly(length)
        if not answer.startswith("http/1.1 200"):
            raise RuntimeError(f"{answer}{body!r}")
        return body

    return call


async def _run(task: dict[str, Any]) -> Run:
    requests = read_requests(Path(task["requests"]))
    connect = _http_call if task["address"].startswith(HTTP) else _grpc_call
    run = Run(0.0, [], [], [])
    async with AsyncExitStack() as stack:
        calls = [
            await connect(stack, task["address"], task["method"]) for _ in range(task["clients"])
        ]
        for call in calls:
            await call(requests[0])
        started = time.monotonic()
        until = _until(task, started, run)
        work = (_client(c, requests, 7 * number, until, run) for number, c in enumerate(calls))
        await asyncio.gather(*work)
        run.seconds = time.monotonic() - started
    return run


def _until(task: dict[str, Any], started: float, run: Run) -> Callable[[], bool]:
    """Whether the run is over."""
    least = task.get("until_told")
    if least is not None:
        print("begun", flush=True)
        told = asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        return lambda: told.done() and len(run.latencies) >= least
    end = started + float(task["seconds"])
    return lambda: time.monotonic() >= end


def main() -> None:
    while line := sys.stdin.readline():
        print(json.dumps(asdict(asyncio.run(_run(json.loads(line))))), flush=True)


if __name__ == "__main__":
    main()
