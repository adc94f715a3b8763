"""A sample of a store that does not fit into memory, drawn while the store is read."""

from pathlib import Path

import numpy as np
import pytest

from nobackfill.adopt.pairs import (
    encode_ids,
    inspect,
    measure_coverage,
    read_all,
    sample_source,
    sample_spread_rows,
)
from nobackfill.adopt.sources.arrays import ArraySource
from nobackfill.errors import InvalidInputError
from nobackfill.vectors import Vectors

# Far apart: 90 %, 9.9 % and 0.1 % of the items.
GROUPS = (27_000, 2970, 30)
COUNT = sum(GROUPS)


def write(folder: Path, vectors: Vectors) -> ArraySource:
    folder.mkdir()
    np.save(folder / "ids.npy", np.arange(len(vectors)))
    np.save(folder / "old.npy", vectors)
    return ArraySource(folder)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[ArraySource, np.ndarray]:
    """More items than are held in memory, mixed; then the group of each item."""
    rng = np.random.default_rng(0)
    group = rng.permutation(np.repeat(np.arange(3), GROUPS))
    vectors = rng.normal(scale=0.1, size=(COUNT, 8)).astype(np.float32)
    vectors[np.arange(COUNT), group] += 5
    return write(tmp_path_factory.mktemp("large") / "g", vectors), group


def test_a_small_store_is_sampled_as_its_rows_are(tmp_path: Path) -> None:
    vectors = np.random.default_rng(1).normal(size=(500, 8)).astype(np.float32)
    source = write(tmp_path / "g", vectors)
    sampling = sample_source(source, 50, seed=3)
    assert sampling.ids == sample_spread_rows(read_all(source), 50, seed=3)
    assert sampling.source_count == 500 and sampling.random_rows.ids == read_all(source).ids
    assert len(sample_source(source, 600).ids) == 500


def test_each_part_of_a_large_store_gives_its_share(
    large: tuple[ArraySource, np.ndarray],
) -> None:
    source, group = large
    sampling = sample_source(source, 1000)
    assert sampling.source_count == COUNT and len(sampling.random_rows) == 20_000
    chosen = np.array(sampling.ids, np.int64)
    assert len(set(sampling.ids)) == 1000 and (np.diff(chosen) > 0).all()
    shares = np.bincount(group[chosen], minlength=3)
    assert abs(shares[0] - 900) < 20 and abs(shares[1] - 99) < 20 and shares[2] >= 1
    # Within a group, each item is as likely as any other.
    middle = chosen[group[chosen] == 0].mean() / COUNT
    assert abs(middle - 0.5) < 5 * np.sqrt(1 / 12 / 900)
    for row in (0, COUNT - 1, int(np.flatnonzero(group == 2)[0])):
        some = (
            sampling.random_rows.ids.index(str(row))
            if str(row) in sampling.random_rows.ids
            else None
        )
        if some is not None:
            np.testing.assert_array_equal(
                sampling.random_rows.vectors[some], read_all(source, {str(row)}).vectors[0]
            )
    assert sample_source(source, 1000).ids == sampling.ids
    assert sample_source(source, 1000, seed=1).ids != sampling.ids


@pytest.mark.parametrize("count", [0, -1])
def test_a_sample_without_items_is_refused(
    large: tuple[ArraySource, np.ndarray], tmp_path: Path, count: int
) -> None:
    small = write(tmp_path / "g", np.eye(8, dtype=np.float32))
    for source, total in ((large[0], COUNT), (small, 8)):
        with pytest.raises(InvalidInputError, match=f"expected 1 to {total}, .* got {count}"):
            sample_source(source, count)


def test_a_store_without_items_has_no_sample(tmp_path: Path) -> None:
    """Its coverage was a division by zero."""
    source = write(tmp_path / "g", np.empty((0, 8), np.float32))
    with pytest.raises(InvalidInputError, match=r"g#old: expected items with vectors, found none"):
        sample_source(source, 5)


def test_items_of_queries_are_in_the_sample_of_a_large_store(
    large: tuple[ArraySource, np.ndarray],
) -> None:
    source, _ = large
    wanted = [str(row) for row in range(5, COUNT, 100)]
    sampling = sample_source(source, 1000, [*wanted, "unknown"])
    assert sampling.query_item_ids == set(wanted) and set(wanted) <= set(sampling.ids)
    assert len(set(sampling.ids)) == 1000


def test_coverage_is_that_of_the_whole_store(large: tuple[ArraySource, np.ndarray]) -> None:
    source, _ = large
    sampling = sample_source(source, 1000)
    found = measure_coverage(source, sampling)
    # Measured over all items, without the code under test.
    vectors = read_all(source).vectors
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    random = np.random.default_rng(5).choice(COUNT, 1000, replace=False)
    for rows, told in (
        (np.array(sampling.ids, np.int64), found.sample_distance),
        (random, found.random_distance),
    ):
        distances = 1 - (unit[::5] @ unit[rows].T).max(1)
        assert told == pytest.approx(distances.mean(), rel=0.05)


def test_repeated_ids_and_vectors_are_noticed(tmp_path: Path) -> None:
    vectors = np.random.default_rng(2).normal(size=(90, 8)).astype(np.float32)
    vectors[80:] = vectors[:10]
    vectors[79] = vectors[0]
    source = write(tmp_path / "g", vectors)
    unique = len(np.unique(vectors, axis=0))
    assert inspect(source).duplicates == 90 - unique == 11
    np.save(tmp_path / "g" / "ids.npy", np.arange(90) // 2)
    with pytest.raises(InvalidInputError, match="each id once, got '0', '1'"):
        sample_source(ArraySource(tmp_path / "g"), 20)


def test_an_id_with_a_line_break_is_refused_with_a_way_out() -> None:
    with pytest.raises(InvalidInputError, match=r"got 'b\\nc'. Choose another sample by --seed"):
        encode_ids(["a", "b\nc"], "texts")
