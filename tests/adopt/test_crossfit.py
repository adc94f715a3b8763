"""What is said of a map from its own pairs, against chance and against what it does to others."""

import numpy as np
import pytest

from nobackfill.adopt.crossfit import (
    FOLDS,
    HeldOutResult,
    cross_fit,
    cross_fit_candidates,
    share_fitted_per_map,
)
from nobackfill.adopt.judgement import (
    Queries,
    figures_from_distances,
    figures_from_vectors,
    sample_item_queries,
)
from nobackfill.adopt.maps import MAP_KINDS, fit_maps
from nobackfill.adopt.pairs import Pairs
from nobackfill.vectors import Vectors, normalise

DIMS = 48


def world(items: int, seed: int, share: float) -> tuple[Pairs, Queries]:
    """Groups of items that look alike; each is asked for once. `share`: of what the new model sees,
    the part that the old one has seen, too."""
    rng = np.random.default_rng(seed)

    def drawn(rows: int) -> Vectors:
        return rng.normal(size=(rows, DIMS)).astype(np.float32)

    hidden = drawn(items // 8)[rng.integers(items // 8, size=items)] + drawn(items)
    turn = np.linalg.qr(drawn(DIMS))[0]
    old = normalise(hidden @ turn + 0.3 * drawn(items))
    new = normalise(share * hidden + (1 - share) * 1.4 * drawn(items))
    asked = normalise(new + 0.5 / DIMS**0.5 * drawn(items))
    rows = np.arange(items, dtype=np.int64)
    ids = [str(row) for row in rows]
    return Pairs(ids, old, new), Queries(old, asked, rows, are_gallery_items=False)


def part(pairs: Pairs, asked: Queries, rows: slice) -> tuple[Pairs, Queries]:
    old, new = pairs.old[rows], pairs.new[rows]
    places = np.arange(len(old), dtype=np.int64)
    some = Queries(asked.old[rows], asked.new[rows], places, are_gallery_items=False)
    return Pairs(pairs.ids[rows], old, new), some


def told(held: HeldOutResult, pairs: Pairs, asked: Queries, figure: str) -> float:
    return float(figures_from_distances(held.query_distances[0], pairs, asked)[figure].mean())


@pytest.mark.slow
def test_noise_has_as_many_rivals_before_it_as_behind() -> None:
    """A map that learnt an item by heart would find it; rivals whose maps have seen it are bent
    towards what asks for it, and stand before it."""
    before: dict[str, list[float]] = {kind: [] for kind in MAP_KINDS}
    for seed in range(10):
        pairs, asked = world(60, seed, share=0)
        for kind, held in cross_fit(pairs, [asked]).items():
            own = held.query_distances[0][asked.gallery_rows, asked.gallery_rows][:, None]
            before[kind].append(float((held.query_distances[0] < own).sum(1).mean()) / 59)
    for values in before.values():
        assert np.mean(values) == pytest.approx(0.5, abs=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "share"), [(80, 0.4), (400, 0.3)])
def test_what_is_told_is_true_of_other_items(count: int, share: float) -> None:
    """With fewer pairs than two for each dimension, and with eight: what maps of as many pairs as
    each of these saw (80 %) do in other galleries of the same size."""
    kinds = ("affine", "procrustes")
    apart: dict[str, list[float]] = {kind: [] for kind in kinds}
    for seed in range(6):
        every, all_asked = world(4 * count, seed, share)
        pairs, asked = part(every, all_asked, slice(0, count))
        held = cross_fit(pairs, [asked], kinds)
        some = round(share_fitted_per_map(FOLDS) * count)
        for kind, made in fit_maps(pairs.old[:some], pairs.new[:some], kinds=kinds).items():
            truths = []
            for first in range(count, 4 * count, count):
                others, their = part(every, all_asked, slice(first, first + count))
                figures = figures_from_vectors(made(others.old), others, their)
                truths.append(figures["R@1"].mean())
            truth = float(np.mean(truths))
            assert 0.05 < truth < 0.6
            apart[kind].append(told(held[kind], pairs, asked, "R@1") - truth)
    for values in apart.values():
        assert np.mean(values) == pytest.approx(0, abs=0.04)


@pytest.mark.slow
def test_two_sets_of_queries_are_judged_by_the_same_maps() -> None:
    pairs, asked = world(90, 0, share=0.5)
    alike = sample_item_queries(pairs)
    both = cross_fit(pairs, [asked, alike])
    for place, alone in enumerate((asked, alike)):
        for kind, held in cross_fit(pairs, [alone]).items():
            np.testing.assert_array_equal(both[kind].migrated_vectors, held.migrated_vectors)
            np.testing.assert_array_equal(
                both[kind].query_distances[place], held.query_distances[0]
            )


@pytest.mark.slow
def test_candidates_without_what_makes_them_are_left_out() -> None:
    pairs, asked = world(60, 0, share=0.5)
    kinds = ("affine", "residual", "corrected", "converter", "unknown")
    assert list(cross_fit_candidates(pairs, [asked], kinds=kinds)) == ["affine"]
    assert cross_fit_candidates(pairs, [asked], kinds=kinds[1:]) == {}


def test_what_is_as_near_stands_before_what_is_asked_for() -> None:
    """A map that carries all items to one point finds none of them."""
    pairs, asked = world(60, 0, share=0.5)
    carried = np.zeros_like(pairs.new)
    carried[:, 0] = 1
    figures = figures_from_vectors(carried, pairs, asked)
    assert figures["R@1"].max() == figures["R@10"].max() == 0
    assert figures["MRR"] == pytest.approx(1 / 60)


@pytest.mark.slow
def test_a_query_that_is_fitted_on_is_left_out_with_its_item() -> None:
    """Noise again: a query has its item's vectors nearly, and a map that kept it would find it."""
    before = []
    for seed in range(10):
        pairs, asked = world(60, seed, share=0)
        held = cross_fit(pairs, [asked], ["affine"], fitted_queries=asked)["affine"]
        own = held.query_distances[0][asked.gallery_rows, asked.gallery_rows][:, None]
        before.append(float((held.query_distances[0] < own).sum(1).mean()) / 59)
    assert np.mean(before) == pytest.approx(0.5, abs=0.03)
