"""A closed loop of clients: each sends its next request when the last is answered.

`Load` runs it in a process of its own, for the demo, the benchmarks and the soak. `python
-m demo.load` reads one JSON line a run: {"address", "method", "clients", "requests": a file of
`write_requests`, "seconds"}, and answers with one line, as Run. With "least" instead of "seconds"
it goes on until the next line, and not before so many calls. With "judged", answers are those of
Search and are looked at; without, messages stay bytes, so that every server meets the same cheap
client. Several gateways, HOST:PORT,HOST:PORT, are asked as the public client asks them: what one
does not answer, the next is asked, within the same deadline.
"""

import asyncio
import json
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc

from demo.calls import Call, make_connector
from nobackfill.errors import NobackfillError
from nobackfill.v1 import search_pb2

ROOT = Path(__file__).parent.parent
SEARCH = "/nobackfill.v1.SearchService/Search"
OK, WRONG = "OK", "WRONG: "
_LENGTHS = struct.Struct("<II")
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


def judge_response(response: search_pb2.SearchResponse, nearest: str = "", k: int = 0) -> str:
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
        command = [sys.executable, "-m", "demo.load"]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
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
        except NobackfillError as error:
            outcome = f"{type(error).__name__}: {error}"
        ended = time.monotonic()
        if judged and outcome == OK:
            response = search_pb2.SearchResponse.FromString(answer)
            k = search_pb2.SearchRequest.FromString(request).k
            outcome, release = judge_response(response, nearest, k), response.release
        run.starts.append(started)
        run.latencies.append(ended - started)
        run.outcomes.append(outcome)
        run.releases.append(release)
        number += 1


async def _run(task: dict[str, Any]) -> Run:
    requests = read_requests(Path(task["requests"]))
    connect = make_connector(task["address"])
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
