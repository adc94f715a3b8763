"""Putting, reading, listing and deleting items, on every engine."""

import numpy as np
import pytest

from nobackfill.errors import IncompatibleSpaceError, InvalidInputError
from nobackfill.gallery import edits
from nobackfill.gallery.filters import Exists, Matches, Not, OneOf, Range
from nobackfill.gallery.gallery_store import GalleryStore
from nobackfill.gallery.listing import ListingPosition
from nobackfill.gallery.spec import Metadata
from nobackfill.gallery.store import Change, NewVectors
from tests.gallery.making import DIM, SIDE_DIM, ids, spec, vectors
from tests.stores.conftest import Engine

ONE, TWO = spec(1).space, spec(2).space


def filled(engine: Engine, count: int, seed: int = 1) -> GalleryStore:
    """Items `item-0` … of release 1, with side-information and a number as metadata."""
    store = engine.create(spec())
    new = NewVectors(ONE, vectors(count, seed), vectors(count, seed + 1, SIDE_DIM))
    store.put(ids(count), [new], metadata=[{"n": n, "odd": bool(n % 2)} for n in range(count)])
    return store


def test_what_was_put_is_there_bit_for_bit_after_opening_again(engine: Engine) -> None:
    embedding, side = vectors(50, 3), vectors(50, 4, SIDE_DIM)
    embedding[7, :3] = [-0.0, 1e-40, 1e14]
    store = engine.create(spec())
    metadata: list[Metadata] = [
        {"n": float(n), "even": n % 2 == 0, "name": f"bild ü \x07 {n}", "tags": ["a", ""],
         "big": 2**63 - 1, "huge": 1e300, "tiny": -5e-324}
        for n in range(50)
    ]  # fmt: skip
    new = NewVectors(ONE, embedding, side)
    result = store.put(ids(50), [new], digests=[f"d{n}" for n in range(50)], metadata=metadata)
    assert result.changed_mask.all() and len(set(result.labels.tolist())) == 50
    store = engine.open_again(store)
    labels, loaded = store.load_vectors(ONE)
    np.testing.assert_array_equal(labels, result.labels)
    assert loaded.tobytes() == embedding.tobytes()
    item = store.get("item-7")
    assert item is not None and item.label == result.labels[7] and item.digest == "d7"
    assert item.metadata == metadata[7] and isinstance(item.metadata["n"], float)
    vector = store.vector(item.label, ONE)
    assert vector is not None and vector.tobytes() == embedding[7:8].tobytes()
    _, read, sides = next(store.windows_of_missing_vectors(ONE, spec(2), True).chunks("label", 100))
    assert read.tobytes() == embedding.tobytes()
    assert sides is not None and sides.tobytes() == side.tobytes()
    assert store.vector(10**9, ONE) is None and store.get("nobody") is None
    assert store.count() == store.count(ONE) == 50


def test_other_content_gets_a_new_label_and_the_same_changes_nothing(engine: Engine) -> None:
    store = engine.create(spec())
    heard: list[Change] = []
    first = store.put(["a", "b"], [NewVectors(ONE, vectors(2, 1))], digests=["x", "y"])
    store.subscribe(heard.append)
    again = store.put(["a", "b"], [NewVectors(ONE, vectors(2, 2))], digests=["x", "y"])
    assert again.labels.tolist() == first.labels.tolist() and not again.changed_mask.any()
    assert store.load_vectors(ONE)[1].tolist() == vectors(2, 1).tolist()
    third = store.put(["b", "a"], [NewVectors(ONE, vectors(2, 2))], digests=["y", "z"])
    assert third.changed_mask.tolist() == [False, True] and third.labels[1] > first.labels.max()
    assert store.items([int(first.labels[0])]) == [None]
    assert store.put(["b"], [NewVectors(ONE, vectors(1, 2))]).changed_mask.all()
    old_a, old_b = first.labels.tolist()
    assert [change.deleted_labels.tolist() for change in heard] == [[], [old_a], [old_b]]


def test_labels_are_never_used_twice(engine: Engine) -> None:
    store = filled(engine, 5)
    most = int(store.load_vectors(ONE)[0].max())
    assert store.delete([*ids(5), "nobody", "a\0b", "\ud800"]) == 5
    assert store.put(["new"], [NewVectors(ONE, vectors(1, 1))]).labels[0] > most


def test_what_is_refused_leaves_nothing(engine: Engine) -> None:
    store = filled(engine, 3)
    good = NewVectors(ONE, vectors(2, 1))
    for names, new in (
        (["a", "a"], good), (["", "b"], good), (["a\0", "b"], good), (["a"], good),
        (["a", "b"], NewVectors(ONE, vectors(2, 1, DIM + 1))),
        (["a", "b"], NewVectors(ONE, np.full((2, DIM), np.nan, np.float32))),
    ):  # fmt: skip
        with pytest.raises(InvalidInputError):
            store.put(names, [new])
    with pytest.raises(IncompatibleSpaceError):
        store.put(["a", "b"], [good, NewVectors(TWO, vectors(2, 1))])
    with pytest.raises(IncompatibleSpaceError):
        store.load_vectors(TWO)
    assert store.count() == store.count(ONE) == 3


