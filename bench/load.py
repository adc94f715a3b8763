"""A closed loop of clients in one process: each sends its next request when the last is answered.

`python bench/load.py` reads one JSON line a run from standard input: {"address", "method",
"clients", "seconds", "requests": a file of length-prefixed messages}; it answers with one line, as
Run. Messages are sent and received as bytes, so that every server meets the same cheap client. With
"until_told", a run ends at the next line instead.
"""

import asyncio
import json
import struct
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc

_LENGTH = struct.Struct("<I")
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


async def _client(call: Any, requests: list[bytes], first: int, until: Any, run: Run) -> None:
    number = first
    while not until():
        started = time.monotonic()
        try:
            await call(requests[number % len(requests)], timeout=TIMEOUT)
        except grpc.RpcError as error:
            run.failures.append(error.code().name)
        run.starts.append(started)
        run.latencies.append(time.monotonic() - started)
        number += 1


async def _run(task: dict[str, Any]) -> Run:
    requests = read_requests(Path(task["requests"]))
    run = Run(0.0, [], [], [])
    channels = [
        grpc.aio.insecure_channel(task["address"], options=_OPTIONS) for _ in range(task["clients"])
    ]
    calls: list[Any] = [channel.unary_unary(task["method"]) for channel in channels]
    for call in calls:
        await call(requests[0], timeout=TIMEOUT)
    started = time.monotonic()
    if task.get("until_told"):
        print("begun", flush=True)
        told = asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        until: Any = told.done
    else:
        end = started + task["seconds"]

        def until() -> bool:
            return bool(time.monotonic() >= end)

    work = (_client(call, requests, 7 * number, until, run) for number, call in enumerate(calls))
    await asyncio.gather(*work)
    run.seconds = time.monotonic() - started
    for channel in channels:
        await channel.close()
    return run


def main() -> None:
    while line := sys.stdin.readline():
        print(json.dumps(asdict(asyncio.run(_run(json.loads(line))))), flush=True)


if __name__ == "__main__":
    main()
