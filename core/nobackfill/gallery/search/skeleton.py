"""A graph without its vectors, as it lies on the disk and as it is carried to other vectors.

The vectors are read where the truth is, so that a file outlives what was deleted and holds none of
it. A vector that was replaced shows in a sum of its bits, 64 of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nobackfill.errors import VerificationError
from nobackfill.gallery.search import distances, graph_state, index_file
from nobackfill.gallery.search.graph_state import Links
from nobackfill.gallery.search.index import Content, Labels, Rows
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.vectors import Vectors

ENGINE = f"hnswlib {version('hnswlib')}, links"
# Vectors read at once.
_READ_ROWS = 512

Sums = NDArray[np.uint64]


@dataclass(frozen=True)
class Skeleton:
    """`rows`: of each element the row in `labels` (increasing) whose vector it held; -1: nobody's.
    `sums`: of each element's vector; None where they are not asked for. `ef`: with which it was
    found to find enough of these vectors; 0: nobody has told."""

    spec: SpaceSpec
    labels: Labels
    rows: Rows
    links: Links
    sums: Sums | None
    fresh: bool
    ef: int

    def write(self, path: Path) -> None:
        """Write a checked file; `sums` must be there. Raises CannotWriteError."""
        assert self.sums is not None, "a file shows what was replaced"
        arrays: index_file.Arrays = {
            "labels": self.labels, "rows": self.rows.astype(np.int64), "sums": self.sums,
            "ground": self.links.ground, "levels": self.links.levels, "upper": self.links.upper,
        }  # fmt: skip
        parameters = dict(self.links.parameters) | {"fresh": self.fresh, "ef": self.ef}
        index_file.write(path, self.spec, ENGINE, parameters, arrays)


def read(path: Path, spec: SpaceSpec) -> Skeleton:
    """Read a checked file. Raises VerificationError, NotFoundError."""
    file = index_file.read(path, spec, ENGINE)
    found, parameters = file.arrays, dict(file.parameters)
    fresh, ef = bool(parameters.pop("fresh")), int(parameters.pop("ef", 0))
    links = Links(parameters, found["ground"], found["levels"], found["upper"])
    graph_state.check(links)
    if not len(links) == len(found["rows"]) == len(found["sums"]):
        raise VerificationError(f"{path}: expected a row and a sum an element; build it anew")
    return Skeleton(spec, found["labels"], found["rows"], links, found["sums"], fresh, ef)


def sums_of(vectors: Content) -> Sums:
    """A sum of each row's bits [n]: another one for another vector, but for one in 2^64."""
    sums = np.zeros(len(vectors), np.uint64)
    for start in range(0, len(vectors), _READ_ROWS):
        piece = np.ascontiguousarray(vectors[start : start + _READ_ROWS]).view(np.uint32)
        # Of integers einsum takes half the time of @.
        np.einsum(
            "ij,j->i", piece.astype(np.uint64), _factors(piece.shape[1]),
            out=sums[start : start + len(piece)],
        )  # fmt: skip
    return sums


@cache
def _factors(dim: int) -> Sums:
    return 2 * np.random.default_rng(5).integers(1, 2**63, dim, np.uint64) + 1


def fleshed(
    skeleton: Skeleton,
    spec: SpaceSpec,
    labels: Labels,
    vectors: Content,
    between: Callable[[], None],
) -> tuple[Any, Rows]:
    """A graph of the skeleton's links over other vectors, and the row in `labels` (increasing) of
    each of its elements, -1 for those that nobody may find. Elements are named by their number.

    `vectors` [n, dim] are read once, in order; `between` is called after each piece.
    """
    rows = _moved(skeleton, labels)
    element = np.full(len(labels), -1, np.int64)
    element[rows[rows >= 0]] = np.flatnonzero(rows >= 0)
    sums = skeleton.sums if skeleton.spec.space == spec.space else None

    def fill(memory: Vectors) -> NDArray[np.bool_]:
        for start in range(0, len(labels), _READ_ROWS):
            there = np.flatnonzero(element[start : start + _READ_ROWS] >= 0)
            piece = distances.prepare(spec.metric, vectors[start : start + _READ_ROWS])[there]
            places = element[start + there]
            memory[places] = piece
            if sums is not None:
                # What was replaced is another's neighbour: it cannot stay where it is.
                rows[places[sums_of(piece) != sums[places]]] = -1
            between()
        dead: NDArray[np.bool_] = rows < 0
        return dead

    return graph_state.graph_of(skeleton.links, spec.dim, fill), rows


def _moved(skeleton: Skeleton, labels: Labels) -> Rows:
    """Row in `labels` of each element, -1 where it has none there."""
    if not len(labels):
        return np.full(len(skeleton.rows), -1, np.intp)
    there = np.minimum(np.searchsorted(labels, skeleton.labels), len(labels) - 1)
    there[labels[there] != skeleton.labels] = -1
    if len(skeleton.rows) and skeleton.rows.max() >= len(there):
        raise VerificationError("the index names rows it does not have; build it anew")
    # The last -1 is nobody's: where row -1 leads.
    moved: Rows = np.append(there, -1)[skeleton.rows]
    return moved
