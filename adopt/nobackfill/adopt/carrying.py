"""Writes new vectors beside the old ones in the same store, while others write to it.

The rule of a window: read, map, write what is still as it was read. What changed in the meantime is
still pending. Each window may be repeated anywhere, so a killed run goes on where it was.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from nobackfill.adopt.maps import Map
from nobackfill.adopt.pairs import WINDOW
from nobackfill.adopt.sources.source import (
    Beside,
    Flippable,
    Multiplied,
    Source,
    Target,
    Window,
    checked,
)
from nobackfill.errors import BusyError, InvalidInputError, VerificationError
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


def carry(
    source: Source,
    target: Target,
    mapping: Map,
    *,
    window: int = WINDOW,
    progress: Callable[[int], None] | None = None,
    flip: bool = False,
) -> CarryResult:
    """Carry every item over and check what was written. `flip`: flip to the new vectors, too.

    Raises InvalidInputError for vectors the map cannot take, AlreadyExistsError where the target
    was not made by this map, BusyError where others write faster, VerificationError.
    """
    facts = source.facts()
    beside = source.beside(target)
    if flip and not isinstance(beside, Flippable):
        raise InvalidInputError(
            f"{facts.name}: expected no --flip, which PostgreSQL and Qdrant know; run the printed "
            "steps"
        )
    if facts.directions:
        # As it will be read back.
        mapping = replace(mapping, unit=True)
    # Vectors written after a flip are the writers' own, in some stores also before it.
    check = not isinstance(beside, Flippable) or not (
        beside.flipped or (flip and beside.put_by_writers)
    )

    def sweep(written: int, first: bool, few: int) -> int:
        """Carry until a sweep writes no more than `few`."""
        for _ in range(MOST_SWEEPS):
            before = written

            def one(range_: Window, first: bool = first) -> int:
                return _window(source, beside, mapping, range_, facts.name, first, check)

            # Where windows share the processors already, a product that takes them all keeps them
            # waiting.
            with threadpool_limits(1 if beside.at_once > 1 else None):
                for count in _at_once(one, source.windows(window), beside.at_once):
                    written += count
                    if count and progress is not None:
                        progress(written)
            if written - before <= few:
                return written
            first = False
        raise BusyError(
            f"{facts.name}: after {MOST_SWEEPS} sweeps items are still changed faster than they "
            "are carried; what is done is kept, run it again at a quieter hour"
        )

    written = sweep(0, first=True, few=window if flip else 0)
    if flip and isinstance(beside, Flippable) and not beside.flipped:
        beside.build_indexes()
        written = sweep(written, first=False, few=window)
        with beside.flip():
            written += _window(source, beside, mapping, Window(), facts.name, False, check=False)
            total, left = beside.count(), beside.left()
        return CarryResult(written, total, left)
    steps = beside.finish()
    return CarryResult(written, beside.count(), steps)


def _at_once(
    work: Callable[[Window], int], windows: Iterator[Window], threads: int
) -> Iterator[int]:
    """What `work` gives for each window, in their order, some of them at the same time."""
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


def _window(
    source: Source,
    beside: Beside,
    mapping: Map,
    range_: Window,
    name: str,
    first: bool,
    check: bool,
) -> int:
    """Carry what is pending there, and check it; in the first sweep also what was there before."""
    rows = checked(beside.pending(range_), None, name)
    mapped = np.empty((0, mapping.dims[1]), np.float32)
    if len(rows):
        checked(rows, mapping.dims[0], name)
        mapped = mapping(rows.vectors)
        beside.write(rows, mapped)
    if check and (len(rows) or first):
        _verify(source, beside, mapping, range_, rows.ids, mapped)
    return len(rows)


def _verify(
    source: Source, beside: Beside, mapping: Map, range_: Window, ids: list[str], mapped: Vectors
) -> None:
    """Read the new vectors of a window back: `mapped` those of `ids`, of the others the map of what
    they have. One that is missing is pending, and the next sweep's. Raises VerificationError."""
    if isinstance(beside, Multiplied) and _same_products(beside, range_, ids, mapped):
        return
    new = beside.read(range_)
    here = np.arange(len(ids))
    if new.ids != ids:
        places = {name: row for row, name in enumerate(ids)}
        here = np.array([places.get(name, -1) for name in new.ids], np.int64)
    if len(new) and (here >= 0).all() and not _far(mapped[here], new.vectors).any():
        return
    # Others were there, or somebody has changed an item in between: the window again, whole. Old
    # and new are not read in one moment, and another carrying may fill what has just changed: what
    # is wrong is so twice, with the same vectors.
    wrong = _wrong(source, beside, mapping, range_)
    if wrong:
        wrong = dict(wrong.items() & _wrong(source, beside, mapping, range_).items())
    if wrong:
        raise VerificationError(
            f"{source.facts().name}: {len(wrong)} of {len(beside.read(range_))} new vectors are "
            f"not what the map gives, the first in {min(wrong)!r}; take them back with --rollback "
            "and carry again"
        )


def _wrong(
    source: Source, beside: Beside, mapping: Map, range_: Window
) -> dict[str, tuple[bytes, bytes]]:
    """Items of a window, with old and new vectors, whose new ones are not those of the old ones and
    that are not pending."""
    old, new = source.read(range_), beside.read(range_)
    places = {name: row for row, name in enumerate(old.ids)}
    there = [row for row, name in enumerate(new.ids) if name in places]
    if not there:
        return {}
    here = np.array([places[new.ids[row]] for row in there], np.int64)
    far = np.flatnonzero(_far(mapping(old.vectors[here]), new.vectors[there]))
    wrong = {
        new.ids[there[one]]: (old.vectors[here[one]].tobytes(), new.vectors[there[one]].tobytes())
        for one in far
    }
    pending = set(beside.pending(range_).ids) if wrong else set()
    return {name: pair for name, pair in wrong.items() if name not in pending}


def _same_products(beside: Multiplied, range_: Window, ids: list[str], mapped: Vectors) -> bool:
    """Whether what is there has the products of what was written with one random vector: another
    vector of a window has another product, and the store sends one number for it."""
    if not ids:
        return False
    rng = np.random.default_rng(len(ids))
    probe = rng.standard_normal(mapped.shape[1:]).astype(np.float32)
    there, products = beside.products(range_, probe)
    if there != ids:
        return False
    bounds = PRODUCTS_DIFFER * np.linalg.norm(mapped, axis=1) * np.linalg.norm(probe)
    near: NDArray[np.bool_] = np.abs(products - mapped @ probe) <= bounds
    return bool(near.all())


def _far(expected: Vectors, got: Vectors) -> NDArray[np.bool_]:
    """Rows that differ by more than halves are rounded by, or hold NaN."""
    scale = max(1.0, float(np.abs(expected).max(initial=0)))
    near = np.abs(expected - got).max(1, initial=0) <= TOLERANCE * scale
    return np.asarray(~near)
