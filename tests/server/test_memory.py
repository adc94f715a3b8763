"""What a gateway that swaps for days must not gather: room in malloc's arenas, and objects."""

import gc
import re
import subprocess
import sys
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.gallery.store import NewVectors
from nobackfill.server.galleries.hosted_file import HostedInFile
from nobackfill.server.gateway import GatewayServer
from nobackfill.server.process_limits import max_malloc_arenas
from tests.gallery.making import SIDE_DIM, ids, spec, vectors
from tests.server.conftest import Stages, publish_stage
from tests.server.process import serving
from tests.server.support import Client, images

_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ 0\s*\Z")
# What glibc reserves for an arena, beside the first, and where it begins.
_ARENA = 64 << 20
CALLERS = 24
SWAPS = ("cutover", "dual") * 4


def arenas(pid: int) -> int:
    """Arenas of a process: memory in use and memory reserved, one reservation together."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    found = [match.groups() for line in lines if (match := _MAPPING.match(line))]
    spans = [(int(begin, 16), int(end, 16), mode) for begin, end, mode in found]
    reserved = {begin: end for begin, end, mode in spans if mode == "---p"}
    begun = [end for begin, end, mode in spans if mode == "rw-p" and begin % _ARENA == 0]
    return 1 + sum(reserved.get(end) == -(-end // _ARENA) * _ARENA for end in begun)


def test_many_threads_share_few_arenas(repo: Path, tmp_path: Path) -> None:
    pictures = images(CALLERS)
    with serving(repo, tmp_path / "data", "--triton=in-process") as served:
        with Client(served.address) as client:
            client.create_gallery("g")
            client.put_images(pictures)

        def ask(number: int) -> None:
            with Client(served.address) as client:
                for _ in range(5):
                    client.find(pictures[number])

        with ThreadPoolExecutor(CALLERS) as callers:
            list(callers.map(ask, range(CALLERS)))
        threads = len([*Path(f"/proc/{served.process.pid}/task").iterdir()])
        assert threads > max_malloc_arenas()
        assert 1 < arenas(served.process.pid) <= max_malloc_arenas()


PIECES = """
import ctypes
from pathlib import Path
from nobackfill.server.process_limits import limit_malloc_arenas

{bound}
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
malloc = ctypes.CDLL(None)
malloc.malloc.restype, malloc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
malloc.free(malloc.malloc(30 << 20))
before, large = resident(), 2 << 20
pieces = [malloc.malloc(size) for _ in range(20) for size in (large, 100_000)][::2]
for piece in pieces:
    ctypes.memset(piece, 1, large)
for piece in pieces:
    malloc.free(piece)
print((resident() - before) >> 20)
"""


@pytest.mark.parametrize(
    ("bound", "least", "most"), [("limit_malloc_arenas()", 0, 9), ("", 30, 99)]
)
def test_large_pieces_leave_nothing_behind(bound: str, least: int, most: int) -> None:
    """Without the bound they do."""
    command = [sys.executable, "-c", PIECES.format(bound=bound)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert least <= int(done.stdout) <= most


# Loaded by every interpreter that finds it.
WITNESS = """\
import atexit, gc, os
def write():
    with open(f"{os.environ['WITNESSED']}/{os.getpid()}", "w") as file:
        file.write(str(gc.get_freeze_count()))
atexit.register(write)
"""


def test_what_is_there_at_the_start_is_not_gone_through_again(repo: Path, tmp_path: Path) -> None:
    (tmp_path / "witness").mkdir()
    (tmp_path / "witness" / "sitecustomize.py").write_text(WITNESS)
    hook = {"PYTHONPATH": str(tmp_path / "witness"), "WITNESSED": str(tmp_path / "witness")}
    with serving(repo, tmp_path / "data", "--triton=in-process", **hook) as served:
        assert served.stop() == 0
    # Modules, classes and functions: those of numpy and gRPC alone are more.
    assert int((tmp_path / "witness" / str(served.process.pid)).read_text()) > 20_000


def objects() -> Counter[str]:
    """Objects of our own classes that a garbage collection leaves."""
    gc.collect()
    kinds = Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects())
    return Counter({kind: n for kind, n in kinds.items() if kind.startswith("nobackfill.")})


@pytest.mark.long
def test_a_swap_leaves_no_object(
    stages: Stages, repo: Path, gateway: GatewayServer, client: Client
) -> None:
    client.create_gallery("g")
    client.put_images(images(40))
    publish_stage(repo, stages[2])

    def swap(rollout: str) -> None:
        client.swap(2, rollout)
        client.find(images(1)[0])
        client.rollback(confirm=True)

    swap("cutover")
    swap("dual")
    before = objects()
    for rollout in SWAPS:
        swap(rollout)
    # Fewer than one a swap: manifests that were read anew stand beside those of a plan for a while.
    assert {kind for kind, more in (objects() - before).items() if more >= len(SWAPS)} == set()


def test_a_gallery_that_was_there_at_the_start_goes_with_its_last_user(tmp_path: Path) -> None:
    """What a gateway freezes after its start is never collected."""
    store = SqliteGallery.create(tmp_path / "g.sqlite", spec())
    space = spec().space
    store.put(ids(20), [NewVectors(space, vectors(20, 1), vectors(20, 2, SIDE_DIM))])
    hosted = HostedInFile("g", tmp_path, store)
    gone = [weakref.ref(one) for one in (hosted, store, hosted.view(space))]
    gc.collect()
    gc.freeze()
    try:
        hosted.close()
        del hosted, store
        assert [ref() for ref in gone] == [None] * 3
    finally:
        gc.unfreeze()
