"""Mutated index files: refused before hnswlib sees a byte, or exactly what was written.

hnswlib itself crashes on a random page and answers wrongly on a flipped bit. All files are loaded
in one child process, so a crash shows as its death.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import hnswlib
import numpy as np
import pytest

from nobackfill.gallery.search import hnsw
from tests.gallery.making import DIM, spec, vectors

Mutation = Callable[[bytearray, np.random.Generator], bytes]
COUNT = 2500

CHILD = """
import sys
from pathlib import Path
import numpy as np
from nobackfill.gallery.search import hnsw
from nobackfill.errors import NotFoundError, VerificationError
from tests.gallery.making import spec, vectors
hnsw._GRAPH_QUERY = hnsw._GRAPH_CANDIDATE = 0
folder = Path(sys.argv[1])
queries = vectors(200, 3)
content = np.arange(2500) + 1, vectors(2500, 1)
truth = hnsw.load_index(folder / "good", spec(), *content)[0].search(queries, 10).labels
for path in sorted(folder.glob("mutated-*")):
    try:
        found = hnsw.load_index(path, spec(), *content)[0].search(queries, 10).labels
    except (VerificationError, NotFoundError):
        print(path.name, "refused", flush=True)
    else:
        print(path.name, "right" if np.array_equal(found, truth) else "WRONG", flush=True)
"""


def bit(content: bytearray, rng: np.random.Generator) -> bytes:
    content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
    return bytes(content)


def header_bit(content: bytearray, rng: np.random.Generator) -> bytes:
    content[rng.integers(1500)] ^= 1 << int(rng.integers(8))
    return bytes(content)


def zero_page(content: bytearray, rng: np.random.Generator) -> bytes:
    start = int(rng.integers(len(content) // 4096)) * 4096
    content[start : start + 4096] = bytes(4096)
    return bytes(content)


def random_page(content: bytearray, rng: np.random.Generator) -> bytes:
    start = int(rng.integers(len(content) // 4096)) * 4096
    content[start : start + 4096] = rng.bytes(4096)
    return bytes(content)


def truncated(content: bytearray, rng: np.random.Generator) -> bytes:
    return bytes(content[: rng.integers(len(content))])


def extended(content: bytearray, rng: np.random.Generator) -> bytes:
    return bytes(content) + rng.bytes(int(rng.integers(1, 9000)))


def shifted(content: bytearray, rng: np.random.Generator) -> bytes:
    start = int(rng.integers(1, 5000))
    return bytes(content[start:] + content[:start])


def empty(_: bytearray, rng: np.random.Generator) -> bytes:
    return rng.bytes(int(rng.integers(100)))


MUTATIONS: list[Mutation] = [
    bit, header_bit, zero_page, random_page, truncated, extended, shifted, empty,
]  # fmt: skip


def results(folder: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder)], capture_output=True, text=True
    )
    assert done.returncode == 0, f"the process died with {done.returncode}: {done.stderr[-2000:]}"
    return [line.split()[1] for line in done.stdout.splitlines()]


@pytest.mark.parametrize("count", [40, pytest.param(300, marks=pytest.mark.faults)])
def test_mutated_files_are_refused(count: int, tmp_path: Path) -> None:
    good = tmp_path / "good"
    hnsw.build_index(spec(), np.arange(COUNT) + 1, vectors(COUNT, 1)).save(good)
    content = good.read_bytes()
    rng = np.random.default_rng(7)
    for number in range(count):
        mutated = MUTATIONS[number % len(MUTATIONS)](bytearray(content), rng)
        (tmp_path / f"mutated-{number:03d}").write_bytes(mutated)
    found = results(tmp_path)
    assert len(found) == count and "WRONG" not in found
    # A page of zeros may be one already.
    assert found.count("refused") >= count - len(range(2, count, len(MUTATIONS)))
    print(f"{count} mutated index files: {found.count('refused')} refused, 0 crashes, 0 wrong")


def test_files_of_other_indexes_are_refused(tmp_path: Path) -> None:
    labels = np.arange(COUNT) + 1
    hnsw.build_index(spec(), labels, vectors(COUNT, 1)).save(tmp_path / "good")
    others = [
        (spec(2), vectors(COUNT, 1)),
        (spec(1, dim=DIM + 1), vectors(COUNT, 1, DIM + 1)),
        (spec(1, metric="cosine"), vectors(COUNT, 1)),
    ]
    for number, (other, content) in enumerate(others):
        hnsw.build_index(other, labels, content).save(tmp_path / f"mutated-{number}")
    # What hnswlib itself writes.
    theirs = hnswlib.Index("l2", DIM)
    theirs.init_index(COUNT)
    theirs.add_items(vectors(COUNT, 1), labels)
    theirs.save_index(str(tmp_path / "mutated-9"))
    assert results(tmp_path) == ["refused"] * 4
