"""The life of spaces on every engine: staged, carried, flipped, rolled back, dropped."""

import numpy as np
import pytest

from nobackfill.errors import (
    IncompatibleSpaceError,
    InvalidInputError,
    NotFoundError,
    PreconditionError,
)
from nobackfill.gallery.gallery_store import GalleryStore
from nobackfill.gallery.staging import UpgradeOrder, UpgradeOutcome, run_upgrade
from nobackfill.gallery.store import Change, NewVectors
from tests.gallery.making import DIM, SIDE_DIM, Linear, ids, spec, vectors
from tests.stores.conftest import Engine
from tests.stores.test_items import ONE, TWO, filled


def states(store: GalleryStore) -> dict[int, str]:
    return {info.spec.release: info.state for info in store.spaces()}


def test_a_gallery_is_carried_flipped_and_rolled_back(engine: Engine) -> None:
    store = filled(engine, 40)
    heard: list[Change] = []
    store.subscribe(heard.append)
    linear = Linear()
    outcome = run_upgrade(store, linear, spec(2), items_per_chunk=16)
    assert outcome == UpgradeOutcome(40, 0, False)
    labels, content = store.load_vectors(ONE)
    np.testing.assert_array_equal(store.load_vectors(TWO)[0], labels)
    np.testing.assert_allclose(store.load_vectors(TWO)[1], content @ linear.embedding, rtol=1e-5)
    items = store.items(labels, TWO)
    assert {item.origin for item in items if item} == {"upgraded"}
    doubt = np.array([item.uncertainty for item in items if item], np.float64)
    np.testing.assert_allclose(doubt, np.abs(content[:, 0]), rtol=1e-6)
    store.flip(TWO, state={"note": {"a": [1, None]}})
    assert states(store) == {1: "previous", 2: "active"} and store.active().spec == spec(2)
    assert store.state() == {"note": {"a": [1, None]}}
    assert store.rollback(state={"note": None}) == ONE
    assert states(store) == {1: "active", 2: "staging"} and store.state() == {}
    store = engine.open_again(store)
    assert states(store) == {1: "active", 2: "staging"} and store.count(TWO) == 40
    store.drop_space(TWO)
    assert states(store) == {1: "active"}
    with pytest.raises(IncompatibleSpaceError):
        store.count(TWO)
    assert any(change.spaces_changed for change in heard)


def test_spaces_refuse_what_would_break_them(engine: Engine) -> None:
    store = filled(engine, 5)
    with pytest.raises(PreconditionError, match="active"):
        store.drop_space(ONE)
    with pytest.raises(NotFoundError, match="no older release"):
        store.rollback()
    store.add_staging_space(spec(2))
    store.add_staging_space(spec(2))
    with pytest.raises(InvalidInputError, match="dim"):
        store.add_staging_space(spec(2, dim=DIM + 1))
    with pytest.raises(PreconditionError, match="5 items"):
        store.flip(TWO)
    assert store.count_items_without_vector(TWO) == 5
    assert [item.id for item in store.items_without_vector(TWO, limit=2)] == ids(2)
    assert [item.id for item in store.items_without_vector(TWO)] == ids(5)
    store.flip(TWO, leave_behind=True)
    assert states(store) == {1: "previous", 2: "active"}


def test_a_stopped_upgrade_goes_on_where_it_ended(engine: Engine) -> None:
    store = filled(engine, 40)
    asked = iter(range(100))
    stopped = run_upgrade(
        store, Linear(), spec(2), items_per_chunk=10, should_stop=lambda: next(asked) >= 2
    )
    assert stopped == UpgradeOutcome(20, 20, True)
    store = engine.open_again(store)
    assert run_upgrade(store, Linear(), spec(2)) == UpgradeOutcome(20, 0, False)


@pytest.mark.parametrize("order", ["label", "uncertainty"])
def test_windows_meet_puts_and_deletions(engine: Engine, order: UpgradeOrder) -> None:
    """What is put while an upgrade runs goes along, what is deleted does not come back."""
    store = filled(engine, 30)
    seen = 0

    def race(progress: object) -> None:
        nonlocal seen
        seen += 1
        if seen <= 3:
            new = NewVectors(ONE, vectors(2, 50 + seen), vectors(2, 60 + seen, SIDE_DIM))
            # One that is new, and one in another's place.
            store.put([f"new-{seen}", f"item-{20 + seen}"], [new])
            store.delete([f"item-{seen}"])

    run_upgrade(store, Linear(), spec(2), items_per_chunk=10, order=order, on_progress=race)
    run_upgrade(store, Linear(), spec(2))
    assert store.count_items_without_vector(TWO) == 0
    names = {item.id for item, _ in store.list_page(ONE, 100)[0]}
    gone, came = {"item-1", "item-2", "item-3"}, {"new-1", "new-2", "new-3"}
    assert names == ({*ids(30)} - gone) | came
    assert store.load_vectors(TWO)[0].tolist() == store.load_vectors(ONE)[0].tolist()


def test_items_without_side_information_stay_behind_where_it_is_read(engine: Engine) -> None:
    store = filled(engine, 10)
    store.put(["bare"], [NewVectors(ONE, vectors(1, 9))])
    assert run_upgrade(store, Linear(), spec(2)).left_behind_count == 1
    assert run_upgrade(store, Linear(reads_side=False), spec(3)).left_behind_count == 0


def test_samples_have_both_vectors(engine: Engine) -> None:
    store = filled(engine, 60)
    run_upgrade(store, Linear(), spec(2), items_per_chunk=20)
    store.delete(ids(30))
    labels, first, second = store.sample_pairs(ONE, TWO, 12)
    assert 0 < len(labels) <= 12 and (np.diff(labels) > 0).all()
    for row, label in enumerate(labels.tolist()):
        one, two = store.vector(label, ONE), store.vector(label, TWO)
        assert one is not None and two is not None
        assert one[0].tolist() == first[row].tolist() and two[0].tolist() == second[row].tolist()
    assert len(store.sample_pairs(ONE, ONE, 100)[0]) == 30


def test_a_sample_is_one_where_labels_have_a_gap(engine: Engine) -> None:
    store = filled(engine, 41)
    for seed in range(20):
        # Another picture of an item takes a new label: one stays at the first.
        again = NewVectors(ONE, vectors(40, seed), vectors(40, seed, SIDE_DIM))
        store.put(ids(41)[1:], [again], digests=[f"{seed}-{n}" for n in range(40)])
    assert store.load_vectors(ONE)[0].max() > 400
    assert 10 <= len(store.sample_pairs(ONE, ONE, 20)[0]) <= 20


def test_an_estimate_changes_nothing(engine: Engine) -> None:
    store = filled(engine, 50)
    store.put(["bare"], [NewVectors(ONE, vectors(1, 9))])
    found = store.estimate_upgrade(Linear(), spec(2))
    assert (found.item_count, found.left_behind_count) == (
        50,
        1,
    ) and found.growth_bytes > 50 * 4 * DIM
    assert states(store) == {1: "active"}
    run_upgrade(store, Linear(), spec(2))
    assert store.estimate_upgrade(Linear(), spec(2)).item_count == 0
