"""Store a graph without its vectors in a file, and rebuild it over other vectors.

The vectors are read from the gallery, so that the file need not change on deletion and contains no
deleted vector. A replaced vector is noticed by a 64-bit sum of its bits.
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

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class IndexFile:
    """The content of an index file: parameters of the engine, and read-only arrays."""

    parameters: Mapping[str, Any]
    arrays: Arrays


def write_index(
    path: Path, spec: SpaceSpec, engine: str, parameters: Mapping[str, Any], arrays: Arrays
) -> None:
    """Write an index file atomically.

    A kill leaves the earlier file, and perhaps a temporary one, which the next call removes. Only
    one process may write a path at a time: temporary files of others are removed.

    Args:
        path: The file, in an existing folder; it gets mode 0600.
        spec: The space.
        engine: Library and version that understands the arrays.
        parameters: Parameters of the engine, as JSON can hold them.
        arrays: `labels`, int64 [n], and the engine's arrays, of any shape.

    Raises:
        CannotWriteError: The file cannot be written; an earlier file stays.
        KeyError: `arrays` has no `labels`.
        TypeError: A parameter cannot be written as JSON.
    """
    for stale in path.parent.glob(f"{durable.TEMPORARY_PREFIX}{path.name}-*"):
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
    # Without copies: copying to bytes would block the interpreter, .1 s for a million rows.
    bodies = [np.ascontiguousarray(a).reshape(-1).view(np.uint8).data for a in arrays.values()]
    digest = hashlib.sha256(struct.pack("<I", len(header)) + header)
    for body in bodies:
        digest.update(body)
    temporary = path.parent / f"{durable.TEMPORARY_PREFIX}{path.name}-{uuid.uuid4().hex}"
    try:
        fixed = _FIXED.pack(MAGIC, digest.digest(), len(header))
        durable.append_bytes(temporary, fixed + header, mode=0o600)
        for body in bodies:
            durable.append_bytes(temporary, body)
        durable.replace_file(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_index(path: Path, spec: SpaceSpec, engine: str) -> IndexFile:
    """Read and check an index file.

    Args:
        path: The file.
        spec: The space that it must have.
        engine: The engine that it must have.

    Returns:
        The content; all of the file is in memory, and the arrays are read-only.

    Raises:
        NotFoundError: There is no such file.
        VerificationError: The file is damaged, cannot be read, or belongs to another space,
            dimension, metric or engine.
        KeyError: The digest fits, but the header lacks a field.
    """
    try:
        # Read once, then check and use the same bytes: the file may change.
        content = np.frombuffer(path.read_bytes(), np.uint8)
    except FileNotFoundError as error:
        raise NotFoundError(
            f"{path}: there is no index file; build the search index with build_index() of "
            "nobackfill.gallery.search.hnsw, and save it to this file"
        ) from error
    except OSError as error:
        raise VerificationError(
            f"{path}: the index file cannot be read ({error.strerror}); build the index again"
        ) from error
    header, start = _header(path, content)
    expected = _identity(spec, engine)
    if differing := sorted(key for key in expected if header[key] != expected[key]):
        raise VerificationError(
            f"{path}: the index file was built for another {' and '.join(differing)}; build the "
            "index again"
        )
    arrays = {}
    for name, dtype, shape in header["arrays"]:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        # Copied only if numbers would be misaligned.
        arrays[name] = np.require(
            content[start : start + size].view(dtype).reshape(shape), requirements=["A"]
        )
        start += size
    return IndexFile(header["parameters"], arrays)


def _identity(spec: SpaceSpec, engine: str) -> dict[str, Any]:
    return {"space": spec.space, "dim": spec.dim, "metric": spec.metric, "engine": engine}


def _header(path: Path, content: NDArray[np.uint8]) -> tuple[dict[str, Any], int]:
    """Return the header and the start of the arrays, after checking the digest."""
    damaged = VerificationError(f"{path}: the index file is damaged; build the index again")
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


# The links of an hnswlib graph without its vectors, and graphs made of them over other vectors.
# Elements are numbered in the order of insertion; in a graph made here, an element's number is also
# its label. hnswlib 0.8 stores one record for each element: the links of the ground level (their
# count in 2 bytes, a delete mark in the third), the vector, and an 8-byte label.

Bytes = NDArray[np.uint8]

_LABEL_BYTES = 8
# Lists of links that are checked at a time.
_LISTS = 1 << 16


@dataclass(frozen=True)
class RecordLayout:
    """Offsets in a record: links, from `vector_offset` the vector, from `label_offset` the label.

    `upper_list_bytes` is the size of a list of links above the ground level.
    """

    vector_offset: int
    label_offset: int
    record_bytes: int
    upper_list_bytes: int

    @classmethod
    def of(cls, dim: int, m: int) -> "RecordLayout":
        """Return the layout of hnswlib's records for a dimension and for M links per element.

        Args:
            dim: Dimension of the vectors.
            m: Links of an element, M.
        """
        vector = 4 + 4 * 2 * m
        return cls(vector, vector + 4 * dim, vector + 4 * dim + _LABEL_BYTES, 4 + 4 * m)


@dataclass(frozen=True)
class GraphLinks:
    """The links of a graph.

    Attributes:
        parameters: Values of the state by their names.
        ground_links: Links of each element on the ground level, uint8 [count, bytes].
        upper_level_counts: Number of levels above the ground of each element, int32 [count].
        upper_links: The links there, element by element, int8 [bytes].
    """

    parameters: Mapping[str, Any]
    ground_links: Bytes
    upper_level_counts: NDArray[np.int32]
    upper_links: NDArray[np.int8]

    def __len__(self) -> int:
        return len(self.ground_links)


def check_links(links: GraphLinks) -> None:
    """Check that a walk along the links stays in the graph's memory; neither engine checks that.

    Args:
        links: The links; without elements they pass.

    Raises:
        VerificationError: A link leads out, or the arrays have other sizes than the parameters
            demand.
        KeyError: A parameter is missing.
    """
    m, count, levels = links.parameters["M"], len(links), links.upper_level_counts
    top, entry = links.parameters["max_level"], links.parameters["enterpoint_node"]
    upper = RecordLayout.of(1, m).upper_list_bytes
    sound = (
        links.ground_links.shape == (count, RecordLayout.of(1, m).vector_offset)
        and levels.shape == (count,)
        and (levels >= 0).all()
        and links.upper_links.size == upper * int(levels.sum(dtype=np.int64))
        and (not count or (0 <= entry < count and 0 <= top <= levels[entry]))
    )
    if sound:
        above = links.upper_links.view(np.uint8).reshape(-1, upper)
        firsts = np.cumsum(levels, dtype=np.int64) - levels
        at = 1 + np.arange(len(above)) - np.repeat(firsts, levels)
        sound = _lead(links.ground_links, np.zeros(count, np.int64), levels) and _lead(
            above, at, levels
        )
    if not sound:
        raise VerificationError(
            "the search index (HNSW) is damaged: its graph links to elements that do not exist; "
            "build the index again"
        )


def _lead(lists: Bytes, at: NDArray[np.int64], levels: NDArray[np.int32]) -> bool:
    """Check that every list, one of the level `at`, leads to elements that have this level."""
    for start in range(0, len(lists), _LISTS):
        piece, level = lists[start : start + _LISTS], at[start : start + _LISTS, None]
        links, lengths = piece[:, 4:].view(np.uint32), piece[:, :2].view(np.uint16)
        valid = links < len(levels)
        if level.any():
            # Every element is on the ground.
            valid &= levels[np.minimum(links, len(levels) - 1)] >= level
        valid |= np.arange(links.shape[1]) >= lengths
        if (lengths > links.shape[1]).any() or not valid.all():
            return False
    return True


def copy_links(graph: Hnsw) -> GraphLinks:
    """Copy the links of a graph. No other thread may change it during the call.

    Args:
        graph: The graph.

    Returns:
        New arrays.
    """
    parameters = {
        "space": graph.space, "M": graph.m, "ef_construction": graph.ef_construction,
        "max_level": graph.max_level, "enterpoint_node": graph.entry, "mult": graph.mult,
    }  # fmt: skip
    ground = graph.records[:, : RecordLayout.of(graph.dim, graph.m).vector_offset].copy()
    return GraphLinks(parameters, ground, graph.levels, graph.upper)


def graph_labels(graph: Hnsw) -> Labels:
    """Return the graph's label of each element, int64 [count]. The array is a copy."""
    part = np.ascontiguousarray(graph.records[:, -_LABEL_BYTES:])
    return part.view(np.int64)[:, 0]


