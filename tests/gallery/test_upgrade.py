"""Upgrades: whole, resumed, raced, refused."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from nobackfill.errors import InvalidInputError, UnusableOutputError
from nobackfill.gallery import staging
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.gallery.staging import UpgradeOrder, UpgradeProgress, estimate_upgrade, run_upgrade
from nobackfill.vectors import Vectors
from tests.gallery.making import DIM, SIDE_DIM, Carried, Linear, filled, ids, put, rows, spec

ONE, TWO = spec(1).space, spec(2).space
Step = Callable[[int, SqliteGallery], None]


class Watched(Linear):
    """Calls `then` with the number of the chunk before it gives its outputs."""

    def __init__(self, store: SqliteGallery, then: Step) -> None:
        super().__init__()
        self.store, self.then = store, then

    def run(self, embedding: Vectors, side: Vectors | None) -> Carried:
        result = super().run(embedding, side)
        self.then(self.calls, self.store)
        return result


def test_every_item_is_carried_with_its_side_information(tmp_path: Path) -> None:
    linear = Linear()
    seen: list[UpgradeProgress] = []
    with filled(tmp_path / "g.sqlite", 25) as store:
        outcome = run_upgrade(store, linear, spec(2), items_per_chunk=10, on_progress=seen.append)
        assert (outcome.written_count, outcome.left_behind_count, outcome.was_stopped) == (
            25,
            0,
            False,
        )
        before, after = rows(store, ONE), rows(store, TWO)
        assert sorted(after) == sorted(before)
        for label, (old, old_side, _) in before.items():
            new, new_side, origin = after[label]
            assert old_side is not None and new_side is not None and origin == "upgraded"
            x, s = np.frombuffer(old, np.float32), np.frombuffer(old_side, np.float32)
            got, got_side = np.frombuffer(new, np.float32), np.frombuffer(new_side, np.float32)
            np.testing.assert_allclose(got, x @ linear.embedding, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(got_side, s @ linear.side, rtol=1e-4, atol=1e-5)
        assert [(p.complete_count, p.item_count, p.written_count) for p in seen] == [
            (10, 25, 10), (20, 25, 20), (25, 25, 25),
        ]  # fmt: skip
        again = run_upgrade(store, linear, spec(2))
        assert again.written_count == 0 and linear.calls == 3


def test_another_dimension_is_no_obstacle(tmp_path: Path) -> None:
    wide = spec(2, dim=20)
    with filled(tmp_path / "g.sqlite", 5) as store:
        run_upgrade(store, Linear(to_dim=20), wide)
        assert store.load_vectors(wide.space)[1].shape == (5, 20)


def after(chunks: int) -> Callable[[], bool]:
    """Asks to stop once so many chunks are done."""
    asked = iter(range(1000))
    return lambda: next(asked) >= chunks


@pytest.mark.slow
@pytest.mark.parametrize("order", ["label", "uncertainty"])
def test_a_stopped_run_goes_on_and_gives_the_same_bits(tmp_path: Path, order: UpgradeOrder) -> None:
    results = []
    for name, stops in (("whole", 0), ("stopped", 4), ("ahead", 0), ("ahead and stopped", 4)):
        with filled(tmp_path / f"{name}.sqlite", 50) as store:
            # The source is itself an upgrade, with uncertainties to order by.
            run_upgrade(store, Linear(), spec(2))
            second = Linear(seed=3)
            for attempt in range(stops + 1):
                outcome = run_upgrade(
                    store, second, spec(3), source_space=TWO, items_per_chunk=8, order=order,
                    should_stop=after(1 if attempt < stops else 99),
                    transform_ahead="ahead" in name,
                )  # fmt: skip
                assert outcome.was_stopped == (attempt < stops)
            assert second.calls == 7 and outcome.left_behind_count == 0
            results.append(rows(store, spec(3).space))
    assert all(result == results[0] for result in results) and len(results[0]) == 50


def test_a_chunk_that_fails_ahead_takes_none_of_those_before_it(tmp_path: Path) -> None:
    def fail(chunk: int, _: SqliteGallery) -> None:
        if chunk == 3:
            raise UnusableOutputError("no vectors", [1])

    with filled(tmp_path / "g.sqlite", 50) as store:
        written: list[int] = []
        with pytest.raises(UnusableOutputError, match="item-21"):
            run_upgrade(
                store, Watched(store, fail), spec(2), items_per_chunk=10, transform_ahead=True,
                on_progress=lambda progress: written.append(progress.complete_count),
            )  # fmt: skip
        assert written == [10, 20] and len(rows(store, TWO)) == 20


def test_a_stop_asked_for_after_the_last_chunk_changes_nothing(tmp_path: Path) -> None:
    with filled(tmp_path / "g.sqlite", 20) as store:
        outcome = run_upgrade(store, Linear(), spec(2), items_per_chunk=10, should_stop=after(2))
        assert (outcome.written_count, outcome.was_stopped) == (20, False)


MEASURED = """
import resource, sys
from pathlib import Path
import numpy as np
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.gallery.store import NewVectors
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.gallery.staging import run_upgrade
from tests.gallery.making import Carried

