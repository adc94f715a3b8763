"""The links of an hnswlib graph without its vectors, and a graph made of them over other vectors.

hnswlib 0.8 takes back its state as a dict (what it would pickle). Elements are numbered as they
came; in a graph that is made here an element's number is its label, too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import hnswlib
import numpy as np
from numpy.typing import NDArray

from nobackfill.errors import VerificationError
from nobackfill.gallery.search import graph_memory
from nobackfill.gallery.search.graph_memory import Bytes, Layout
from nobackfill.gallery.search.index import Labels
from nobackfill.vectors import Vectors

_MARK_BYTE = 2
_LABEL_BYTES = 8
# Lists of links that are looked at together.
_LISTS = 1 << 16


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


def check(links: Links) -> None:
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


def links_of(graph: Any) -> Links:
    """Those of a graph, which nobody changes meanwhile."""
    seen, above = graph_memory.parameters(graph), graph_memory.upper(graph)
    if seen is None or above is None:
        state = graph.__getstate__()[0]
        seen = {name: state[name] for name in ("max_level", "enterpoint_node", "mult")}
        above = state["element_levels"][: graph.element_count], state["link_lists"]
    own = {"space": graph.space, "M": graph.M, "ef_construction": graph.ef_construction}
    ground = graph_memory.records(graph)[:, : Layout.of(graph.dim, graph.M).vector].copy()
    return Links(own | seen, ground, *above)


def names_of(graph: Any) -> Labels:
    """The graph's label of each element, int64 [count]."""
    part = np.ascontiguousarray(graph_memory.records(graph)[:, -_LABEL_BYTES:])
    return part.view(np.int64)[:, 0]


def vectors_of(graph: Any) -> Vectors:
    """The vector of each element, float32 [count, dim]: the graph's own memory where it is seen."""
    layout = Layout.of(graph.dim, graph.M)
    return graph_memory.records(graph)[:, layout.vector : layout.label].view(np.float32)


def graph_of(links: Links, dim: int, fill: Callable[[Vectors], NDArray[np.bool_]]) -> Any:
    """A graph with these links. `fill` writes the vectors, float32 [count, dim], and says which of
    them nobody may find, bool [count]: those are passed through, at a place between the elements
    they lead to, and what they held is forgotten."""
    layout = Layout.of(dim, links.parameters["M"])
    graph = hnswlib.Index(_state(links, dim, np.empty(0, np.int8)))
    direct = graph_memory.graph_words(graph) is not None
    records = (
        graph_memory.records(graph) if direct else np.zeros((len(links), layout.size), np.uint8)
    )
    records[:, : layout.vector] = links.ground
    records[:, _MARK_BYTE] = 0
    records[:, -_LABEL_BYTES:] = np.arange(len(links))[:, None].view(np.uint8)
    vectors = records[:, layout.vector : layout.label].view(np.float32)
    dead = fill(vectors)
    _make_up(links.ground, vectors, dead)
    records[:, _MARK_BYTE] = dead
    if not direct:
        return hnswlib.Index(_state(links, dim, records.reshape(-1).view(np.int8), dead))
    if dead.any():
        # How many are marked is asked only for whether any is, and the first is found by its name.
        records[0, _MARK_BYTE] = 0
        graph.mark_deleted(0)
        records[0, _MARK_BYTE] = dead[0]
    return graph


def _make_up(ground: Bytes, vectors: Vectors, dead: NDArray[np.bool_]) -> None:
    """The mean of the living that a dead element leads to."""
    links = ground[:, 4:].view(np.uint32)
    counts = ground[:, :2].view(np.uint16)[:, 0]
    for element in np.flatnonzero(dead).tolist():
        near = links[element, : counts[element]]
        living = near[~dead[near]]
        vectors[element] = vectors[living].mean(axis=0) if len(living) else 0


def _state(
    links: Links, dim: int, records: NDArray[np.int8], dead: NDArray[np.bool_] | None = None
) -> dict[str, Any]:
    count, layout = len(links), Layout.of(dim, links.parameters["M"])
    m = links.parameters["M"]
    # Of the names it makes a table, one after another, while nobody else has the interpreter: a
    # second for a million. Only who changes an element looks there, so all get the first one's.
    names = np.zeros(count, np.uint64)
    return dict(links.parameters) | {
        "ser_version": 1,
        "dim": dim,
        "index_inited": True,
        "ep_added": True,
        "normalize": False,
        "num_threads": 1,
        "seed": 1,
        "offset_level0": 0,
        "max_elements": count,
        "cur_element_count": count,
        "size_data_per_element": layout.size,
        "label_offset": layout.label,
        "offset_data": layout.vector,
        "max_M": m,
        "max_M0": 2 * m,
        "ef": 10,
        "has_deletions": dead is not None and bool(dead.any()),
        "size_links_per_element": layout.upper,
        "allow_replace_deleted": False,
        "label_lookup_external": names,
        "label_lookup_internal": names.astype(np.uint32),
        "element_levels": links.levels,
        "data_level0": records,
        "link_lists": links.upper,
    }
