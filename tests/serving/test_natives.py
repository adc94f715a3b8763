"""The file of native vectors: each process that has it open answers from what it holds now."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from nobackfill.serving.natives import NativeVectorFile, digest_old_vector
from nobackfill.vectors import Vectors

DIM = 4
IDS = ("a", "b", "c", "d")
VECTORS = np.eye(DIM, dtype=np.float32)
DIGESTS = [digest_old_vector(vector) for vector in VECTORS]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[NativeVectorFile, NativeVectorFile]]:
    """Two that have one file open, as two processes have: each has its own connection."""
    path = tmp_path / "natives.db"
    with (
        closing(NativeVectorFile(path, "model", DIM)) as one,
        closing(NativeVectorFile(path, "model", DIM)) as other,
    ):
        one.store_vectors(IDS, DIGESTS, VECTORS)
        for natives in (one, other):
            assert held(natives) == {*IDS}
        yield one, other


def held(natives: NativeVectorFile) -> set[str]:
    """Return the ids that natives answer with; each way to ask must give the same."""
    by_id = natives.read_vectors([*IDS, "e"])
    assert set(natives.nearest_ids(query(0), 9)) == by_id.keys()
    assert len(natives) == len(by_id)
    return set(by_id)


def query(row: int) -> Vectors:
    return VECTORS[row : row + 1]


def test_a_deletion_by_another_is_followed(two: tuple[NativeVectorFile, NativeVectorFile]) -> None:
    one, other = two
    one.delete_vectors(["a", "unknown"])
    assert other.nearest_ids(query(0), 1) != ["a"]
    assert held(other) == held(one) == {"b", "c", "d"}
    one.delete_outdated({"b": DIGESTS[1], "c": DIGESTS[0]})
    assert held(other) == {"c", "d"}
    other.delete_vectors(["c", "d"])
    assert held(one) == held(other) == set()


@pytest.mark.parametrize("count", [0, -1, -9])
def test_no_hits_are_asked_for(two: tuple[NativeVectorFile, NativeVectorFile], count: int) -> None:
    """A negative count gave one id, or numpy's error."""
    assert two[0].nearest_ids(query(0), count) == []


def test_a_deletion_hides_behind_no_addition(
    two: tuple[NativeVectorFile, NativeVectorFile],
) -> None:
    """As many were added as deleted, and an item came back with another vector."""
    one, other = two
    one.delete_vectors(["a", "b"])
    one.store_vectors(["e", "b"], DIGESTS[:2], VECTORS[:2])
    assert held(other) == {"b", "c", "d", "e"}
    assert other.nearest_ids(query(0), 1) == ["e"]
    assert np.array_equal(other.read_vectors(["b"])["b"].vector, VECTORS[1])


def test_a_deletion_while_the_file_was_closed_is_followed(
    two: tuple[NativeVectorFile, NativeVectorFile],
) -> None:
    one, other = two
    other.close()
    one.delete_vectors(["d"])
    assert held(other) == {"a", "b", "c"}
    other.close()
    one.delete_vectors(["c"])
    one.store_vectors(["e"], DIGESTS[:1], VECTORS[:1])
    assert held(other) == {"a", "b", "e"}


def test_many_deletions_leave_no_row_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "natives.db"
    vectors = np.random.default_rng(0).normal(size=(3000, DIM)).astype(np.float32)
    ids = [f"i{row}" for row in range(len(vectors))]
    with (
        closing(NativeVectorFile(path, "model", DIM)) as one,
        closing(NativeVectorFile(path, "model", DIM)) as other,
    ):
        one.store_vectors(ids, [digest_old_vector(vector) for vector in vectors], vectors)
        assert len(other.nearest_ids(query(0), 9)) == 9
        one.delete_vectors(ids[5:])
        found = other.nearest_ids(query(0), 9, "inner_product")
        assert found == [ids[row] for row in np.argsort(-vectors[:5, 0], kind="stable")]