def graph_vectors(graph: Hnsw) -> Vectors:
    """Return the vector of each element, float32 [count, dim], in the graph's own memory.

    The array is valid until the graph is resized. A graph of the package hnswlib gives a copy of
    its state, which `mark` takes over.
    """
    layout = RecordLayout.of(graph.dim, graph.m)
    return graph.records[:, layout.vector_offset : layout.label_offset].view(np.float32)


def build_graph(links: GraphLinks, dim: int, fill_vectors: Callable[[Vectors], Mask]) -> Hnsw:
    """Build a graph with given links.

    Args:
        links: The links, which must have passed `check_links`.
        dim: Dimension of the vectors.
        fill_vectors: Writes the vectors, float32 [count, dim], and returns which of them must not
            be found, bool [count]. Walks pass through these; each gets a position between its
            neighbours, or zeros if all of them are such. Its error ends the work.

    Returns:
        The graph; each element's label is its number.

    Raises:
        KeyError: `links.parameters` lacks a parameter.
    """
    values = links.parameters
    graph = Hnsw.of_links(
        values["space"], dim, values["M"], values["ef_construction"], values["max_level"],
        values["enterpoint_node"], links.ground_links, links.upper_level_counts, links.upper_links,
    )  # fmt: skip
    vectors = graph_vectors(graph)
    deleted = fill_vectors(vectors)
    _place_deleted(links.ground_links, vectors, deleted)
    graph.mark(deleted)
    return graph


