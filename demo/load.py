"""A closed loop of clients: each sends its next request when the last is answered.

`Load` runs it in a process of its own, for the demo, the benchmarks and the soak. `python
demo/load.py` reads one JSON line a run: {"address", "method", "clients", "requests": a file of
`write_requests`, "seconds"}, and answers with one line, as Run. With "least" instead of "seconds"
it goes on until the next line, and not before so many calls. With "judged", answers are those of
Search and are looked at; without, messages stay bytes, so that every server meets the same cheap
client.
"""

import asyncio
import json
import struct
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc

from nobackfill.errors import NobackfillError
from nobackfill.v1 import search_pb2

SEARCH = "/nobackfill.v1.SearchService/Search"
# Before an address: requests are bodies to POST, `method` the path.
HTTP = "http://"
# Before a socket's path, `?` and its hnsw.ef_search: requests are messages to the statement of this
# name, `method` is its SQL.
POSTGRESQL, STATEMENT = "postgresql://", b"asked\0"
OK, WRONG = "OK", "WRONG: "
TIMEOUT = 60
_LENGTHS = struct.Struct("<II")
_OPTIONS = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]
# An item's distance to its own image or embedding.
_SELF = 1e-4


@dataclass(frozen=True)
class Answer:
    """One call."""

    start: float  # time.monotonic(), which all processes of a machine share
    seconds: float
    outcome: str  # OK, a status code with its details, or WRONG and what was wrong
    release: int  # that answered; 0 where none did, or nobody looked


@dataclass
class Run:
    """A closed loop's calls, a list a field of Answer, and the seconds that it took."""

    seconds: float = 0.0
    starts: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)
    releases: list[int] = field(default_factory=list)

    @property
    def answers(self) -> list[Answer]:
        """The calls in the order of their ends."""
        columns = self.starts, self.latencies, self.outcomes, self.releases
        return [Answer(*call) for call in zip(*columns, strict=True)]

    @property
    def failures(self) -> list[str]:
        """Outcomes of calls that were refused or answered wrongly."""
        return [outcome for outcome in self.outcomes if outcome != OK]


def write_requests(path: Path, requests: Sequence[bytes], nearest: Sequence[str] = ()) -> Path:
    """Messages for a run; `nearest`: the item that each must find first, where they are known."""
    names = [name.encode() for name in nearest] or [b""] * len(requests)
    pairs = zip(requests, names, strict=True)
    path.write_bytes(b"".join(_LENGTHS.pack(len(r), len(n)) + r + n for r, n in pairs))
    return path


def read_requests(path: Path) -> list[tuple[bytes, str]]:
    """What `write_requests` wrote."""
    content, start, requests = path.read_bytes(), 0, []
    while start < len(content):
        length, named = _LENGTHS.unpack_from(content, start)
        middle = start + _LENGTHS.size + length
        name = content[middle : middle + named].decode()
        requests.append((content[middle - length : middle], name))
        start = middle + named
    return requests


def judge(response: search_pb2.SearchResponse, nearest: str = "", k: int = 0) -> str:
    """OK, or what is wrong: hits there must be, nearest first, each once; where `nearest` is known,
    it first of all and `k` in number."""
    hits = response.hits
    if not hits:
        return f"{WRONG}no hits"
    distances = [hit.distance for hit in hits]
    if distances != sorted(distances):
        return f"{WRONG}not nearest first"
    if len({hit.id for hit in hits}) < len(hits):
        return f"{WRONG}an item twice"
    if nearest and len(hits) != k:
        return f"{WRONG}asked {k} items, got {len(hits)}"
    if nearest and (hits[0].id != nearest or distances[0] > _SELF):
        return f"{WRONG}asked {nearest}, got {hits[0].id} at {distances[0]}"
    return OK


