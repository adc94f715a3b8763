"""An index file that is whole, but leads out of its graph, is refused before anything walks it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nobackfill.errors import VerificationError
from nobackfill.gallery.search import hnsw
from nobackfill.gallery.search.graph_file import GraphSkeleton
from tests.gallery.making import spec, vectors

COUNT = 600
LABELS = np.arange(1, COUNT + 1)
CONTENT = vectors(COUNT, 1)
# What a file says, to be changed: parameters and arrays by name.
Said = dict[str, Any]


@pytest.fixture(scope="module")
def skeleton() -> GraphSkeleton:
    return hnsw.build_index(spec(), LABELS, CONTENT).skeleton()


def put(
    name: str, at: tuple[int, ...], value: int, kind: type = np.uint8
) -> Callable[[Said], None]:
    def change(said: Said) -> None:
        said[name] = said[name].copy()
        said[name].view(kind)[at] = value

    return change


def give(name: str, value: int) -> Callable[[Said], None]:
    return lambda said: said.update({name: value})


def cut(name: str) -> Callable[[Said], None]:
    return lambda said: said.update({name: said[name][:-1]})


def raise_all(said: Said) -> None:
    """Lists that say they belong to elements of one level."""
    said["levels"] = np.roll(said["levels"], 1)


CHANGES: list[Callable[[Said], None]] = [
    put("ground", (3, 1), COUNT, np.uint32), put("ground", (3, 1), 2**32 - 1, np.uint32),
    put("ground", (3, 0), 33, np.uint16), put("ground", (3, 0), 2**16 - 1, np.uint16),
    put("upper", (1,), COUNT, np.uint32), put("upper", (0,), 17, np.uint16),
    put("levels", (0,), -1, np.int32), put("levels", (0,), 9, np.int32),
    give("enterpoint_node", COUNT), give("enterpoint_node", -1), give("max_level", 9),
    cut("ground"), cut("upper"), cut("levels"), cut("rows"), cut("sums"), raise_all,
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_it_is_refused(skeleton: GraphSkeleton, tmp_path: Path, number: int) -> None:
    links = skeleton.links
    said: Said = dict(links.parameters) | {
        "ground": links.ground_links, "levels": links.upper_level_counts,
        "upper": links.upper_links, "rows": skeleton.element_rows, "sums": skeleton.row_hashes,
    }  # fmt: skip
    CHANGES[number](said)
    other = replace(
        skeleton,
        element_rows=said["rows"],
        row_hashes=said["sums"],
        links=replace(
            links,
            parameters={name: said[name] for name in links.parameters},
            ground_links=said["ground"],
            upper_level_counts=said["levels"],
            upper_links=said["upper"],
        ),
    )
    other.write(tmp_path / "index")
    with pytest.raises(VerificationError, match="build the index again"):
        hnsw.load_index(tmp_path / "index", spec(), LABELS, CONTENT)


def test_what_was_built_is_taken(
    skeleton: GraphSkeleton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hnsw, "_GRAPH_QUERY", 0)
    skeleton.write(tmp_path / "index")
    index, rest = hnsw.load_index(tmp_path / "index", spec(), LABELS, CONTENT)
    assert not len(rest) and (index.search(CONTENT, 1).labels[:, 0] == LABELS).mean() > 0.99
