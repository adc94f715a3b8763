"""Every durable step of a gallery's life fails once: no acknowledged write is lost, none doubled.

After each failure the file is as it was before or after the operation in flight (an upgrade: with
some whole chunks of it), and the rest of the life then leads to the very same bits as an unbroken
one. The quick set kills at each step; `make faults` adds I/O errors, full disks and torn writes.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nobackfill.durable import FAULT_INJECTOR
from nobackfill.errors import CannotWriteError, NotFoundError
from nobackfill.gallery import staging
from nobackfill.gallery.search import graph_file, hnsw
from nobackfill.gallery.search.view import LiveView
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.gallery.staging import run_upgrade
from nobackfill.gallery.store import NewVectors
from tests.gallery.making import SIDE_DIM, Linear, ids, spec, vectors
from tests.support.crash import KILLED, count_steps, sweep

ONE, TWO = spec(1).space, spec(2).space
Dump = dict[str, list[tuple[Any, ...]]]


def new(space: str, count: int, seed: int) -> NewVectors:
    return NewVectors(space, vectors(count, seed), vectors(count, seed + 1, SIDE_DIM))


def put_all(store: SqliteGallery, _: Path) -> None:
    metadata = [{"n": float(n), "even": n % 2 == 0} for n in range(30)]
    store.put(ids(30), [new(ONE, 30, 1)], digests=[f"d{n}" for n in range(30)], metadata=metadata)


def replace_some(store: SqliteGallery, _: Path) -> None:
    store.put(ids(10, 25), [new(ONE, 10, 3)], digests=[f"e{n}" for n in range(10)])


def delete_some(store: SqliteGallery, _: Path) -> None:
    store.delete(["item-2", "item-26", "nobody"])


def upgrade(store: SqliteGallery, _: Path) -> None:
    run_upgrade(store, Linear(), spec(2), items_per_chunk=8)


def put_both(store: SqliteGallery, _: Path) -> None:
    store.put(["both-1", "both-2"], [new(ONE, 2, 5), new(TWO, 2, 7)], digests=["f", "g"])


def backfill(store: SqliteGallery, _: Path) -> None:
    content = vectors(2, 50)
    staging.write_vectors(store, TWO, np.array([5, 9]), content, origin="re-embedded", replace=True)


def flip(store: SqliteGallery, _: Path) -> None:
    staging.flip(store, TWO, state={"floor": 2})


def roll_back(store: SqliteGallery, _: Path) -> None:
    staging.rollback(store, state={"floor": 1})


def index(store: SqliteGallery, folder: Path) -> None:
    view = LiveView(store, TWO)
    view.compact(hnsw.build_index)
    base = view.snapshot().base.index
    assert isinstance(base, hnsw.HnswIndex)
    base.save(folder / "index")
    view.close()


def drop(store: SqliteGallery, _: Path) -> None:
    staging.drop_space(store, ONE)


LIFE = [
    put_all, replace_some, delete_some, upgrade, put_both, backfill, flip, roll_back, flip, index,
    drop,
]  # fmt: skip


def dump(store: SqliteGallery) -> Dump:
    """All that the file holds, bit for bit."""
    with store.read_snapshot() as connection:
        tables = ["items", "attributes", "spaces", "state", "sqlite_sequence"]
        found = connection.execute("SELECT name FROM sqlite_master WHERE name GLOB 'vectors_*'")
        names = tables + sorted(name for (name,) in found)
        return {
            name: sorted(connection.execute(f"SELECT * FROM {name}"), key=repr) for name in names
        }


def live(folder: Path, done: int = 0, told: Callable[[int], object] = lambda _: None) -> None:
    """The operations of LIFE from the `done`-th on, each told when it is acknowledged."""
    path = folder / "g.sqlite"
    try:
        store = SqliteGallery.open(path)
    except NotFoundError:
        store = SqliteGallery.create(path, spec())
    with store:
        for number in range(done, len(LIFE)):
            LIFE[number](store, folder)
            told(number + 1)


class Journal:
    """Acknowledgements that outlive a kill, written past the fault hooks."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "acknowledged"

    def tell(self, number: int) -> None:
        with self.path.open("a") as file:
            file.write(f"{number}\n")

    def last(self) -> int:
        return int(self.path.read_text().split()[-1]) if self.path.exists() else 0


@pytest.fixture
def unbroken(fast_tmp: Path) -> list[Dump]:
    """The file's content before the life, and after each of its operations."""
    folder = fast_tmp / "unbroken"
    folder.mkdir()
    with SqliteGallery.create(folder / "g.sqlite", spec()) as store:
        dumps = [dump(store)]
        for operation in LIFE:
            operation(store, folder)
            dumps.append(dump(store))
    return dumps


def is_part_of(found: Dump, before: Dump, after: Dump) -> bool:
    """Whether `found` is `before` and some of what an upgrade adds, whole rows only."""
    if found["items"] != before["items"] or found["vectors_1"] != before["vectors_1"]:
        return False
    return set(found.get("vectors_2", [])) <= set(after["vectors_2"])


