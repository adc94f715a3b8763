"""The state of an hnswlib graph as arrays, and how it is carried to other vectors.

hnswlib 0.8 gives its state as a dict (what it would pickle) and takes it back. `data_level0` holds
one record an element: links (their count in 2 bytes, a delete mark in the third), the vector, and
an 8-byte label; `offset_data`, `label_offset` and `size_data_per_element` say where.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from release.vectors import Vectors

State = Mapping[str, Any]
Bytes = NDArray[np.uint8]

_MARK_BYTE = 2
_DELETED = 1
_LABEL_BYTES = 8


def records(state: State) -> Bytes:
    """One record an element, [count, bytes]."""
    found: Bytes = state["data_level0"].view(np.uint8)
    return found.reshape(-1, state["size_data_per_element"])


def labels(state: State) -> NDArray[np.int64]:
    """The graph's label of each element, [count]."""
    start = state["label_offset"]
    part = np.ascontiguousarray(records(state)[:, start : start + _LABEL_BYTES])
    return part.view(np.int64)[:, 0]


def vectors(state: State, dim: int) -> Vectors:
    """The vector of each element, [count, dim]."""
    start = state["offset_data"]
    return np.ascontiguousarray(records(state)[:, start : start + 4 * dim]).view(np.float32)


def deleted(state: State) -> NDArray[np.bool_]:
    """Which elements are never found, only passed through, [count]."""
    marked: NDArray[np.bool_] = (records(state)[:, _MARK_BYTE] & _DELETED) != 0
    return marked


def carried(state: State, rows: NDArray[np.int64], content: Vectors, room: int) -> dict[str, Any]:
    """The same links over other vectors: element i holds row `rows[i]` of `content` [n, dim] and
    that row as its label; -1: no row, so it is marked deleted and its vector forgotten.

    `room`: elements that can be added later.
    """
    count, dim = len(rows), content.shape[1]
    offset = state["offset_data"]
    size = offset + 4 * dim + _LABEL_BYTES
    alive = rows >= 0
    new = np.zeros((count, size), np.uint8)
    new[:, :offset] = records(state)[:, :offset]
    new[:, _MARK_BYTE] = np.where(alive, 0, _DELETED)
    new[alive, offset : size - _LABEL_BYTES] = content[rows[alive]].view(np.uint8)
    # Labels of the dead are beyond those of any row, also of rows that are added later.
    names = np.where(alive, rows, len(content) + np.arange(count))
    new[:, -_LABEL_BYTES:] = names[:, None].view(np.uint8)
    return dict(state) | {
        "dim": dim,
        "size_data_per_element": size,
        "label_offset": size - _LABEL_BYTES,
        "data_level0": new.reshape(-1).view(np.int8),
        "label_lookup_external": names.astype(np.uint64),
        "label_lookup_internal": np.arange(count, dtype=np.uint32),
        "has_deletions": bool((~alive).any()),
        "max_elements": count + room,
    }