class Same:
    reads_side = True

    def run(self, embedding, side):
        return Carried(embedding, side, embedding[:, 0])

one, two = (SpaceSpec(f"sp-{n}", n, 128, "squared_l2", False, f"ss-{n}", 128) for n in (1, 2))
with SqliteGallery.create(Path(sys.argv[1]), one) as store:
    block = np.random.default_rng(1).standard_normal((1000, 128)).astype(np.float32)
    for start in range(0, int(sys.argv[2]), 1000):
        names = [f"item-{n}" for n in range(start, start + 1000)]
        store.put(names, [NewVectors("sp-1", block, block)])
    run_upgrade(store, Same(), two)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_memory_does_not_grow_with_the_gallery(tmp_path: Path) -> None:
    peaks = []
    for count in (4_000, 24_000):
        command = [sys.executable, "-c", MEASURED, str(tmp_path / f"{count}"), str(count)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout) / 1024)
    # 20,000 items more are 20 MB of vectors read and 20 MB written.
    assert peaks[1] - peaks[0] < 8, peaks


def test_the_least_certain_go_first(tmp_path: Path) -> None:
    with filled(tmp_path / "g.sqlite", 40) as store:
        run_upgrade(store, Linear(), spec(2))
        worst = [item.label for item in staging.least_certain_items(store, TWO, 10)]
        run_upgrade(
            store, Linear(seed=3), spec(3), source_space=TWO, items_per_chunk=10,
            order="uncertainty", should_stop=after(1),
        )  # fmt: skip
        assert sorted(rows(store, spec(3).space)) == sorted(worst)


@pytest.mark.parametrize("chunk", [0, -1])
def test_a_chunk_without_items_is_refused(tmp_path: Path, chunk: int) -> None:
    with filled(tmp_path / "g.sqlite", 3) as store:
        with pytest.raises(InvalidInputError, match="expected at least 1, got"):
            run_upgrade(store, Linear(), spec(2), items_per_chunk=chunk)
        assert len(store.spaces()) == 1


def test_puts_and_deletes_meanwhile_are_resolved(tmp_path: Path) -> None:
    def race(call: int, store: SqliteGallery) -> None:
        if call == 1:
            # Of the chunk that is being carried, of a later one, and new ones.
            store.delete(["item-3", "item-27"])
            put(store, ["item-5", "item-28"], seed=50)
            put(store, ids(5, start=100), seed=51)

    with filled(tmp_path / "g.sqlite", 30) as store:
        outcome = run_upgrade(store, Watched(store, race), spec(2), items_per_chunk=10)
        assert outcome.left_behind_count == 0
        source, target = rows(store, ONE), rows(store, TWO)
        # Nothing that was deleted came back, and what was put again is carried from its new self.
        assert sorted(target) == sorted(source) == sorted(i.label for i in store.list_items())
        assert store.get("item-3") is None
        linear = Linear()
        for label, (old, _, _) in source.items():
            expected = np.frombuffer(old, np.float32) @ linear.embedding
            got = np.frombuffer(target[label][0], np.float32)
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
        staging.flip(store, TWO)


def test_what_has_a_native_vector_already_is_not_overwritten(tmp_path: Path) -> None:
    with filled(tmp_path / "g.sqlite", 10) as store:
        staging.add_staging_space(store, spec(2))
        put(store, ["native"], release=2, seed=3)
        before = rows(store, TWO)
        run_upgrade(store, Linear(), spec(2))
        after = rows(store, TWO)
        assert len(after) == 11 and after[11] == before[11]


