"""Candidates ranked by compiled code and by Python: the same labels, the same bits."""

import numpy as np
import pytest

from nobackfill.gallery.search import view
from nobackfill.gallery.spec import Metric
from nobackfill.server.stores.postgresql import search
from nobackfill.vectors import Vectors
from tests.gallery.making import spec, vectors


def rows_of(content: Vectors) -> list[tuple[int, bytes]]:
    """As PostgreSQL sends them, by falling label."""
    head = np.array([content.shape[1], 0], ">i2").tobytes()
    return [(len(content) - n, head + row.astype(">f4").tobytes()) for n, row in enumerate(content)]


@pytest.mark.skipif(view.rank_binary_rows is None, reason="nothing was compiled")
@pytest.mark.parametrize("metric", ["squared_l2", "cosine"])
@pytest.mark.parametrize("dim", [1, 7, 128])
def test_compiled_code_ranks_as_python_does(
    metric: Metric, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = vectors(40, dim, dim)
    # Equal ones, one without a direction, one of norm 1, one that is far.
    content[5:9], content[9], content[10], content[11] = content[4], 0, 1 / np.sqrt(dim), 1e14
    compiled = view.rank_binary_rows
    for query in (content[4], content[9], content[11], *vectors(20, 3, dim)):
        for count, k in ((40, 10), (3, 10), (0, 2), (40, 40)):
            found = []
            for ranked in (compiled, None):
                monkeypatch.setattr(view, "rank_binary_rows", ranked)
                rows = rows_of(content[:count])
                found.append(search.rank_rows(spec(dim=dim, metric=metric), query, rows, k))
            one, other = found
            assert one.labels.tolist() == other.labels.tolist()
            assert one.distances.tobytes() == other.distances.tobytes()
            assert one.labels.shape == one.distances.shape == (1, k)
            assert one.labels.dtype == other.labels.dtype


@pytest.mark.skipif(view.rank_binary_rows is None, reason="nothing was compiled")
def test_compiled_code_refuses_what_is_no_row() -> None:
    query, ranked = np.ones(3, np.float32), view.rank_binary_rows
    assert ranked is not None
    for rows in ([(1, b"short")], [(1, b"")], [(1,)], [("a", bytes(16))], [(1, "text")]):
        with pytest.raises((ValueError, TypeError, RuntimeError, IndexError)):
            ranked(False, query, rows, 2)  # type: ignore[arg-type]
