"""The memory of an hnswlib graph seen as arrays, where its state would be a copy of all of it.

hnswlib 0.8 keeps one record an element: links of the ground level (their count in 2 bytes, a delete
mark in the third), the vector, and an 8-byte label. Where the library keeps them is read from the
object itself, at offsets whose neighbours must agree with what the graph says of itself; a build
of the library that lays things out otherwise is seen, and its state copied instead: the same
answers, with one copy more of the vectors.
"""

import ctypes
import mmap
import struct
import sys
import threading
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nobackfill.gallery.search.index import give_way

Bytes = NDArray[np.uint8]

_WORD = 8
_LABEL_BYTES = 8
# 8-byte words from the start of pybind11's object, of its Index, and of hnswlib's graph.
_INSTANCE, _INDEX_DIM, _INDEX_GRAPH, _INDEX_WORDS = 2, 4, 9, 11
_MAX_LEVEL, _MULT, _ENTRY, _RECORDS, _UPPER, _LEVELS, _GRAPH_WORDS = 13, 11, 26, 31, 32, 33, 39
# Whatever is larger, glibc's malloc takes from the kernel and gives back to it.
_MAPPED_BYTES = 32 << 20
_LARGE_PAGE = 2 << 20
# Linux 6.1; not among mmap's names.
_MADV_COLLAPSE = 25
_DELETED, _VECTOR_BYTES, _DISTANCE, _PARAMETER = 5, 36, 37, 38


@dataclass(frozen=True)
class Layout:
    """Bytes of a record: links up to `vector`, the vector up to `label`, a label up to `size`."""

    vector: int
    label: int
    size: int
    upper: int

    @classmethod
    def of(cls, dim: int, m: int) -> "Layout":
        """hnswlib's for this dimension and M. `upper`: bytes of a list of links higher up."""
        vector = 4 + 4 * 2 * m
        return cls(vector, vector + 4 * dim, vector + 4 * dim + _LABEL_BYTES, 4 + 4 * m)


class _Memory:
    """What numpy makes an array of; the graph lives for as long as the array."""

    def __init__(self, graph: Any, address: int, shape: tuple[int, ...], kind: str) -> None:
        self.graph = graph
        self.__array_interface__ = {
            "version": 3, "data": (address, False), "shape": shape, "typestr": kind,
        }  # fmt: skip


def _words(address: int, count: int) -> tuple[int, ...]:
    return struct.unpack(f"={count}Q", ctypes.string_at(address, count * _WORD))


def graph_words(graph: Any) -> tuple[int, ...] | None:
    """The graph's own fields as 8-byte words; None if they are not where they should be."""
    if sys.platform != "linux" or struct.calcsize("P") != _WORD:
        return None
    index = _words(_words(id(graph) + _INSTANCE * _WORD, 1)[0], _INDEX_WORDS)
    if index[_INDEX_DIM] & 0xFFFFFFFF != graph.dim or not index[_INDEX_GRAPH]:
        return None
    words = _words(index[_INDEX_GRAPH], _GRAPH_WORDS)
    layout, m = Layout.of(graph.dim, graph.M), graph.M
    stated = (
        (1, graph.max_elements), (2, graph.element_count), (3, layout.size), (4, layout.upper),
        (6, m), (7, m), (8, 2 * m), (9, graph.ef_construction), (27, layout.vector),
        (28, layout.vector), (29, 0), (30, layout.label), (_VECTOR_BYTES, 4 * graph.dim),
    )  # fmt: skip
    room = words[_LEVELS + 1] - words[_LEVELS]
    agree = all(words[place] == value for place, value in stated) and room == 4 * graph.max_elements
    return words if agree else None


def records(graph: Any) -> Bytes:
    """One record an element, uint8 [count, bytes]: the memory itself, or a copy of it."""
    size, count = Layout.of(graph.dim, graph.M).size, graph.element_count
    words = graph_words(graph)
    if words is None or not count:
        found: Bytes = graph.__getstate__()[0]["data_level0"].view(np.uint8)
        return found.reshape(-1, size)
    return np.asarray(_Memory(graph, words[_RECORDS], (count, size), "|u1"))


