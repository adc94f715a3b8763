"""`python -m bench.walks`: count files that a request passes, and moves between them.

Each walk runs on real parts: a gateway and a device over three small releases, and the command
`nobackfill fit`. A profile hook records each call of a product function and each return, in all
threads, during one request.

- **Product files**: the Python files below core/, adopt/, server/, client/, plugins/ and
  training/.
- **Functions**: functions, methods, lambdas and generators. A generator's resume counts as a call,
  its yield as a return. Modules, class bodies and comprehensions are not counted.
- **Moves**: calls in another file than the call before them on the same thread. **Returns**: moves
  after a return, where the thread came back first.

Threads that work while nobody asks are left out: they look at galleries, connections and the
catalog. Plain stubs send the requests, so that no client code is counted. Each walk runs after a
request of its kind, ROUNDS times. The round with the fewest files and moves counts.
"""

import contextlib
import gc
import io
import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Annotated, Any

import structlog
import typer

from bench import record
from bench.harness import Table
from nobackfill.client.device import Device
from nobackfill.server.gateway import GatewayServer
from nobackfill.v1 import gallery_pb2, release_pb2, search_pb2, types_pb2
from nobackfill.wire.values import metadata_value_message
from tests.adopt.made import world, write_parquet
from tests.server.support import TIMEOUT_S, Client, Stubs, embedding, images, running
from tests.support import blocks, edge

ROOTS = ("core", "serving", "adopt", "server", "client", "plugins", "training")
# From Python 3.12 on these are part of the function around them.
_COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>"}
# A request has ended once no function was called for so long, or at the latest after so long.
_QUIET_S, _LONGEST_S = 0.2, 5.0
# Threads that look after the gateway look at it at least once in so long.
_IDLE_S = 1.6
# grpc's loop, where calls arrive: it works while nobody asks, too.
_LOOP = "(_serve)"
ROUNDS = 3
ITEMS = 40

Request = Callable[[], object]


@dataclass(frozen=True)
class CallEvent:
    """A call of a product function, or a return from one."""

    thread: int
    call: bool
    file: str
    function: CodeType


@dataclass(frozen=True)
class Walk:
    """One request. `files`: in order of first entry, each with its functions and the moves into it
    and out of it."""

    files: dict[str, tuple[int, int]]
    functions: int
    moves: int
    returns: int
    threads: int


class Profiler:
    """Records the calls of the thread that enters its `with` block, and of threads that start
    inside it."""

    def __init__(self, top: Path = record.ROOT) -> None:
        self._top = f"{top}{os.sep}"
        self._files: dict[CodeType, str | None] = {}
        self._events: list[CallEvent] = []
        self._recording = False
        # Names of threads that work while nobody asks.
        self._busy: set[str] = set()

    def __enter__(self) -> "Profiler":
        threading.setprofile(self._hook)
        sys.setprofile(self._hook)
        return self

    def __exit__(self, *_: object) -> None:
        threading.setprofile(None)
        sys.setprofile(None)

    def watch_idle(self, seconds: float = _IDLE_S) -> None:
        """Leave out, from now on, the threads that call product functions while nobody asks.

        They do so in both of two spans of these seconds: a thread that still ends a request works
        in the first one only.
        """
        spans = [self._recorded(partial(time.sleep, seconds)) for _ in range(2)]
        names = _thread_names()
        first, second = ({names.get(event.thread, "") for event in span} for span in spans)
        self._busy |= first & second

    def events(self, request: Request) -> list[CallEvent]:
        """Send a request and wait until it has ended in all threads."""

        def send() -> None:
            request()
            names, start = _thread_names(), 0
            latest = time.monotonic() + _LONGEST_S
            while time.monotonic() < latest and any(
                names.get(event.thread) not in self._busy for event in self._events[start:]
            ):
                start = len(self._events)
                time.sleep(_QUIET_S)

        events, names = self._recorded(send), _thread_names()
        left_out = {name for name in self._busy if not name.endswith(_LOOP)}
        return [event for event in events if names.get(event.thread) not in left_out]

    def _recorded(self, work: Request) -> list[CallEvent]:
        # A finalizer runs when it likes.
        gc.collect()
        gc.disable()
        self._events = []
        self._recording = True
        try:
            work()
        finally:
            self._recording = False
            gc.enable()
        return self._events

    def _hook(self, frame: FrameType, event: str, _: Any) -> None:
        if not self._recording or event not in {"call", "return"}:
            return
        code = frame.f_code
        if code not in self._files:
            self._files[code] = self._product_file(code)
        file = self._files[code]
        if file is not None:
            self._events.append(CallEvent(threading.get_ident(), event == "call", file, code))

    def _product_file(self, code: CodeType) -> str | None:
        """The file of a function, from the checkout on; None where it is not counted."""
        name = code.co_filename.removeprefix(self._top)
        if name == code.co_filename or name.partition(os.sep)[0] not in ROOTS:
            return None
        counted = code.co_flags & CO_OPTIMIZED and code.co_name not in _COMPREHENSIONS
        return name if counted else None


