"""Pages of items, and changes by filter, against loops over everything."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nobackfill.errors import InvalidInputError
from nobackfill.gallery import edits, listing
from nobackfill.gallery.filter_engine import FilterEngine, passing_labels
from nobackfill.gallery.filters import Exists, Not, OneOf, Range
from nobackfill.gallery.listing import ListingPosition
from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.gallery.store import MOST_METADATA_BYTES, Change, NewVectors
from tests.gallery.making import ids, spec, vectors

COUNT = 30
# Several are equal, some have none.
UNCERTAINTY = [0.5, 0.25, 0.5, 1e-9, 2.0]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteGallery]:
    store = SqliteGallery.create(tmp_path / "g.sqlite", spec())
    new = NewVectors(spec().space, vectors(COUNT, 1))
    store.put(ids(COUNT), [new], metadata=[{"n": n, "odd": bool(n % 2)} for n in range(COUNT)])
    with store.transaction() as connection:
        number = store.space(spec().space).table_number
        connection.executemany(
            f"UPDATE vectors_{number} SET uncertainty = ? WHERE label = ?",
            [(UNCERTAINTY[n % 5], n + 1) for n in range(20)],
        )
    with store:
        yield store


def pages(
    store: SqliteGallery, size: int, allowed: Labels | None, *, least_certain: bool
) -> list[int]:
    """Every label, page by page, through the token's text."""
    found: list[int] = []
    after = None
    while True:
        items, last = listing.read_items_page(
            store,
            spec().space,
            size,
            start_after=after,
            matches=allowed,
            least_certain=least_certain,
        )
        assert len(items) <= size
        found += [item.label for item, _ in items]
        if last is None:
            return found
        after = ListingPosition.from_token(last.to_token(), least_certain=least_certain)
        assert after == last


@pytest.mark.parametrize("size", [1, 3, 20, 100])
@pytest.mark.parametrize("odd", [False, True])
def test_pages_bring_every_item_once_in_order(store: SqliteGallery, size: int, odd: bool) -> None:
    labels = np.arange(1, COUNT + 1)
    allowed = passing_labels(store, OneOf("odd", (True,))) if odd else None
    if odd:
        labels = labels[1::2]
    assert pages(store, size, allowed, least_certain=False) == labels.tolist()
    doubt = {label: UNCERTAINTY[(label - 1) % 5] for label in labels.tolist() if label <= 20}
    expected = sorted(doubt, key=lambda label: (-doubt[label], label))
    assert pages(store, size, allowed, least_certain=True) == expected
    item, place = listing.read_items_page(store, spec().space, 1, least_certain=True)[0][0]
    assert item.uncertainty == place.uncertainty == 2.0


@pytest.mark.parametrize("limit", [0, -1])
@pytest.mark.parametrize("least_certain", [False, True])
def test_a_page_without_items_is_refused(
    store: SqliteGallery, limit: int, least_certain: bool
) -> None:
    with pytest.raises(InvalidInputError, match="expected at least 1 item, got"):
        listing.read_items_page(store, spec().space, limit, least_certain=least_certain)


@pytest.mark.parametrize("token", ["x", "1:", "1:x", "-1", "9" * 20, "\u0661", "1:0.5:2"])
def test_what_is_no_token_is_refused(token: str) -> None:
    with pytest.raises(InvalidInputError, match="page_token"):
        ListingPosition.from_token(token, least_certain=":" in token)
    with pytest.raises(InvalidInputError, match="page_token"):
        ListingPosition.from_token("5", least_certain=True)
    with pytest.raises(InvalidInputError, match="page_token"):
        ListingPosition.from_token("5:0.5", least_certain=False)


def test_items_are_deleted_by_filter(store: SqliteGallery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edits, "PIECE_ITEMS", 4)
    filtering = FilterEngine(store)
    chosen = edits.select_matches(filtering, Range("n", at_least=10, less_than=20))
    # What ceases to pass before its turn stays.
    edits.change_metadata(store, edits.select_ids(store, ["item-12"]), {"n": 99}, ())
    assert edits.delete_selected(store, chosen) == 9
    left = [n for n in range(COUNT) if not 10 <= n < 20 or n == 12]
    assert passing_labels(store, Exists("n")).tolist() == [n + 1 for n in left]
    assert filtering.find_matches(Exists("n")).labels().tolist() == [n + 1 for n in left]
    assert store.count() == len(left)


def test_metadata_is_set_and_removed(store: SqliteGallery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edits, "PIECE_ITEMS", 4)
    filtering = FilterEngine(store)
    told: list[Change] = []
    store.subscribe(told.append)
    chosen = edits.select_matches(filtering, Range("n", less_than=10))
    assert (
        edits.change_metadata(store, chosen, {"tags": ["a", "b"], "n": 2**60}, ("odd", "none"))
        == 10
    )
    assert sorted(label for one in told for label in one.metadata_labels.tolist()) == [
        *range(1, 11)
    ]
    assert not any(one.added_vectors or len(one.deleted_labels) for one in told)
    item = store.get("item-3")
    assert item is not None and item.metadata == {"tags": ["a", "b"], "n": 2**60}
    for filtered in (OneOf("tags", ("b",)), Not(Exists("odd")), OneOf("n", (2**60,))):
        assert filtering.find_matches(filtered).labels().tolist() == [*range(1, 11)]
        assert passing_labels(store, filtered).tolist() == [*range(1, 11)]


def test_what_would_become_too_large_stays_as_it_is(store: SqliteGallery) -> None:
    many = edits.select_ids(store, ids(COUNT))
    text = "x" * (MOST_METADATA_BYTES - 30)
    edits.change_metadata(store, edits.select_ids(store, ["item-3"]), {"text": text}, ())
    with pytest.raises(InvalidInputError, match='item "item-3": metadata: expected at most 65536'):
        edits.change_metadata(store, many, {"more": "y" * 20}, ())
    assert not len(passing_labels(store, Exists("more")))
    assert edits.change_metadata(store, many, {"more": "y" * 20}, ("text",)) == COUNT
    assert len(passing_labels(store, Exists("more"))) == COUNT


def test_giving_up_leaves_whole_pieces(
    store: SqliteGallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edits, "PIECE_ITEMS", 4)

    def stop() -> None:
        raise TimeoutError

    chosen = edits.select_matches(FilterEngine(store), Exists("n"))
    with pytest.raises(TimeoutError):
        edits.delete_selected(store, chosen, stop)
    assert store.count() == COUNT - 4
    assert edits.delete_selected(store, chosen) == COUNT - 4
