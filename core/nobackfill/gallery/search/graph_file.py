"""A graph without its vectors, as it lies on the disk and as it is carried to other vectors.

The vectors are read where the truth is, so that a file outlives what was deleted and holds none of
it. A vector that was replaced shows in a sum of its bits, 64 of them.
"""

import contextlib
import hashlib
import json
import struct
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nobackfill import durable
from nobackfill.errors import NotFoundError, VerificationError
from nobackfill.gallery.search import index
from nobackfill.gallery.search.index import Content, Labels, Mask, Rows
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.vectors import Vectors

if TYPE_CHECKING:
    from nobackfill.gallery.search._native import Hnsw as Hnsw
else:
    try:
        from nobackfill.gallery.search._native import Hnsw
    except ImportError:
        from nobackfill.gallery.search.package_graph import PackageGraph as Hnsw

MAGIC = b"nobfidx1"
_FIXED = struct.Struct("<8s32sI")
_MAX_HEADER = 1 << 20

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class IndexFile:
    """What was read: the engine's own parameters, and its arrays (read-only)."""

    parameters: Mapping[str, Any]
    arrays: Arrays


def write_index(
    path: Path, spec: SpaceSpec, engine: str, parameters: Mapping[str, Any], arrays: Arrays
) -> None:
    """Put an index at `path`, wholly or not at all. `arrays` holds `labels` among others; `engine`
    names the library and version that understands the rest. One writer a path at a time: what a
    killed one left is removed. Raises CannotWriteError.
    """
    for stale in path.parent.glob(f"{durable.TEMPORARY}{path.name}-*"):
        durable.remove_tree(stale)
    labels = arrays["labels"]
    header = json.dumps(
        _identity(spec, engine)
        | {
            "count": len(labels),
            "last_label": int(labels[-1]) if len(labels) else 0,
            "parameters": dict(parameters),
            "arrays": [[name, a.dtype.str, list(a.shape)] for name, a in arrays.items()],
        }
    ).encode()
    # As they lie in memory: a copy as bytes is made while nobody else has the interpreter, .1 s
    # for a million rows.
    bodies = [np.ascontiguousarray(a).reshape(-1).view(np.uint8).data for a in arrays.values()]
    digest = hashlib.sha256(struct.pack("<I", len(header)) + header)
    for body in bodies:
        digest.update(body)
    temporary = path.parent / f"{durable.TEMPORARY}{path.name}-{uuid.uuid4().hex}"
    try:
        fixed = _FIXED.pack(MAGIC, digest.digest(), len(header))
        durable.append(temporary, fixed + header, mode=0o600)
        for body in bodies:
            durable.append(temporary, body)
        durable.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_index(path: Path, spec: SpaceSpec, engine: str) -> IndexFile:
    """Read and check an index of `spec`, written for `engine`.

    Raises NotFoundError; VerificationError for anything else than exactly what was written.
    """
    try:
        # One read, then checks and use of the same bytes: the file may change under us.
        content = np.frombuffer(path.read_bytes(), np.uint8)
    except FileNotFoundError as error:
        raise NotFoundError(f"{path}: no index file; build the index") from error
    except OSError as error:
        raise VerificationError(f"{path}: cannot be read ({error.strerror})") from error
    header, start = _header(path, content)
    expected = _identity(spec, engine)
    if differing := sorted(key for key in expected if header[key] != expected[key]):
        raise VerificationError(
            f"{path}: made for another {' and '.join(differing)}; build the index anew"
        )
    arrays = {}
    for name, dtype, shape in header["arrays"]:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        # Copied only where an engine would meet misaligned numbers.
        arrays[name] = np.require(
            content[start : start + size].view(dtype).reshape(shape), requirements=["A"]
        )
        start += size
    return IndexFile(header["parameters"], arrays)


def _identity(spec: SpaceSpec, engine: str) -> dict[str, Any]:
    return {"space": spec.space, "dim": spec.dim, "metric": spec.metric, "engine": engine}


