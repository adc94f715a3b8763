"""`bench.walks`: its counts are those of calls written down by hand, and it runs on a gateway."""

import importlib
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from bench import walks
from bench.record import ROOT
from bench.walks import Profiler, Walk, count_walk

# One request: the calls and returns of `run`, in order, are written down in the test below.
FILES = {
    "core/front.py": """
import sys
import threading
import one_inner, outside

class Door:
    enter = lambda self, value: one_inner.twice(value)

def run():
    Door().enter(2)
    squares = [one_inner.plain(value) for value in (1, 2)]
    outside.call(one_inner.plain)
    total = sum(one_inner.each(2))
    return squares, total

def helper(value):
    return value + 1
""",
    "server/one_inner.py": """
def twice(value):
    import front
    return front.helper(value) * 2

def plain(value=0):
    return value

def each(count):
    yield from range(count)
""",
    # No product file.
    "tests/outside.py": """
def call(function):
    return function()
""",
}


@pytest.fixture
def front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The toy product of FILES."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
        monkeypatch.syspath_prepend(tmp_path / Path(name).parent)
    yield importlib.import_module("front")
    for name in ("front", "one_inner", "outside"):
        sys.modules.pop(name, None)


FRONT, INNER = "core/front.py", "server/one_inner.py"


def test_counts_are_those_of_calls_written_down_by_hand(front: ModuleType, tmp_path: Path) -> None:
    # run and the lambda (front), twice (inner, move 1), helper (front, move 2); all return; plain
    # twice (inner, move 3, a return), plain through what is no product, each and its resumes.
    with Profiler(tmp_path) as profiler:
        walk = count_walk(profiler.events(front.run))
    assert walk == Walk(
        files={FRONT: (3, 3), INNER: (3, 3)}, functions=6, moves=3, returns=1, threads=1
    )
    assert list(walk.files) == [FRONT, INNER]


def test_a_thread_counts_by_itself(front: ModuleType, tmp_path: Path) -> None:
    def request() -> None:
        front.helper(1)
        thread = threading.Thread(target=front.one_inner.plain)
        thread.start()
        thread.join()
        front.helper(1)

    with Profiler(tmp_path) as profiler:
        walk = count_walk(profiler.events(request))
    assert walk == Walk(
        files={FRONT: (1, 0), INNER: (1, 0)}, functions=2, moves=0, returns=0, threads=2
    )


@pytest.mark.slow
def test_threads_that_work_while_nobody_asks_are_left_out(
    front: ModuleType, tmp_path: Path
) -> None:
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(0.001):
            front.one_inner.plain()

    with Profiler(tmp_path) as profiler:
        keeper = threading.Thread(target=look, name="keeper")
        keeper.start()
        try:
            profiler.watch_idle(0.1)
            walk = count_walk(profiler.events(lambda: (stop.wait(0.1), front.helper(1))))
        finally:
            stop.set()
            keeper.join()
    assert list(walk.files) == [FRONT]


@pytest.mark.long
def test_a_gateway_is_walked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = tmp_path / "walks.json"
    walks.main(["put"], json_file=counts)
    put = json.loads(counts.read_text())["walks"]["put"]
    files = [row["file"] for row in put["files"]]
    assert all((ROOT / file).is_file() for file in files)
    assert files[0].startswith("server/")
    # Who looks at galleries twice a second is no part of it; who writes the row is.
    assert "server/nobackfill/server/galleries/indexing.py" not in files
    assert "core/nobackfill/gallery/store.py" in files
    assert max(put["rounds"]) - min(put["rounds"]) <= put["moves"] // 10
    printed = capsys.readouterr().out
    assert f"| put one image | {len(files):<5} | {put['functions']:<9} |" in printed