def _place_deleted(ground: Bytes, vectors: Vectors, deleted: Mask) -> None:
    """Move each deleted element to the mean of the live elements that it leads to."""
    links = ground[:, 4:].view(np.uint32)
    counts = ground[:, :2].view(np.uint16)[:, 0]
    for element in np.flatnonzero(deleted).tolist():
        neighbours = links[element, : counts[element]]
        living = neighbours[~deleted[neighbours]]
        vectors[element] = vectors[living].mean(axis=0) if len(living) else 0


# The version of the headers in native/hnswlib; other versions of the package read the same links.
HNSWLIB_VERSION = "0.8.0"
ENGINE = f"hnswlib {HNSWLIB_VERSION}, links"
# Vectors that are read at a time.
_READ_ROWS = 512

Sums = NDArray[np.uint64]


@dataclass(frozen=True)
class GraphSkeleton:
    """A graph without its vectors.

    Attributes:
        spec: The space.
        labels: Labels of the rows, increasing.
        element_rows: Row in `labels` of each element's vector; -1 for none.
        links: The links.
        row_hashes: Sum of each element's vector; None if not needed.
        links_fit_space: Whether the links were built for vectors of this space.
        ef: Candidates with which enough neighbours were found; 0 if unknown.
    """

    spec: SpaceSpec
    labels: Labels
    element_rows: Rows
    links: GraphLinks
    row_hashes: Sums | None
    links_fit_space: bool
    ef: int

    def write(self, path: Path) -> None:
        """Write the index file; `row_hashes` must be set, which is asserted.

        The file gets mode 0600. Only one process may write a path at a time: temporary files of
        others are removed.

        Args:
            path: The file, in an existing folder; any earlier one is replaced atomically.

        Raises:
            CannotWriteError: The file cannot be written; an earlier file stays.
        """
        assert self.row_hashes is not None, "a file shows what was replaced"
        arrays: Arrays = {
            "labels": self.labels, "rows": self.element_rows.astype(np.int64),
            "sums": self.row_hashes, "ground": self.links.ground_links,
            "levels": self.links.upper_level_counts, "upper": self.links.upper_links,
        }  # fmt: skip
        parameters = dict(self.links.parameters) | {"fresh": self.links_fit_space, "ef": self.ef}
        write_index(path, self.spec, ENGINE, parameters, arrays)