def _header(path: Path, content: NDArray[np.uint8]) -> tuple[dict[str, Any], int]:
    """The header, and where the arrays begin, of a file whose digest is right."""
    damaged = VerificationError(f"{path}: not a whole index file; build the index anew")
    if len(content) < _FIXED.size:
        raise damaged
    magic, digest, length = _FIXED.unpack(content[: _FIXED.size].tobytes())
    # The digest covers the header's length, too.
    if magic != MAGIC or hashlib.sha256(content[_FIXED.size - 4 :].data).digest() != digest:
        raise damaged
    header: dict[str, Any] = {}
    with contextlib.suppress(ValueError):
        header = json.loads(content[_FIXED.size : _FIXED.size + length].tobytes())
    return header, _FIXED.size + length


# The links of an hnswlib graph without its vectors, and a graph made of them over other vectors.
#
# Elements are numbered as they came; in a graph that is made here an element's number is its label,
# too. hnswlib 0.8 keeps one record an element: links of the ground level (their count in 2 bytes, a
# delete mark in the third), the vector, and an 8-byte label.

Bytes = NDArray[np.uint8]

_LABEL_BYTES = 8
# Lists of links that are looked at together.
_LISTS = 1 << 16


@dataclass(frozen=True)
class Layout:
    """Bytes of a record: links up to `vector`, the vector up to `label`, a label up to `size`."""

    vector: int
    label: int
    size: int
    upper: int

    @classmethod
    def of(cls, dim: int, m: int) -> "Layout":
        """Give hnswlib's for this dimension and M. `upper`: bytes of a list of links above."""
        vector = 4 + 4 * 2 * m
        return cls(vector, vector + 4 * dim, vector + 4 * dim + _LABEL_BYTES, 4 + 4 * m)


@dataclass(frozen=True)
class Links:
    """`parameters`: what the state calls so. Of each element: `ground`, its links on the ground
    level, uint8 [count, bytes]; `levels`, how many there are above, int32 [count]; `upper`, the
    links there, one element after another."""

    parameters: Mapping[str, Any]
    ground: Bytes
    levels: NDArray[np.int32]
    upper: NDArray[np.int8]

    def __len__(self) -> int:
        return len(self.ground)


def check_links(links: Links) -> None:
    """Raises VerificationError where a walk along them would leave the graph's memory: neither
    hnswlib nor `native/` looks as it walks."""
    m, count, levels = links.parameters["M"], len(links), links.levels
    top, entry = links.parameters["max_level"], links.parameters["enterpoint_node"]
    upper = Layout.of(1, m).upper
    sound = (
        links.ground.shape == (count, Layout.of(1, m).vector)
        and levels.shape == (count,)
        and (levels >= 0).all()
        and links.upper.size == upper * int(levels.sum(dtype=np.int64))
        and (not count or (0 <= entry < count and 0 <= top <= levels[entry]))
    )
    if sound:
        above = links.upper.view(np.uint8).reshape(-1, upper)
        firsts = np.cumsum(levels, dtype=np.int64) - levels
        at = 1 + np.arange(len(above)) - np.repeat(firsts, levels)
        sound = _lead(links.ground, np.zeros(count, np.int64), levels) and _lead(above, at, levels)
    if not sound:
        raise VerificationError("the index leads out of its own graph; build it anew")


def _lead(lists: Bytes, at: NDArray[np.int64], levels: NDArray[np.int32]) -> bool:
    """Whether every list, one of the level `at`, leads to elements that have that level."""
    for start in range(0, len(lists), _LISTS):
        piece, level = lists[start : start + _LISTS], at[start : start + _LISTS, None]
        links, lengths = piece[:, 4:].view(np.uint32), piece[:, :2].view(np.uint16)
        there = links < len(levels)
        if level.any():
            # On the ground everybody is.
            there &= levels[np.minimum(links, len(levels) - 1)] >= level
        there |= np.arange(links.shape[1]) >= lengths
        if (lengths > links.shape[1]).any() or not there.all():
            return False
    return True


def links_of(graph: Hnsw) -> Links:
    """Copy the links of a graph, which nobody changes meanwhile."""
    parameters = {
        "space": graph.space, "M": graph.m, "ef_construction": graph.ef_construction,
        "max_level": graph.max_level, "enterpoint_node": graph.entry, "mult": graph.mult,
    }  # fmt: skip
    ground = graph.records[:, : Layout.of(graph.dim, graph.m).vector].copy()
    return Links(parameters, ground, graph.levels, graph.upper)


