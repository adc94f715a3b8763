"""Many threads at one gallery, on every engine: nothing is lost or doubled, nobody starves."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from nobackfill.gallery.staging import run_upgrade
from nobackfill.gallery.store import NewVectors
from tests.gallery.making import Linear, spec, vectors
from tests.stores.conftest import Engine
from tests.stores.test_items import ONE, TWO, filled

NAMES = [f"shared-{number}" for number in range(12)]


def together(*works: Callable[[], None]) -> None:
    """Each in a thread of its own; raises what the first of them raises."""
    with ThreadPoolExecutor(len(works)) as threads:
        for done in [threads.submit(work) for work in works]:
            done.result()


def test_puts_of_the_same_ids_keep_one_of_each(engine: Engine) -> None:
    store = engine.create(spec())

    def putting(seed: int) -> Callable[[], None]:
        def work() -> None:
            rng = np.random.default_rng(seed)
            for turn in range(25):
                names = [str(name) for name in rng.permutation(NAMES)[: rng.integers(1, 8)]]
                if turn % 5 == 4:
                    store.delete(names)
                else:
                    new = NewVectors(ONE, vectors(len(names), seed))
                    digests = [f"{name} {turn % 2}" for name in names]
                    store.put(names, [new], digests=digests, metadata=[{"s": seed}] * len(names))

        return work

    together(*map(putting, range(4)))
    listed = [item for item, _ in store.list_page(ONE, 100)[0]]
    assert len({item.id for item in listed}) == len(listed) == store.count() == store.count(ONE)
    assert store.load_vectors(ONE)[0].tolist() == [item.label for item in listed]
    assert len(store.group_by_value("s", ONE)) <= 4


def test_an_upgrade_beside_puts_and_deletions_carries_what_is_there(engine: Engine) -> None:
    store = filled(engine, 200)
    store.add_staging_space(spec(2))
    linear = Linear(reads_side=False)
    ended = threading.Event()

    def carrying() -> None:
        try:
            run_upgrade(store, linear, spec(2), items_per_chunk=16)
        finally:
            ended.set()

    def writing() -> None:
        turn = 0
        while turn < 20 or not ended.is_set():
            # As puts do while a space is staged: into both.
            content = vectors(3, turn)
            pair = [NewVectors(ONE, content), NewVectors(TWO, content @ linear.embedding)]
            store.put([f"item-{turn}", f"new-{turn}", f"new-{turn + 1}"], pair)
            store.delete([f"item-{150 + turn % 50}", f"new-{turn - 1}"])
            turn += 1

    together(carrying, writing)
    run_upgrade(store, linear, spec(2))
    labels, old = store.load_vectors(ONE)
    carried, new = store.load_vectors(TWO)
    assert carried.tolist() == labels.tolist() and store.count() == len(labels)
    np.testing.assert_allclose(new, old @ linear.embedding, rtol=1e-4, atol=1e-4)


def test_flips_come_between_puts_that_never_end(engine: Engine) -> None:
    """Puts share the gate: a flip that waits goes before those that come later."""
    store = filled(engine, 20)
    run_upgrade(store, Linear(reads_side=False), spec(2))
    stopping = threading.Event()
    done = [0, 0, 0]
    crossed = []

    def putting(writer: int) -> Callable[[], None]:
        def work() -> None:
            while not stopping.is_set():
                new = [NewVectors(space, vectors(1, done[writer])) for space in (ONE, TWO)]
                store.put([f"w{writer}"], new)
                done[writer] += 1

        return work

    def flipping() -> None:
        try:
            for turn in range(10):
                before = sum(done)
                store.flip((TWO, ONE)[turn % 2])
                crossed.append(sum(done) - before)
        finally:
            stopping.set()

    together(*map(putting, range(3)), flipping)
    assert store.active().spec.space == ONE and min(done) > 0
    # Those that were under way, and on SQLite a few that were waiting for its one writer.
    assert sorted(crossed)[5] <= 30, crossed