class Load:
    """The generator in a process of its own."""

    def __init__(self) -> None:
        # -P: modules of this folder stand in nobody's way.
        command = [sys.executable, "-P", __file__]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> "Load":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        # Waits, and closes both pipes.
        self._process.communicate()

    def run(self, address: str, method: str, requests: Path, clients: int, seconds: float) -> Run:
        """One closed loop, to its end."""
        self._send(address, method, requests, clients, seconds=seconds)
        return Run(**json.loads(self._line()))

    def begin(
        self,
        address: str,
        method: str,
        requests: Path,
        clients: int,
        *,
        least: int = 0,
        judged: bool = False,
    ) -> None:
        """A closed loop that goes on until `end` and `least` calls; returns when every client has
        had an answer."""
        self._send(address, method, requests, clients, least=least, judged=judged)
        self._line()

    def end(self) -> Run:
        """End it; its calls."""
        self._write("")
        return Run(**json.loads(self._line()))

    def _send(
        self, address: str, method: str, requests: Path, clients: int, **more: float | bool
    ) -> None:
        task = {
            "address": address, "method": method, "requests": str(requests), "clients": clients,
        }  # fmt: skip
        self._write(json.dumps(task | more))

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise NobackfillError("the load generator ended; stderr says why")
        return line


Call = Callable[[bytes], Awaitable[bytes]]


async def _client(
    call: Call, requests: list[tuple[bytes, str]], first: int, until: Any, run: Run, judged: bool
) -> None:
    number = first
    while not until():
        request, nearest = requests[number % len(requests)]
        outcome, release = OK, 0
        started = time.monotonic()
        try:
            answer = await call(request)
        except grpc.RpcError as error:
            outcome = f"{error.code().name}: {error.details()}"
        ended = time.monotonic()
        if judged and outcome == OK:
            response = search_pb2.SearchResponse.FromString(answer)
            k = search_pb2.SearchRequest.FromString(request).k
            outcome, release = judge(response, nearest, k), response.release
        run.starts.append(started)
        run.latencies.append(ended - started)
        run.outcomes.append(outcome)
        run.releases.append(release)
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


async def _postgresql_call(stack: AsyncExitStack, address: str, sql: str) -> Call:
    """One connection of its own protocol, with one prepared statement."""
    path, _, ef = address.removeprefix(POSTGRESQL).partition("?")
    reader, writer = await asyncio.open_unix_connection(path)
    stack.callback(writer.close)
    options = f"-c hnsw.ef_search={ef}".encode()
    named = (b"user", b"postgres", b"database", b"postgres", b"options", options, b"")
    start = struct.pack(">i", 196_608) + b"\0".join(named) + b"\0"
    prepare = STATEMENT + sql.encode() + b"\0\0\0"

    async def call(request: bytes) -> bytes:
        writer.write(request)
        answer = await reader.readuntil(b"Z\0\0\0\5I")
        if answer.startswith(b"E"):
            raise RuntimeError(f"PostgreSQL: {answer!r}")
        return answer

    await call(struct.pack(">i", 4 + len(start)) + start)
    await call(b"P" + struct.pack(">i", 4 + len(prepare)) + prepare + b"S\0\0\0\4")
    return call


async def _run(task: dict[str, Any]) -> Run:
    requests = read_requests(Path(task["requests"]))
    ways = {HTTP: _http_call, POSTGRESQL: _postgresql_call}
    connect = ways.get(f"{task['address'].partition('://')[0]}://", _grpc_call)
    run = Run()
    async with AsyncExitStack() as stack:
        calls = [
            await connect(stack, task["address"], task["method"]) for _ in range(task["clients"])
        ]
        for call in calls:
            await call(requests[0][0])
        started = time.monotonic()
        until, judged = _until(task, started, run), task.get("judged", False)
        work = (_client(c, requests, 7 * n, until, run, judged) for n, c in enumerate(calls))
        await asyncio.gather(*work)
        run.seconds = time.monotonic() - started
    return run


def _until(task: dict[str, Any], started: float, run: Run) -> Callable[[], bool]:
    """Whether the run is over."""
    least = task.get("least")
    if least is not None:
        print("begun", flush=True)
        line = asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        return lambda: line.done() and len(run.latencies) >= least
    end = started + float(task["seconds"])
    return lambda: time.monotonic() >= end


def main() -> None:
    while line := sys.stdin.readline():
        print(json.dumps(asdict(asyncio.run(_run(json.loads(line))))), flush=True)


if __name__ == "__main__":
    main()