def test_items_without_side_information_stay_behind_and_are_named(tmp_path: Path) -> None:
    with filled(tmp_path / "g.sqlite", 5) as store:
        put(store, ["bare-1", "bare-2"], seed=4, side=False)
        guess = estimate_upgrade(store, Linear(), spec(2), tmp_path)
        assert (guess.item_count, guess.left_behind_count) == (5, 2)
        outcome = run_upgrade(store, Linear(), spec(2))
        assert (outcome.written_count, outcome.left_behind_count) == (5, 2)
        names = [item.id for item in staging.items_without_vector(store, TWO)]
        assert names == ["bare-1", "bare-2"]
        assert run_upgrade(store, Linear(reads_side=False), spec(3)).left_behind_count == 0


class Carrying(Linear):
    """Reads no side-information but hands it on: the release kept its predecessor's encoder."""

    def run(self, embedding: Vectors, side: Vectors | None) -> Carried:
        good = super().run(embedding, side)
        return Carried(good.embedding, side, good.uncertainty)


def test_side_information_goes_along_where_there_is_some(tmp_path: Path) -> None:
    with filled(tmp_path / "g.sqlite", 5) as store:
        put(store, ["bare-1", "bare-2"], seed=4, side=False)
        put(store, ["item-9"], seed=5)
        outcome = run_upgrade(store, Carrying(reads_side=False), spec(2), items_per_chunk=2)
        assert (outcome.written_count, outcome.left_behind_count) == (8, 0)
        before, after = rows(store, ONE), rows(store, TWO)
        assert {label: row[1] for label, row in after.items()} == {
            label: row[1] for label, row in before.items()
        }
        assert after[6][1] is None and after[8][1] is not None


class Broken(Linear):
    """Gives something that is no vector of the space, from the second chunk on."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def run(self, embedding: Vectors, side: Vectors | None) -> Carried:
        good = super().run(embedding, side)
        if self.calls < 2:
            return good
        broken, doubt = good.embedding.copy(), np.ones(len(embedding), np.float32)
        if self.kind == "nan":
            broken[3, 2] = np.nan
        elif self.kind == "dimension":
            broken = broken[:, :-1]
        elif self.kind == "rows":
            broken = broken[:-1]
        elif self.kind == "uncertainty":
            doubt[0] = np.inf
        sides = np.ones((len(broken), SIDE_DIM + (self.kind == "side")), np.float32)
        return Carried(broken, sides, doubt)


@pytest.mark.parametrize("kind", ["nan", "dimension", "rows", "uncertainty", "side"])
def test_bad_outputs_are_refused_chunk_by_chunk(tmp_path: Path, kind: str) -> None:
    with filled(tmp_path / "g.sqlite", 20) as store:
        source = rows(store, ONE)
        with pytest.raises(InvalidInputError):
            run_upgrade(store, Broken(kind), spec(2), items_per_chunk=8)
        assert sorted(rows(store, TWO)) == list(range(1, 9))
        assert store.active().spec.space == ONE and rows(store, ONE) == source


def test_an_estimate_changes_nothing_and_grows_with_what_is_to_do(tmp_path: Path) -> None:
    with filled(tmp_path / "g.sqlite", 300) as store:
        before = (tmp_path / "g.sqlite").read_bytes()
        guess = estimate_upgrade(store, Linear(), spec(2), tmp_path)
        assert (tmp_path / "g.sqlite").read_bytes() == before and len(store.spaces()) == 1
        assert guess.item_count == 300 and guess.seconds > 0
        assert guess.growth_bytes >= 300 * 4 * (DIM + SIDE_DIM)
        run_upgrade(store, Linear(), spec(2))
        done = estimate_upgrade(store, Linear(), spec(2), tmp_path)
        assert (done.item_count, done.seconds, done.growth_bytes, done.left_behind_count) == (
            0,
            0,
            0,
            0,
        )


def test_the_original_can_be_the_source_of_a_later_upgrade(tmp_path: Path) -> None:
    with filled(tmp_path / "g.sqlite", 10) as store:
        run_upgrade(store, Linear(), spec(2))
        staging.flip(store, TWO)
        direct = Linear(seed=5)
        run_upgrade(store, direct, spec(3), source_space=ONE)
        original = np.frombuffer(rows(store, ONE)[1][0], np.float32)
        got = np.frombuffer(rows(store, spec(3).space)[1][0], np.float32)
        np.testing.assert_allclose(got, original @ direct.embedding, rtol=1e-4, atol=1e-5)