def _thread_names() -> dict[int, str]:
    return {thread.ident: thread.name for thread in threading.enumerate() if thread.ident}


def count_walk(events: Sequence[CallEvent]) -> Walk:
    """Count."""
    functions: dict[str, set[CodeType]] = {}
    moves: Counter[str] = Counter()
    total = returns = 0
    # By thread: the file of the last call, and whether a function has returned since.
    last: dict[int, str] = {}
    back: dict[int, bool] = {}
    for event in events:
        thread, file = event.thread, event.file
        if not event.call:
            back[thread] = True
            continue
        functions.setdefault(file, set()).add(event.function)
        before = last.get(thread, file)
        if before != file:
            total += 1
            returns += back[thread]
            moves.update((before, file))
        last[thread], back[thread] = file, False
    return Walk(
        {file: (len(inside), moves[file]) for file, inside in functions.items()},
        sum(map(len, functions.values())),
        total,
        returns,
        len(last),
    )


class Testbed:
    """Three small releases, and gateways and devices that follow them."""

    __test__ = False

    def __init__(self, folder: Path, closing: ExitStack, profiler: Profiler) -> None:
        self.folder = folder
        self.closing = closing
        self._profiler = profiler
        self._watched = False
        self.world = edge.World(folder / "world")

    def start_gateway(self, name: str) -> tuple[GatewayServer, Path]:
        """Start a gateway of release 1 with a gallery, and its publication; stop all others, whose
        loops would be counted."""
        self.closing.close()
        repo = self.folder / name / "repo"
        repo.parent.mkdir()
        self.world.publish(repo, 1)
        gateway = self.closing.enter_context(running(repo, repo.with_name("data")))
        self.fill_gallery(gateway, "first")
        if not self._watched:
            # Those of later gateways have the same names.
            self._profiler.watch_idle()
            self._watched = True
        return gateway, repo

    @cached_property
    def shared_gateway(self) -> tuple[GatewayServer, Path]:
        """The gateway of puts and searches."""
        return self.start_gateway("shared")

    def fill_gallery(self, gateway: GatewayServer, gallery: str) -> None:
        """Make a gallery of ITEMS images."""
        with Client(gateway.address) as client:
            client.create_when_idle(gallery)
            pictures = {f"i{n}": blocks.png(image) for n, image in enumerate(images(ITEMS))}
            errors = client.put(gallery, pictures, {name: {"colour": "red"} for name in pictures})
            assert not errors

    def open_stubs(self, gateway: GatewayServer) -> Stubs:
        stubs = Stubs(gateway.address, None)
        self.closing.callback(stubs.channel.close)
        return stubs


def put(testbed: Testbed) -> Iterator[Request]:
    """Put one image into a gallery."""
    gateway, _ = testbed.shared_gateway
    stubs = testbed.open_stubs(gateway)
    for number, image in enumerate(images(ROUNDS + 1, seed=1)):
        metadata = {"colour": metadata_value_message("red")}
        item = gallery_pb2.PutItem(id=f"n{number}", image=blocks.png(image), metadata=metadata)
        send = partial(stubs.put, [item], "first")
        if number:
            yield send
        else:
            send()


def search(testbed: Testbed, kind: str) -> Iterator[Request]:
    """Search galleries nobody has searched for this item: its hit has to be read on a thread."""
    gateway, repo = testbed.shared_gateway
    stubs, manifest = testbed.open_stubs(gateway), blocks.manifest(repo, 1)

    def request(gallery: str, number: int) -> Request:
        image = images(ITEMS)[number]
        query = search_pb2.Query(image=blocks.png(image))
        if kind == "embedding":
            vectors = search_pb2.Embeddings(embeddings=[embedding(manifest, image)])
            query = search_pb2.Query(embeddings=vectors)
        message = search_pb2.SearchRequest(gallery=gallery, query=query, k=1)
        if kind == "filter":
            red = types_pb2.Condition(key="colour", equals=metadata_value_message("red"))
            message.filter.conditions.append(red)
        return partial(stubs.searches.Search, message, timeout=TIMEOUT_S)

    for number in range(ROUNDS):
        gallery = f"{kind}-{number}"
        testbed.fill_gallery(gateway, gallery)
        request(gallery, 0)()
        yield request(gallery, 1)


def activate(testbed: Testbed) -> Iterator[Request]:
    """Activate release 3 on gateways that have gone from 1 to 2, to its flip."""
    for number in range(ROUNDS):
        gateway, repo = testbed.start_gateway(f"activate-{number}")
        testbed.world.publish(repo, 3)
        stubs = testbed.open_stubs(gateway)

        def to(release: int, stubs: Stubs = stubs) -> None:
            message = release_pb2.ActivateReleaseRequest(number=release)
            *_, last = stubs.releases.ActivateRelease(message, timeout=TIMEOUT_S)
            assert last.phase == release_pb2.PHASE_DONE, last

        to(2)
        yield partial(to, 3)