def read_skeleton(path: Path, spec: SpaceSpec) -> GraphSkeleton:
    """Read and check an index file.

    Rows that `labels` does not have are only noticed by `rebuild_graph`.

    Args:
        path: The file.
        spec: The space that it must have.

    Raises:
        NotFoundError: There is no such file.
        VerificationError: The file is damaged, cannot be read, belongs to another space or engine,
            or has links that lead out of the graph. It lacks a row or a sum of an element.
        KeyError: An intact file lacks an array or a parameter of the graph.
    """
    file = read_index(path, spec, ENGINE)
    arrays, parameters = file.arrays, dict(file.parameters)
    own_links, ef = bool(parameters.pop("fresh")), int(parameters.pop("ef", 0))
    links = GraphLinks(parameters, arrays["ground"], arrays["levels"], arrays["upper"])
    check_links(links)
    if not len(links) == len(arrays["rows"]) == len(arrays["sums"]):
        raise VerificationError(
            f"{path}: the index file is damaged: expected a row and a checksum for each of "
            f"{len(links)} elements, got {len(arrays['rows'])} and {len(arrays['sums'])}; build "
            "the index again"
        )
    return GraphSkeleton(
        spec, arrays["labels"], arrays["rows"], links, arrays["sums"], own_links, ef
    )


def hash_vector_rows(vectors: Content) -> Sums:
    """Return a sum of each row's bits, uint64 [n]; different vectors have the same with probability
    2^-64.

    Args:
        vectors: float32 [n, dim], as engines store them; read once, in order.
    """
    sums = np.zeros(len(vectors), np.uint64)
    for start in range(0, len(vectors), _READ_ROWS):
        piece = np.ascontiguousarray(vectors[start : start + _READ_ROWS]).view(np.uint32)
        # For integers, einsum takes half the time of @.
        np.einsum(
            "ij,j->i", piece.astype(np.uint64), _factors(piece.shape[1]),
            out=sums[start : start + len(piece)],
        )  # fmt: skip
    return sums


@cache
def _factors(dim: int) -> Sums:
    return 2 * np.random.default_rng(5).integers(1, 2**63, dim, np.uint64) + 1


def rebuild_graph(
    skeleton: GraphSkeleton,
    spec: SpaceSpec,
    labels: Labels,
    vectors: Content,
    after_piece: Callable[[], None],
) -> tuple[Hnsw, Rows]:
    """Build a graph of a skeleton's links over other vectors.

    A replaced vector is noticed only within one space and with the skeleton's sums. Labels that the
    skeleton lacks get no element.

    Args:
        skeleton: The links.
        spec: The space of the vectors.
        labels: Their labels, int64 [n], increasing; n may be 0.
        vectors: float32 [n, dim], read once, in order; an error of reading passes through.
        after_piece: Called after each piece; its error ends the work and passes through.

    Returns:
        The graph, and the row in `labels` of each element, -1 for elements that must not be found.
        The graph's name of an element is its number.

    Raises:
        VerificationError: The skeleton names rows that it does not have.
        KeyError: The skeleton lacks a parameter of the graph.
    """
    rows = _rows_in(skeleton, labels)
    element = np.full(len(labels), -1, np.int64)
    element[rows[rows >= 0]] = np.flatnonzero(rows >= 0)
    sums = skeleton.row_hashes if skeleton.spec.space == spec.space else None

    def fill(memory: Vectors) -> Mask:
        for start in range(0, len(labels), _READ_ROWS):
            present = np.flatnonzero(element[start : start + _READ_ROWS] >= 0)
            piece = index.prepare_vectors(spec.metric, vectors[start : start + _READ_ROWS])[present]
            places = element[start + present]
            memory[places] = piece
            if sums is not None:
                # A replaced vector has other neighbours: it cannot stay there.
                rows[places[hash_vector_rows(piece) != sums[places]]] = -1
            after_piece()
        no_row: Mask = rows < 0
        return no_row

    return build_graph(skeleton.links, spec.dim, fill), rows


def _rows_in(skeleton: GraphSkeleton, labels: Labels) -> Rows:
    """Return the row in `labels` of each element; -1 if it has none."""
    if not len(labels):
        return np.full(len(skeleton.element_rows), -1, np.intp)
    positions = np.minimum(np.searchsorted(labels, skeleton.labels), len(labels) - 1)
    positions[labels[positions] != skeleton.labels] = -1
    if len(skeleton.element_rows) and skeleton.element_rows.max() >= len(positions):
        raise VerificationError(
            f"the index file was built for other vectors: it lists {len(positions)} rows and "
            "refers to more; build the index again"
        )
    # The last -1 is for elements without a row.
    moved: Rows = np.append(positions, -1)[skeleton.element_rows]
    return moved