def use_large_pages(graph: Any) -> None:
    """Ask for large pages under records that nobody has written yet: a walk goes from one to any
    other, and with small pages waits as long for where it is as for what is there."""
    # Where the kernel has none, all is as before.
    for start, end in _large(graph):
        _advise(start, end, mmap.MADV_HUGEPAGE)


def move_to_large_pages(graph: Any) -> None:
    """The same for records that are written, aside, whoever reads them: a graph that is taken from
    its file is searched sooner. On a virtual machine large pages are those that its host has
    taken back, and each has to be asked of it: 2 s for 660 MB."""
    for start, end in _large(graph):
        threading.Thread(
            target=_move, args=(graph, start, end), name="large pages", daemon=True
        ).start()


def _move(graph: Any, start: int, end: int) -> None:
    """`graph`: held, that its memory stays."""
    give_way()
    for at in range(start, end, _LARGE_PAGE):
        if _advise(at, min(at + _LARGE_PAGE, end), _MADV_COLLAPSE):
            # An older kernel, or no page to be had: the rest is done by and by.
            _advise(start, end, mmap.MADV_HUGEPAGE)
            return


def _large(graph: Any) -> list[tuple[int, int]]:
    """Where its records begin and end, as far as large pages can hold them; nothing where there are
    none, or too few."""
    words, size = graph_words(graph), Layout.of(graph.dim, graph.M).size * graph.max_elements
    if words is None or size <= _MAPPED_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return []
    start = -(-words[_RECORDS] // _LARGE_PAGE) * _LARGE_PAGE
    return [(start, (words[_RECORDS] + size) // _LARGE_PAGE * _LARGE_PAGE)]


def _advise(start: int, end: int, advice: int) -> int:
    """0: taken."""
    found: int = _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)
    return found


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def parameters(graph: Any) -> dict[str, Any] | None:
    """The scalars of the graph's state that vary; None where they cannot be seen."""
    if (words := graph_words(graph)) is None:
        return None
    (mult,) = struct.unpack("=d", struct.pack("=Q", words[_MULT]))
    return {
        "max_level": ctypes.c_int(words[_MAX_LEVEL] & 0xFFFFFFFF).value,
        "enterpoint_node": words[_ENTRY] & 0xFFFFFFFF,
        "mult": mult,
    }


def addresses(graph: Any) -> dict[str, int] | None:
    """Where a search in compiled code finds what it reads; None where it cannot be seen. They hold
    while the graph lives and nobody changes it."""
    words = graph_words(graph)
    if words is None or not graph.element_count:
        return None
    # hnswlib's distance function and what it is told: where the dim is.
    if not words[_DISTANCE] or _words(words[_PARAMETER], 1)[0] != graph.dim:
        return None
    layout = Layout.of(graph.dim, graph.M)
    return {
        "records": words[_RECORDS], "size": layout.size, "vector": layout.vector,
        "label": layout.label, "upper": words[_UPPER], "upper_size": layout.upper,
        "max_level": ctypes.c_int(words[_MAX_LEVEL] & 0xFFFFFFFF).value,
        "entry": words[_ENTRY] & 0xFFFFFFFF, "deletions": words[_DELETED],
        "distance": words[_DISTANCE], "parameter": words[_PARAMETER],
    }  # fmt: skip


def upper(graph: Any) -> tuple[NDArray[np.int32], NDArray[np.int8]] | None:
    """Levels of each element [count] and, by element, its lists of links above the ground."""
    words, count = graph_words(graph), graph.element_count
    if words is None or not count:
        return None
    levels = np.asarray(_Memory(graph, words[_LEVELS], (count,), "<i4")).copy()
    lists = np.asarray(_Memory(graph, words[_UPPER], (count,), "<u8"))
    size = Layout.of(graph.dim, graph.M).upper
    raised = np.flatnonzero(levels > 0)
    parts = [
        ctypes.string_at(address, size * level)
        for address, level in zip(lists[raised].tolist(), levels[raised].tolist(), strict=True)
    ]
    return levels, np.frombuffer(b"".join(parts), np.int8)