def sync(testbed: Testbed) -> Iterator[Request]:
    """Sync devices that have gone from release 1 to 2 to release 3."""
    testbed.closing.close()
    for number in range(ROUNDS):
        setting = testbed.world.setting(testbed.folder / f"sync-{number}")

        def to(release: int, setting: edge.Setting = setting) -> None:
            with Device(setting.gallery) as device:
                report = device.sync()
            assert (report.state, report.release) == ("upgraded", release)

        testbed.world.publish(setting.repo, 2)
        to(2)
        testbed.world.publish(setting.repo, 3)
        yield partial(to, 3)


def fit(testbed: Testbed) -> Iterator[Request]:
    """Judge the ways to go on with 400 items in two Parquet files."""
    from nobackfill.adopt.cli import app

    testbed.closing.close()
    made, folder = world(), testbed.folder / "fit"
    old = write_parquet(folder / "old.parquet", made.ids, made.old)
    new = write_parquet(folder / "new.parquet", made.ids, made.new)
    command = ["fit", "--old", str(old), "--new", str(new), "--out", str(folder / "map.npz")]

    def judge() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            app(command, standalone_mode=False)

    judge()
    for _ in range(ROUNDS):
        yield judge


# By name: the title, and what gives the requests to record.
WALKS: dict[str, tuple[str, Callable[[Testbed], Iterator[Request]]]] = {
    "put": ("put one image", put),
    "search-embedding": ("search by embedding", partial(search, kind="embedding")),
    "search-image": ("search by image", partial(search, kind="image")),
    "search-filter": ("search by image, filter", partial(search, kind="filter")),
    "activate": ("activation to flip", activate),
    "sync": ("device sync", sync),
    "fit": ("`nobackfill fit` to verdict", fit),
}


def measure_walks(names: Sequence[str]) -> dict[str, list[Walk]]:
    """Run walks, each ROUNDS times, in the order of WALKS."""
    with (
        tempfile.TemporaryDirectory(prefix="walks-") as folder,
        Profiler() as profiler,
        ExitStack() as closing,
    ):
        testbed = Testbed(Path(folder), closing, profiler)
        return {
            name: [count_walk(profiler.events(request)) for request in WALKS[name][1](testbed)]
            for name in WALKS
            if name in names
        }


def shortest_walk(rounds: Sequence[Walk]) -> Walk:
    """The round with the fewest files and moves."""
    return min(rounds, key=lambda walk: (len(walk.files), walk.moves))


def main(
    walks: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"Walks to count: {', '.join(WALKS)}. Without a walk, all are counted."
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="File to which all counts are also written as JSON; an existing one is replaced. "
            "Without it, only the table is printed.",
        ),
    ] = None,
    files: Annotated[
        str | None,
        typer.Option(
            metavar="WALK",
            help="Print the files of this walk in the order in which it enters them, in place of "
            "the table of counts. Without it, the counts are printed.",
        ),
    ] = None,
) -> None:
    """Count files, functions and moves of walks."""
    names = [files] if files else walks or list(WALKS)
    if unknown := [name for name in names if name not in WALKS]:
        raise typer.BadParameter(f"no walk {', '.join(unknown)}; known: {', '.join(WALKS)}")
    rounds = measure_walks(names)
    if json_file:
        json_file.write_text(json.dumps(_as_json(rounds), indent=1) + "\n", encoding="utf-8")
    table = _files_table(files, shortest_walk(rounds[files])) if files else _table(rounds)
    print(record.format_table(table))


def _table(rounds: dict[str, list[Walk]]) -> Table:
    walks = {name: shortest_walk(some) for name, some in rounds.items()}
    return Table(
        f"Walks at {record.describe_commit()}",
        [
            {
                "walk": WALKS[name][0],
                "files": len(walk.files),
                "functions": walk.functions,
                "moves": walk.moves,
                "returns": walk.returns,
                "threads": walk.threads,
            }
            for name, walk in walks.items()
        ],
    )


def _files_table(name: str, walk: Walk) -> Table:
    return Table(
        f"Files of {WALKS[name][0]} at {record.describe_commit()}",
        [
            {"entry": str(entry), "file": file, "functions": functions, "moves": moves}
            for entry, (file, (functions, moves)) in enumerate(walk.files.items(), 1)
        ],
    )


def _as_json(rounds: dict[str, list[Walk]]) -> dict[str, Any]:
    return {
        "commit": record.describe_commit(),
        "walks": {
            name: {
                "files": [
                    {"file": file, "functions": functions, "moves": moves}
                    for file, (functions, moves) in walk.files.items()
                ],
                "functions": walk.functions,
                "moves": walk.moves,
                "returns": walk.returns,
                "threads": walk.threads,
                "rounds": [one.moves for one in rounds[name]],
            }
            for name, walk in ((name, shortest_walk(some)) for name, some in rounds.items())
        },
    }


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    typer.run(main)
