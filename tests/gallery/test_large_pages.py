"""Records that are moved to large pages while they are read, on kernels that do it and others."""

import threading

import numpy as np
import pytest

from nobackfill.gallery.search import hnsw
from nobackfill.gallery.search.exact import ExactIndex
from tests.gallery.making import spec, vectors

# Six megabytes of records.
COUNT, DIM = 3000, 512
UNKNOWN_ADVICE = 9999


@pytest.mark.slow
@pytest.mark.parametrize("advice", [hnsw._MADV_COLLAPSE, UNKNOWN_ADVICE])
def test_what_is_moved_answers_as_before(advice: int, monkeypatch: pytest.MonkeyPatch) -> None:
    labels, content, queries = np.arange(COUNT), vectors(COUNT, 1, DIM), vectors(20, 2, DIM)
    built = hnsw.build_index(spec(dim=DIM), labels, content)
    expected = built.search(queries, 10)
    monkeypatch.setattr(hnsw, "_MAPPED_BYTES", 1 << 20)
    monkeypatch.setattr(hnsw, "_MADV_COLLAPSE", advice)
    index, _ = hnsw.rebuild_from_skeleton(built.skeleton(), spec(dim=DIM), labels, content)
    for thread in threading.enumerate():
        if thread.name == "large pages":
            thread.join()
    found = index.search(queries, 10)
    np.testing.assert_array_equal(found.labels, expected.labels)
    np.testing.assert_array_equal(found.distances, expected.distances)
    np.testing.assert_array_equal(index.vectors[:], content)
    exact = ExactIndex(spec(dim=DIM), labels, content).search(queries, 10)
    np.testing.assert_array_equal(index.search_exactly(queries, 10).labels, exact.labels)