def names_of(graph: Hnsw) -> Labels:
    """The graph's label of each element, int64 [count]."""
    part = np.ascontiguousarray(graph.records[:, -_LABEL_BYTES:])
    return part.view(np.int64)[:, 0]


def vectors_of(graph: Hnsw) -> Vectors:
    """The vector of each element, float32 [count, dim]: the graph's own memory, which holds until
    it is resized. A graph of the package hnswlib gives a copy."""
    layout = Layout.of(graph.dim, graph.m)
    return graph.records[:, layout.vector : layout.label].view(np.float32)


def graph_of(links: Links, dim: int, fill: Callable[[Vectors], Mask]) -> Hnsw:
    """Make a graph with these links. `fill` writes the vectors, float32 [count, dim], and says
    which of them nobody may find, bool [count]: those are passed through, at a place between the
    elements they lead to, and what they held is forgotten."""
    told = links.parameters
    graph = Hnsw.of_links(
        told["space"], dim, told["M"], told["ef_construction"], told["max_level"],
        told["enterpoint_node"], links.ground, links.levels, links.upper,
    )  # fmt: skip
    vectors = vectors_of(graph)
    dead = fill(vectors)
    _make_up(links.ground, vectors, dead)
    graph.mark(dead)
    return graph


def _make_up(ground: Bytes, vectors: Vectors, dead: Mask) -> None:
    """The mean of the living that a dead element leads to."""
    links = ground[:, 4:].view(np.uint32)
    counts = ground[:, :2].view(np.uint16)[:, 0]
    for element in np.flatnonzero(dead).tolist():
        near = links[element, : counts[element]]
        living = near[~dead[near]]
        vectors[element] = vectors[living].mean(axis=0) if len(living) else 0


# The version of the headers in native/hnswlib. Other versions of the package read the same links.
VERSION = "0.8.0"
ENGINE = f"hnswlib {VERSION}, links"
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
        arrays: Arrays = {
            "labels": self.labels, "rows": self.rows.astype(np.int64), "sums": self.sums,
            "ground": self.links.ground, "levels": self.links.levels, "upper": self.links.upper,
        }  # fmt: skip
        parameters = dict(self.links.parameters) | {"fresh": self.fresh, "ef": self.ef}
        write_index(path, self.spec, ENGINE, parameters, arrays)


def read_skeleton(path: Path, spec: SpaceSpec) -> Skeleton:
    """Read a checked file. Raises VerificationError, NotFoundError."""
    file = read_index(path, spec, ENGINE)
    found, parameters = file.arrays, dict(file.parameters)
    fresh, ef = bool(parameters.pop("fresh")), int(parameters.pop("ef", 0))
    links = Links(parameters, found["ground"], found["levels"], found["upper"])
    check_links(links)
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
) -> tuple[Hnsw, Rows]:
    """A graph of the skeleton's links over other vectors, and the row in `labels` (increasing) of
    each of its elements, -1 for those that nobody may find. Elements are named by their number.

    `vectors` [n, dim] are read once, in order; `between` is called after each piece.
    """
    rows = _moved(skeleton, labels)
    element = np.full(len(labels), -1, np.int64)
    element[rows[rows >= 0]] = np.flatnonzero(rows >= 0)
    sums = skeleton.sums if skeleton.spec.space == spec.space else None

    def fill(memory: Vectors) -> Mask:
        for start in range(0, len(labels), _READ_ROWS):
            there = np.flatnonzero(element[start : start + _READ_ROWS] >= 0)
            piece = index.prepare(spec.metric, vectors[start : start + _READ_ROWS])[there]
            places = element[start + there]
            memory[places] = piece
            if sums is not None:
                # What was replaced is another's neighbour: it cannot stay where it is.
                rows[places[sums_of(piece) != sums[places]]] = -1
            between()
        dead: Mask = rows < 0
        return dead

    return graph_of(skeleton.links, spec.dim, fill), rows


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
