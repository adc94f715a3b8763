"""Writes new vectors beside the old ones in the same store, while others write to it.

The rule of a window: read, make new vectors, write those whose row is still as it was read. A row
that changed in the meantime stays pending. Each window may be repeated anywhere, so a killed run
goes on where it was.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nobackfill.adopt.maps import Map
from nobackfill.adopt.pairs import WINDOW
from nobackfill.adopt.sources.source import (
    Flippable,
    Multiplied,
    ReadById,
    Rows,
    Source,
    Target,
    TargetVectors,
    WarningSource,
    Window,
    checked,
)
from nobackfill.errors import BusyError, InvalidInputError, VerificationError, few
from nobackfill.extras import extra
from nobackfill.vectors import Vectors

with extra("adopt"):
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

# A writer who is faster than the carrying is followed this many times through the whole store.
MOST_SWEEPS = 20
# Largest difference between a vector that is read back and the one that was written: halves are
# rounded to 11 bits.
TOLERANCE = 2e-3
# Largest difference of two sums of one product, of the product of both norms.
PRODUCTS_DIFFER = 1e-5


@dataclass(frozen=True)
class CarryResult:
    """`written`: vectors of this run; `total`: all there are now; `steps`: how to flip to them, or
    what a flip that is done leaves to the owner."""

    written: int
    total: int
    steps: list[str]


class VectorMaker(Protocol):
    """Makes the new vectors of a store's rows, from old vectors or from the items themselves.

    Attributes:
        window: Rows that one call of `make` gets, about.
        rows_under_lock: Rows that may be pending when a flip begins to keep everybody else out.
        missing: Why an item has no new vector, by id, for each item that `make` left out since the
            last clear().
    """

    window: int
    missing: dict[str, str]

    @property
    def rows_under_lock(self) -> int: ...

    def first_ids(self) -> list[str]:
        """Return ids whose vectors to write before the next window; none in most makers."""

    def make(self, rows: Rows, window: Window) -> tuple[Rows, Vectors]:
        """Make the new vectors of pending rows.

        Returns:
            The rows that have a new vector, and the vectors, float32 [n, dim].

        Raises:
            InvalidInputError: Old vectors of another dimension, or what the model refuses as a
                whole.
        """

    def repeat(self, rows: Rows) -> Vectors | None:
        """Return the new vectors of rows again, float32 [n, dim], to check what the store holds.

        None where making them again costs as much as the first time.
        """


class MapMaker:
    """Makes new vectors by a map from the old ones; `name`: the store, in errors."""

    window = WINDOW
    rows_under_lock = WINDOW

    def __init__(self, mapping: Map, name: str) -> None:
        self._mapping, self._name = mapping, name
        self.missing: dict[str, str] = {}

    def first_ids(self) -> list[str]:
        return []

    def make(self, rows: Rows, window: Window) -> tuple[Rows, Vectors]:
        del window
        checked(rows, self._mapping.dims[0], self._name)
        return rows, self._mapping(rows.vectors)

    def repeat(self, rows: Rows) -> Vectors | None:
        return self._mapping(rows.vectors)


def carry(
    source: Source,
    target: Target,
    maker: Map | VectorMaker,
    *,
    window: int | None = None,
    progress: Callable[[int], None] | None = None,
    flip: bool = False,
) -> CarryResult:
    """Write the new vector of every item, and check each that was written.

    Args:
        source: The store.
        target: Where the new vectors go.
        maker: A map of the old vectors, or what else makes the new ones.
        window: Rows of one step; None for the maker's own number.
        progress: Called with the number of vectors that this run has written.
        flip: Flip to the new vectors, too.

    Raises:
        InvalidInputError: Vectors that the map cannot take, items without a new vector, a store
            that knows no flip, or that cannot flip (before anything is written).
        AlreadyExistsError: The target holds vectors of another map or model.
        BusyError: Others write faster.
        VerificationError: The store does not hold what was written.
    """
    facts = source.facts()
    if flip and isinstance(source, WarningSource) and (obstacles := source.obstacles(target)):
        raise InvalidInputError(f"{facts.name}: cannot flip: {'; '.join(obstacles)}")
    place = source.open_target(target)
    if flip and not isinstance(place, Flippable):
        raise InvalidInputError(
            f"{facts.name}: expected no --flip, which this store does not know; run the printed "
            "steps"
        )
    if isinstance(maker, Map):
        # A store of directions gives back every vector with norm 1.
        mapping = replace(maker, unit=True) if facts.directions else maker
        maker = MapMaker(mapping, facts.name)
    rows_at_once = maker.window if window is None else window
    # Vectors written after a flip are the writers' own, in some stores also before it.
    check = not isinstance(place, Flippable) or not (
        place.flipped or (flip and place.put_by_writers)
    )
    threads = place.at_once if isinstance(maker, MapMaker) else 1

    def sweep(count_before: int, first: bool) -> int:
        """Repeat sweeps until one writes no row, or so few that a flip may write the rest.

        Returns `count_before` plus the number of vectors that were written.
        """
        written = count_before
        for _ in range(MOST_SWEEPS):
            before = written
            maker.missing.clear()

            def one(range_: Window, first: bool = first) -> int:
                count = _write_first(place, maker, facts.name) if check else 0
                return count + _window(source, place, maker, range_, facts.name, first, check)

            # Where windows share the processors already, a product that takes them all keeps them
            # waiting.
            with threadpool_limits(1 if threads > 1 else None):
                for count in _at_once(one, source.windows(rows_at_once), threads):
                    written += count
                    if count and progress is not None:
                        progress(written)
            if written - before <= (min(rows_at_once, maker.rows_under_lock) if flip else 0):
                _refuse_missing(facts.name, maker.missing)
                return written
            first = False
        raise BusyError(
            f"{facts.name}: after {MOST_SWEEPS} sweeps items are still changed faster than they "
            "are carried; what is done is kept, run it again at a quieter hour"
        )

    written = sweep(0, first=True)
    if flip and isinstance(place, Flippable) and not place.flipped:
        with place.prepare_flip():
            written = sweep(written, first=False)
            with place.flip():
                everything = Window()
                written += _window(source, place, maker, everything, facts.name, False, check=False)
                total, left = place.count(), place.owner_tasks()
        return CarryResult(written, total, left)
    steps = place.finish()
    return CarryResult(written, place.count(), steps)


def _at_once(
    work: Callable[[Window], int], windows: Iterator[Window], threads: int
) -> Iterator[int]:
    """Yield the results of `work` for the windows, in their order, on several threads."""
    if threads == 1:
        yield from map(work, windows)
        return
    pool = ThreadPoolExecutor(threads, "nobackfill-carry")
    try:
        under_way: deque[Future[int]] = deque()
        for range_ in windows:
            under_way.append(pool.submit(work, range_))
            if len(under_way) > threads:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _refuse_missing(name: str, missing: dict[str, str]) -> None:
    """Raise InvalidInputError that names items without a new vector, if there are any."""
    if missing:
        reasons = few(f"{item!r} ({why})" for item, why in missing.items())
        raise InvalidInputError(
            f"{name}: {len(missing)} items have an old vector and no new one: {reasons}; the "
            "others are written. Mend these items or empty their old vectors, and run it again"
        )


def _window(
    source: Source,
    place: TargetVectors,
    maker: VectorMaker,
    range_: Window,
    name: str,
    first: bool,
    check: bool,
) -> int:
    """Carry what is pending there, and check it; in the first sweep also what was there before."""
    rows = checked(place.pending(range_), None, name)
    vectors = np.empty((0, 0), np.float32)
    if len(rows):
        rows, vectors = maker.make(rows, range_)
    if len(rows):
        place.write(rows, vectors)
    if check and (len(rows) or first):
        _verify(source, place, maker, range_, rows.ids, vectors)
    return len(rows)


def _write_first(place: TargetVectors, maker: VectorMaker, name: str) -> int:
    """Write the items that `maker` wants first, and check them. Returns their number.

    Raises:
        VerificationError: The store does not hold the vectors that were written.
    """
    count = 0
    while isinstance(place, ReadById) and (ids := maker.first_ids()):
        rows = checked(place.pending_items(ids), None, name)
        if len(rows):
            rows, vectors = maker.make(rows, Window())
        if not len(rows):
            continue
        place.write(rows, vectors)
        count += len(rows)
        stored = place.read_items(rows.ids)
        row_of = {item: row for row, item in enumerate(rows.ids)}
        expected = vectors[[row_of[item] for item in stored.ids]]
        if len(stored) and (wrong := np.flatnonzero(_far(expected, stored.vectors))).size:
            raise _different(name, len(wrong), len(stored), stored.ids[wrong[0]])
    return count


def _different(name: str, wrong: int, count: int, item: str) -> VerificationError:
    """Make the error for stored vectors that are not those that were written."""
    return VerificationError(
        f"{name}: {wrong} of {count} new vectors differ from those that were written, the first in "
        f"{item!r}; remove them with `carry --rollback` or `migrate back`, and run it again"
    )


def _verify(
    source: Source,
    place: TargetVectors,
    maker: VectorMaker,
    range_: Window,
    ids: list[str],
    vectors: Vectors,
) -> None:
    """Read the new vectors of a window back and compare them.

    `vectors` [n, dim] were written for `ids`; the others are made again, where that is cheap. A
    vector that is missing is pending, and the next sweep's. Raises VerificationError.
    """
    if isinstance(place, Multiplied) and _same_products(place, range_, ids, vectors):
        return
    new = place.read(range_)
    here = np.arange(len(ids))
    if new.ids != ids:
        places = {name: row for row, name in enumerate(ids)}
        here = np.array([places.get(name, -1) for name in new.ids], np.int64)
    if len(new) and (here >= 0).all() and not _far(vectors[here], new.vectors).any():
        return
    # Others were there, or somebody has changed an item in between: the window again, whole. Old
    # and new are not read in one moment, and another carrying may fill what has just changed: what
    # is wrong is so twice, with the same vectors.
    wrong = _wrong(source, place, maker, range_, ids, vectors)
    if wrong:
        again = _wrong(source, place, maker, range_, ids, vectors)
        wrong = dict(wrong.items() & again.items())
    if wrong:
        name, count = source.facts().name, len(place.read(range_))
        raise _different(name, len(wrong), count, min(wrong))


def _wrong(
    source: Source,
    place: TargetVectors,
    maker: VectorMaker,
    range_: Window,
    ids: list[str],
    vectors: Vectors,
) -> dict[str, tuple[bytes, bytes]]:
    """Items of a window, with expected and stored vectors, whose new vector is another one and that
    are not pending."""
    old, new = source.read(range_), place.read(range_)
    reference = maker.repeat(old) if len(old) else None
    if reference is None:
        reference, places = vectors, {name: row for row, name in enumerate(ids)}
        evidence = vectors
    else:
        places, evidence = {name: row for row, name in enumerate(old.ids)}, old.vectors
    there = [row for row, name in enumerate(new.ids) if name in places]
    if not there:
        return {}
    here = np.array([places[new.ids[row]] for row in there], np.int64)
    differing = np.flatnonzero(_far(reference[here], new.vectors[there]))
    wrong = {
        new.ids[there[one]]: (evidence[here[one]].tobytes(), new.vectors[there[one]].tobytes())
        for one in differing
    }
    pending = set(place.pending(range_).ids) if wrong else set()
    return {name: pair for name, pair in wrong.items() if name not in pending}


def _same_products(place: Multiplied, range_: Window, ids: list[str], vectors: Vectors) -> bool:
    """Whether what is there has the products of what was written with one random vector: another
    vector of a window has another product, and the store sends one number for it."""
    if not ids:
        return False
    rng = np.random.default_rng(len(ids))
    probe = rng.standard_normal(vectors.shape[1:]).astype(np.float32)
    there, products = place.products(range_, probe)
    if there != ids:
        return False
    bounds = PRODUCTS_DIFFER * np.linalg.norm(vectors, axis=1) * np.linalg.norm(probe)
    close: NDArray[np.bool_] = np.abs(products - vectors @ probe) <= bounds
    return bool(close.all())


def _far(reference: Vectors, actual: Vectors) -> NDArray[np.bool_]:
    """Rows that differ by more than halves are rounded by, or hold NaN."""
    scale = max(1.0, float(np.abs(reference).max(initial=0)))
    close = np.abs(reference - actual).max(1, initial=0) <= TOLERANCE * scale
    return np.asarray(~close)
