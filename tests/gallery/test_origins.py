"""One ranking of carried and native vectors, against all of them sorted by what the scale says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nobackfill.gallery.search import hnsw, index
from nobackfill.gallery.search.exact import ExactIndex
from nobackfill.gallery.search.index import Labels, Mask, Neighbours
from nobackfill.gallery.search.view import Snapshot, apply_change, new_snapshot
from nobackfill.gallery.store import Change
from nobackfill.release.calibration import DistanceScale
from tests.gallery.making import spec, vectors

COUNT = 400
LABELS = np.arange(10, 10 + 3 * COUNT, 3)
CONTENT = vectors(COUNT, 1)


@pytest.fixture(scope="module")
def snapshots() -> list[Snapshot]:
    """The same vectors without a graph, and with one and some beside it."""
    cut = COUNT * 4 // 5
    graph = new_snapshot(spec(), hnsw.build_index(spec(), LABELS[:cut], CONTENT[:cut]))
    later = Change({spec().space: (LABELS[cut:], CONTENT[cut:])}, np.empty(0, np.int64))
    return [new_snapshot(spec(), ExactIndex(spec(), LABELS, CONTENT)), apply_change(graph, later)]


def test_it_is_the_order_of_all_along_the_scale(snapshots: list[Snapshot]) -> None:
    @settings(max_examples=60, deadline=None)
    @given(
        seed=st.integers(0, 2**32),
        share=st.sampled_from([0.0, 0.02, 0.5, 0.98, 1.0]),
        slope=st.floats(0.2, 5),
        offset=st.floats(-3, 3),
        k=st.integers(1, 30),
        filtered=st.booleans(),
    )
    def same(seed: int, share: float, slope: float, offset: float, k: int, filtered: bool) -> None:
        rng = np.random.default_rng(seed)
        query = vectors(1, seed)
        native, passing = rng.random(COUNT) < share, rng.random(COUNT) < 0.5

        def chosen(mask: Mask, labels: Labels) -> Mask:
            return mask[(labels - 10) // 3]

        wide = ((CONTENT.astype(float) - query.astype(float)) ** 2).sum(axis=1)
        keys = np.where(native, wide, slope * wide + offset)
        keys[~passing & filtered] = np.inf
        best = np.argsort(keys, kind="stable")[: min(k, np.isfinite(keys).sum())]
        for snapshot in snapshots:

            def nearest(of: index.LabelFilter, among: Snapshot = snapshot) -> Neighbours:
                return among.search(query, k, of, 4 * COUNT)

            found = index.search_by_origin(
                nearest,
                lambda labels: (chosen(~native, labels), chosen(native, labels)),
                DistanceScale(slope, offset),
                k,
                (lambda labels: chosen(passing, labels)) if filtered else None,
            )
            assert found.labels.shape == found.distances.shape == (1, k)
            there = found.labels[0] >= 0
            rows = (found.labels[0, there] - 10) // 3
            # Distances are float32: neighbours in the order may be as good as one another.
            assert keys[rows] == pytest.approx(keys[best], abs=1e-4, rel=1e-5)
            assert len(set(rows.tolist())) == len(rows)
            assert found.distances[0, there] == pytest.approx(wide[rows], rel=1e-4, abs=1e-4)

    same()


def test_what_is_embedded_again_meanwhile_is_found_once() -> None:
    """Its label is the same, its origin another between the two searches."""
    snapshot = new_snapshot(spec(), ExactIndex(spec(), LABELS, CONTENT))
    asked = 0

    def of(labels: Labels) -> tuple[Mask, Mask]:
        nonlocal asked
        asked += 1
        native = np.full(len(labels), asked > 2)
        return ~native, native

    found = index.search_by_origin(
        lambda chosen: snapshot.search(CONTENT[:1], 5, chosen), of, DistanceScale(1, 0), 5
    )
    assert len(set(found.labels[0].tolist())) == 5