def recover(folder: Path, unbroken: list[Dump], acknowledged: int) -> None:
    """Check what is there, live on, check the end."""
    if (folder / "g.sqlite").exists():
        with SqliteGallery.open(folder / "g.sqlite") as store:
            found = dump(store)
    else:
        found = unbroken[0]
    before, after = unbroken[acknowledged], unbroken[min(acknowledged + 1, len(LIFE))]
    done = acknowledged
    if found == after != before:
        done = min(acknowledged + 1, len(LIFE))
    elif found != before:
        assert LIFE[acknowledged] is upgrade and is_part_of(found, before, after)
    if acknowledged > LIFE.index(index):
        assert len(graph_file.read_skeleton(folder / "index", spec(2)).labels) == len(
            after["items"]
        )
    live(folder, done)
    with SqliteGallery.open(folder / "g.sqlite") as store:
        assert dump(store) == unbroken[-1]
    assert graph_file.read_skeleton(folder / "index", spec(2)).spec == spec(2)
    names = {path.name for path in folder.iterdir()}
    assert names - {"acknowledged"} == {"g.sqlite", "g.sqlite.lock", "index"}


@pytest.mark.long
@pytest.mark.parametrize(
    "kind",
    [
        "kill",
        pytest.param("short", marks=pytest.mark.faults),
        pytest.param("eio", marks=pytest.mark.faults),
        pytest.param("enospc", marks=pytest.mark.faults),
    ],
)
def test_a_gallery_survives_a_failure_at_every_step(
    kind: str, fast_tmp: Path, unbroken: list[Dump]
) -> None:
    folder = fast_tmp / "life"

    def prepare() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()

    swept = 0
    for step, outcome in sweep(kind, lambda: live(folder, 0, Journal(folder).tell), prepare):
        swept += 1
        expected = KILLED if kind in ("kill", "short") else CannotWriteError.exit_code
        assert outcome.status == expected, f"step {step}: {outcome.error}"
        recover(folder, unbroken, Journal(folder).last())
    prepare()
    assert swept == count_steps(lambda: live(folder)) > 60
    print(f"{kind}: {swept} durable steps of a gallery's life")


@contextmanager
def armed(fault: str) -> Iterator[None]:
    FAULT_INJECTOR.arm(fault)
    try:
        yield
    finally:
        FAULT_INJECTOR.arm(None)


@pytest.mark.parametrize(
    ("kind", "stride"),
    [
        ("eio", 3),
        pytest.param("eio", 1, marks=pytest.mark.faults),
        pytest.param("enospc", 1, marks=pytest.mark.faults),
    ],
)
def test_a_process_goes_on_after_an_error_and_its_views_agree_with_the_file(
    kind: str, stride: int, fast_tmp: Path, unbroken: list[Dump]
) -> None:
    step, fired = 1, True
    while fired:
        folder = fast_tmp / "life"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        with SqliteGallery.create(folder / "g.sqlite", spec()) as store:
            views = {ONE: LiveView(store, ONE)}
            failed = 0
            fired = False
            FAULT_INJECTOR.arm(f"{kind}@{step}")
            for number, operation in enumerate(LIFE):
                try:
                    operation(store, folder)
                except CannotWriteError:
                    failed += 1
                    # What failed after its commit is there and not to be done again.
                    if dump(store) != unbroken[number + 1]:
                        operation(store, folder)
                if operation is upgrade:
                    views[TWO] = LiveView(store, TWO)
                for space, view in views.items():
                    if store_has(store, space):
                        np.testing.assert_array_equal(
                            view.snapshot().live_content()[1], store.load_vectors(space)[1]
                        )
            fired = FAULT_INJECTOR.fired
            FAULT_INJECTOR.arm(None)
            assert failed == int(fired), f"step {step}"
            assert dump(store) == unbroken[-1], f"step {step}"
        step += stride


def store_has(store: SqliteGallery, space: str) -> bool:
    return any(info.spec.space == space for info in store.spaces())


@pytest.mark.faults
def test_a_disk_that_stays_full_changes_nothing(fast_tmp: Path, unbroken: list[Dump]) -> None:
    folder = fast_tmp / "life"
    for step in range(1, 200, 7):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        journal = Journal(folder)
        fired = False
        try:
            with armed(f"enospc@{step}+"):
                live(folder, 0, journal.tell)
        except CannotWriteError as error:
            fired = "free some space" in str(error)
        assert fired == (journal.last() < len(LIFE))
        recover(folder, unbroken, journal.last())


def test_the_sweep_would_notice_a_lost_write(
    fast_tmp: Path, unbroken: list[Dump], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fast_tmp / "life"
    folder.mkdir()
    with SqliteGallery.create(folder / "g.sqlite", spec()) as store:
        put_all(store, folder)
        with store.transaction() as connection:
            connection.execute("DELETE FROM items WHERE label = 7")
    with pytest.raises(AssertionError):
        recover(folder, unbroken, 1)
