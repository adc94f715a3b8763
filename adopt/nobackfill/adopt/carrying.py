"""Write new vectors next to the old ones in the same store, while others write to it.

The store is read in windows of rows. For each window: read its pending rows, make their new
vectors, and write those whose row has not changed since it was read. A row that changed stays
pending. Every step may be repeated, so a killed run continues where it ended.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nobackfill.adopt.maps import OLD_NORM_FACT, Map
from nobackfill.adopt.pairs import WINDOW_ITEMS
from nobackfill.adopt.sources.source import (
    ComputesProducts,
    Flippable,
    ReadableById,
    Rows,
    Source,
    Target,
    TargetVectors,
    WarningSource,
    Window,
    check_rows,
)
from nobackfill.errors import BusyError, InvalidInputError, VerificationError, join_few
from nobackfill.extras import require_extra
from nobackfill.vectors import Vectors

with require_extra("adopt"):
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

# Sweeps through the whole store, after which writers count as faster than this run.
MOST_SWEEPS = 20
# Largest difference between a component that was written and the one that is read back, relative to
# the largest component (at least 1): stores of float16 round to 11 bits.
READ_BACK_TOLERANCE = 2e-3
# Largest difference between two sums of one inner product, relative to the product of both norms.
PRODUCTS_DIFFER = 1e-5


@dataclass(frozen=True)
class CarryResult:
    """The result of `carry`.

    Attributes:
        write_count: Number of vectors that this run wrote; a row that changed meanwhile counts
            each time.
        new_vector_count: Number of new vectors that the store has now.
        next_steps: Statements or commands that flip to the new vectors. After a flip: tasks that it
            leaves to the owner of the store; empty if there are none.
    """

    write_count: int
    new_vector_count: int
    next_steps: list[str]


class VectorComputer(Protocol):
    """A maker of the new vectors of a store's rows, from old vectors or from the items themselves.

    Attributes:
        window_rows: Number of rows that one call of `compute` gets, about.
        missing_reasons: For each item that `compute` left out, its id and the reason. `carry`
            clears it before each sweep.
    """

    window_rows: int
    missing_reasons: dict[str, str]

    @property
    def rows_under_lock(self) -> int:
        """Return the most rows that may be pending when a flip locks the store.

        At least 1. It may change during a run.
        """

    def priority_ids(self) -> list[str]:
        """Return ids of items to write before the next window.

        `carry` calls this until it returns no ids.

        Raises:
            NobackfillError: The list of these ids cannot be read, for example a damaged file
                (VerificationError).
        """

    def compute(self, rows: Rows, window: Window) -> tuple[Rows, Vectors]:
        """Make the new vectors of pending rows.

        The rows are not changed. The same rows may come again in a later sweep.

        Args:
            rows: Rows of the store, with their old vectors [n, a].
            window: The range of the store that the rows are in.

        Returns:
            The m rows that have a new vector, in their order, and the vectors, float32 [m, b]. The
            others are added to `missing_reasons`.

        Raises:
            InvalidInputError: The old vectors have another dimension than expected, or the model
                takes none of the items.
            UnavailableError: An endpoint or the store of the items does not answer.
            BusyError: An endpoint is still busy, or the user has paused the run.
            NotPermittedError: An endpoint refuses the key.
            CannotWriteError: A file in which it stores vectors cannot be written.
            VerificationError: A file in which it stores vectors is damaged, or the model returns no
                usable vectors.
            NotFoundError: The table or the collection was deleted.
            Exception: Any error by which a caller ends the run, such as that of a pause.
        """

    def recompute(self, rows: Rows) -> Vectors | None:
        """Make the new vectors of rows again, to check those in the store.

        Returns:
            float32 [n, b]; None if that costs as much as the first time.

        Raises:
            InvalidInputError: The rows have another dimension than expected.
        """


# Vectors in half precision differ from norm 1 by less.
_NORM_TOLERANCE = 0.01


class MapVectorComputer:
    """A VectorComputer that migrates old vectors by a map. It leaves no item out.

    Args:
        mapping: The map.
        name: The name of the store in errors.
        ignores_norms: Whether only the direction of a vector counts, as with the metric cosine. A
            vector of zeros, which no search finds, then stays zeros.
    """

    window_rows = WINDOW_ITEMS
    rows_under_lock = WINDOW_ITEMS

    def __init__(self, mapping: Map, name: str, *, ignores_norms: bool = False) -> None:
        self._mapping, self._name, self._directions = mapping, name, ignores_norms
        self.missing_reasons: dict[str, str] = {}

    def priority_ids(self) -> list[str]:
        """Return no ids: a map has no preference."""
        return []

    def compute(self, rows: Rows, window: Window) -> tuple[Rows, Vectors]:
        """Migrate the old vectors of rows by the map.

        Threads may call it at the same time.

        Args:
            rows: Rows with old vectors [n, a]; they are not changed.
            window: Ignored.

        Returns:
            All rows, and float32 [n, b].

        Raises:
            InvalidInputError: The vectors have another dimension than the map, NaN, infinity or a
                norm above 1e15. Or the map was fitted on vectors of norm 1, and some of these have
                another norm and are not zero.
        """
        del window
        check_rows(rows, self._mapping.dims[0], self._name)
        if self._mapping.facts.get(OLD_NORM_FACT) == "1":
            norms = np.linalg.norm(rows.vectors[rows.vectors.any(1)], axis=1)
            if len(norms) and np.abs(norms - 1).max() > _NORM_TOLERANCE:
                raise InvalidInputError(
                    f"{self._name}: expected vectors of norm 1, as the map was fitted on, found "
                    f"norms from {norms.min():.3g} to {norms.max():.3g}; divide each vector by its "
                    "norm first, or fit a map on these vectors by `nobackfill fit`"
                )
        return rows, self.recompute(rows)

    def recompute(self, rows: Rows) -> Vectors:
        """Migrate the old vectors of rows again; the result equals that of `compute`.

        Raises:
            InvalidInputError: The vectors have another dimension than the map, NaN, infinity or a
                norm above 1e15.
        """
        vectors = self._mapping(rows.vectors)
        if self._directions:
            # The map would give them the direction of its bias, and searches would find them.
            vectors[~rows.vectors.any(1)] = 0
        return vectors


def carry(
    source: Source,
    target: Target,
    computer: Map | VectorComputer,
    *,
    rows_per_window: int | None = None,
    progress: Callable[[int], None] | None = None,
    flip: bool = False,
) -> CarryResult:
    """Write the new vector of every item into the store, and read each back to check it.

    Old vectors do not change. Items that have a new vector already are only checked. After an
    error or a kill, the written vectors stay; call it again to continue.

    After a flip nothing is checked, because writers put vectors, too. With `flip` nothing is
    checked in a store where they put new vectors before it. The last rows, which a flip writes
    under its lock, are not checked either.

    It reads and writes windows on `TargetVectors.concurrent_windows` threads for a map, and on one
    thread for a model. A store without items gets an empty target. In stores of files, two runs
    must not write to one target at the same time.

    Args:
        source: The store of the old vectors.
        target: The place of the new vectors in it, which is created if it is missing.
        computer: A map of the old vectors, or another maker of new vectors.
        rows_per_window: Rows of one step; None for the maker's own number. At least 1.
        progress: Called with the number of vectors that this run has written so far. Called on this
            thread, after each window that wrote some. Its errors end the run, and the written
            vectors stay.
        flip: Whether to flip to the new vectors as well; other writers wait meanwhile.

    Returns:
        Numbers of vectors, and the steps that are left to do. If an earlier run has flipped to the
        target already, only its pending rows are written.

    Raises:
        InvalidInputError: The store cannot flip; no vector is written then, but an empty target may
            be left. Or old vectors have NaN, infinity, or another dimension or norm than the map
            was fitted on. Or some items got no new vector; the others are written, and nothing
            flips.
        AlreadyExistsError: The target holds vectors of another map or model.
        BusyError: After 20 sweeps, others still change items faster than this run writes. An
            endpoint is still busy, or the user pauses the run. Others hold the table at its opening
            or at the flip.
        VerificationError: The store does not hold the vectors that were written. Or the model
            returns no usable ones.
        UnavailableError: The store's server or the model does not answer.
        NotPermittedError: The store refuses the user.
        CannotWriteError: The store's disk is full, or it cannot be written.
        NotFoundError: The table or the collection was deleted, or the table of new vectors was
            renamed.
        IncompatibleSpaceError: Files of one folder record different models.
        ConfigurationError: The process was forked after the source was opened (LanceDB), or the
            file is read-only (sqlite-vec).
        Exception: Any other error of `computer`, and any of `progress`.
        OSError: The name of the target is too long for a folder of Parquet files.
    """
    facts = source.facts()
    if flip and isinstance(source, WarningSource) and (obstacles := source.flip_obstacles(target)):
        raise InvalidInputError(
            f"{facts.name}: searches cannot flip to the new vectors: {'; '.join(obstacles)}"
        )
    place = source.open_target(target)
    if flip and not isinstance(place, Flippable):
        raise InvalidInputError(
            f"{facts.name}: expected no --flip, because this kind of store cannot flip by itself; "
            "leave --flip out, and run the steps that `nobackfill carry` prints"
        )
    if isinstance(computer, Map):
        # A store of directions gives back every vector with norm 1.
        mapping = replace(computer, unit_norm=True) if facts.normalises else computer
        computer = MapVectorComputer(
            mapping, facts.name, ignores_norms=facts.metric in (None, "cosine")
        )
    rows_at_once = computer.window_rows if rows_per_window is None else rows_per_window
    # Vectors written after a flip are the writers' own, in some stores also before it.
    check = not isinstance(place, Flippable) or not (
        place.flipped or (flip and place.writers_put_new_vectors)
    )
    threads = place.concurrent_windows if isinstance(computer, MapVectorComputer) else 1

    def sweep(count_before: int, first: bool) -> int:
        """Repeat sweeps until one writes no row, or so few that a flip may write the rest.

        Returns `count_before` plus the number of vectors that were written.
        """
        written = count_before
        for _ in range(MOST_SWEEPS):
            before = written
            computer.missing_reasons.clear()

            def one(range_: Window, first: bool = first) -> int:
                count = _write_first(place, computer, facts.name) if check else 0
                return count + _window(source, place, computer, range_, facts.name, first, check)

            # Several windows at once use all processors already: one thread each is faster.
            with threadpool_limits(1 if threads > 1 else None):
                for count in _at_once(one, source.windows(rows_at_once), threads):
                    written += count
                    if count and progress is not None:
                        progress(written)
            if written - before <= (min(rows_at_once, computer.rows_under_lock) if flip else 0):
                _refuse_missing(facts.name, computer.missing_reasons)
                return written
            first = False
        raise BusyError(
            f"{facts.name}: after {MOST_SWEEPS} passes over the items, other programs still "
            "change items faster than new vectors are written. The written vectors stay; run the "
            "same command at a quieter hour"
        )

    written = sweep(0, first=True)
    if flip and isinstance(place, Flippable) and not place.flipped:
        with place.prepare_flip():
            written = sweep(written, first=False)
            with place.open_flip():
                everything = Window()
                written += _window(
                    source, place, computer, everything, facts.name, False, check=False
                )
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
        reasons = join_few(f"{item!r} ({why})" for item, why in missing.items())
        raise InvalidInputError(
            f"{name}: {len(missing)} items have an old vector and no new one: {reasons}. The other "
            "items are written. Correct or delete these items, or clear their old vectors if the "
            "store can, and run the same command again"
        )


def _window(
    source: Source,
    place: TargetVectors,
    maker: VectorComputer,
    range_: Window,
    name: str,
    first: bool,
    check: bool,
) -> int:
    """Write the pending rows of a window, and check them; return their number.

    In the `first` sweep, also check the vectors that earlier runs wrote.
    """
    rows = check_rows(place.pending(range_), None, name)
    vectors = np.empty((0, 0), np.float32)
    if len(rows):
        rows, vectors = maker.compute(rows, range_)
    if len(rows):
        place.write(rows, vectors)
    if check and (len(rows) or first):
        _verify(source, place, maker, range_, rows.ids, vectors)
    return len(rows)


def _write_first(place: TargetVectors, maker: VectorComputer, name: str) -> int:
    """Write the items that `maker` names first, and check them; return their number.

    Raises:
        VerificationError: The store does not hold the vectors that were written.
    """
    count = 0
    while isinstance(place, ReadableById) and (ids := maker.priority_ids()):
        rows = check_rows(place.pending_items(ids), None, name)
        if len(rows):
            rows, vectors = maker.compute(rows, Window())
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
        f"{name}: {wrong} of {count} new vectors, read back from the store, differ from those that "
        f"were written, the first in {item!r}; remove the new vectors with `nobackfill carry "
        "--rollback` or `nobackfill migrate back`, then run the same command again"
    )


def _verify(
    source: Source,
    place: TargetVectors,
    maker: VectorComputer,
    range_: Window,
    ids: list[str],
    vectors: Vectors,
) -> None:
    """Read the new vectors of a window back, and compare them.

    A missing vector is no error: its row is pending, and the next sweep writes it.

    Args:
        source: The store.
        place: Its new vectors.
        maker: Makes vectors of earlier runs again, where that is cheap.
        range_: The window.
        ids: Ids of the items that were written now.
        vectors: Their vectors [n, b].

    Raises:
        VerificationError: A vector differs from the one that was written.
    """
    if isinstance(place, ComputesProducts) and _same_products(place, range_, ids, vectors):
        return
    new = place.read(range_)
    here = np.arange(len(ids))
    if new.ids != ids:
        places = {name: row for row, name in enumerate(ids)}
        here = np.array([places.get(name, -1) for name in new.ids], np.int64)
    if len(new) and (here >= 0).all() and not _far(vectors[here], new.vectors).any():
        return
    # The window has vectors of earlier runs, or somebody changed an item meanwhile: compare all of
    # it. Old and new vectors are not read at one moment, and another run may write an item that
    # has just changed. Therefore only a difference that is found twice alike is an error.
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
    maker: VectorComputer,
    range_: Window,
    ids: list[str],
    vectors: Vectors,
) -> dict[str, tuple[bytes, bytes]]:
    """Find the items of a window whose stored vector differs, and which are not pending.

    Returns:
        For each such id the bytes of the vector that it was compared by, and of the stored one.
    """
    old, new = source.read(range_), place.read(range_)
    reference = maker.recompute(old) if len(old) else None
    if reference is None:
        reference, evidence, names = vectors, vectors, ids
    else:
        evidence, names = old.vectors, old.ids
    places = {name: row for row, name in enumerate(names)}
    there = [row for row, name in enumerate(new.ids) if name in places]
    if not there:
        return {}
    # Files may have an id twice; then only the order tells which vector is whose.
    here = np.array([places[new.ids[row]] for row in there], np.int64)
    if new.ids == names:
        here = np.arange(len(names))
    differing = np.flatnonzero(_far(reference[here], new.vectors[there]))
    wrong = {
        new.ids[there[one]]: (evidence[here[one]].tobytes(), new.vectors[there[one]].tobytes())
        for one in differing
    }
    pending = set(place.pending(range_).ids) if wrong else set()
    return {name: pair for name, pair in wrong.items() if name not in pending}


def _same_products(
    place: ComputesProducts, range_: Window, ids: list[str], vectors: Vectors
) -> bool:
    """Tell whether stored and written vectors have equal inner products with a random vector.

    A different vector has a different product, and the store sends one number for each vector.
    False if the window holds other items than `ids`, or none.
    """
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
    """Return bool [n]: rows that differ by more than float16 rounds, or that hold NaN."""
    scale = max(1.0, float(np.abs(reference).max(initial=0)))
    close = np.abs(reference - actual).max(1, initial=0) <= READ_BACK_TOLERANCE * scale
    return np.asarray(~close)