def test_a_native_vector_takes_the_place_of_a_carried_one(engine: Engine) -> None:
    store = engine.create(spec())
    old = NewVectors(ONE, vectors(3, 1))
    labels = store.put(["a", "b", "c"], [old], digests=["x"] * 3).labels
    store.add_staging_space(spec(2))
    written = store.write_vectors(TWO, labels[::-1], vectors(3, 2)[::-1], uncertainty=[3.0, 2, 1])
    assert written.tolist() == labels.tolist()
    store.write_vectors(TWO, labels[2:], vectors(1, 3), origin="re-embedded", replace=True)
    native = vectors(3, 4)
    store.put(["a", "c"], [NewVectors(TWO, native[[0, 2]])], digests=["x"] * 2)
    again = NewVectors(TWO, vectors(3, 5), origin="upgraded")
    store.put(["a", "b", "c"], [again], digests=["x"] * 3)
    items = store.items(labels, TWO)
    assert [item and item.origin for item in items] == ["native", "upgraded", "re-embedded"]
    assert [item and item.uncertainty for item in items] == [None, 2.0, None]
    expected = np.stack([native[0], vectors(3, 2)[1], vectors(1, 3)[0]])
    np.testing.assert_array_equal(store.load_vectors(TWO)[1], expected)
    assert [item.id for item in store.find_migrated(TWO, ["a", "b", "nobody"])] == ["b"]


def pages(
    store: GalleryStore, size: int, allowed: Matches | None, *, least_certain: bool
) -> list[int]:
    found: list[int] = []
    after = None
    while True:
        items, after = store.list_page(
            ONE, size, start_after=after, matches=allowed, least_certain=least_certain
        )
        found += [item.label for item, _ in items]
        if after is None:
            return found
        assert after == ListingPosition.from_token(after.to_token(), least_certain=least_certain)


@pytest.mark.parametrize("size", [1, 7, 100])
def test_pages_bring_every_item_once_in_order(engine: Engine, size: int) -> None:
    store = filled(engine, 30)
    labels = store.load_vectors(ONE)[0]
    doubt = np.array([0.5, 0.25, 0.5, 1e-9, 2.0] * 4, np.float32)
    content = store.load_vectors(ONE)[1][:20]
    store.write_vectors(ONE, labels[:20], content, uncertainty=doubt, replace=True)
    odd = engine.filtering(store).find_matches(OneOf("odd", (True,)))
    for allowed, step in ((None, slice(None)), (odd, slice(1, None, 2))):
        assert pages(store, size, allowed, least_certain=False) == labels[step].tolist()
        uncertain = dict(zip(labels[:20].tolist(), doubt.tolist(), strict=True))
        of = [label for label in labels[step].tolist() if label in uncertain]
        expected = sorted(of, key=lambda label: (-uncertain[label], label))
        assert pages(store, size, allowed, least_certain=True) == expected


@pytest.mark.parametrize("least_certain", [False, True])
def test_a_page_of_no_items_is_refused(engine: Engine, least_certain: bool) -> None:
    store = filled(engine, 3)
    for limit in (0, -1):
        with pytest.raises(InvalidInputError, match=f"at least 1 item, got {limit}"):
            store.list_page(ONE, limit, least_certain=least_certain)


def test_items_are_described_and_deleted_by_filter(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edits, "PIECE_ITEMS", 4)
    store = filled(engine, 30)
    filtering = engine.filtering(store)
    chosen = edits.select_matches(filtering, Range("n", at_least=10, less_than=20))
    # What ceases to pass before its turn stays.
    edits.change_metadata(store, edits.select_ids(store, ["item-12"]), {"n": 99}, ())
    assert edits.delete_selected(store, chosen) == 9
    assert store.count() == store.count(ONE) == 21
    rest = edits.select_matches(filtering, Range("n", less_than=10))
    assert (
        edits.change_metadata(store, rest, {"tags": ["a", "b"], "n": 2**60}, ("odd", "none")) == 10
    )
    item = store.get("item-3")
    assert item is not None and item.metadata == {"tags": ["a", "b"], "n": 2**60}
    changed = store.load_vectors(ONE)[0].tolist()[:10]
    for filtered in (OneOf("tags", ("b",)), Not(Exists("odd")), OneOf("n", (2**60,))):
        assert filtering.find_matches(filtered).labels().tolist() == changed
    with pytest.raises(InvalidInputError, match="item-0"):
        edits.change_metadata(store, rest_of(engine, store), {"x": "y" * 65_500}, ())
    assert len(filtering.find_matches(Exists("x"))) == 0


def rest_of(engine: Engine, store: GalleryStore) -> edits.Selection:
    return edits.select_matches(engine.filtering(store), OneOf("n", (2**60,)))


def test_groups_of_a_key(engine: Engine) -> None:
    store = engine.create(spec())
    metadata: list[Metadata] = [
        {"c": "red"},
        {"c": ["red", "blue", "red"]},
        {"c": 1},
        {"c": True},
        {"c": 1.0},
        {},
    ]
    new = NewVectors(ONE, vectors(6, 1))
    labels = store.put(ids(6), [new], metadata=metadata).labels.tolist()
    found = {(type(g.value), g.value): g for g in store.group_by_value("c", ONE)}
    assert {key: group.item_count for key, group in found.items()} == {
        (str, "red"): 2, (str, "blue"): 1, (int, 1): 2, (bool, True): 1,
    }  # fmt: skip
    assert found[str, "red"].labels.tolist() == labels[:2]
    assert not store.group_by_value("nobody", ONE)
