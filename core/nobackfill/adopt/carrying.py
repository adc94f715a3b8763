"""Writes new vectors beside the old ones in the same store, while others write to it.

The rule of a window: read, map, write what is still as it was read. What changed in the meantime is
still pending. Each window may be repeated anywhere, so a killed run goes on where it was.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nobackfill.adopt.maps import Map
from nobackfill.adopt.pairs import WINDOW
from nobackfill.adopt.sources.source import Beside, Source, Target, checked
from nobackfill.errors import BusyError, VerificationError

# A writer who is faster than the carrying is followed this many times through the whole store.
MOST_SWEEPS = 20
# Largest difference between a vector that is read back and the one that was written: halves are
# rounded to 11 bits.
TOLERANCE = 2e-3


@dataclass(frozen=True)
class Carried:
    """`written`: vectors of this run; `total`: all there are now; `steps`: how to flip to them."""

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
) -> Carried:
    """Carry every item over and check what was written.

    Raises InvalidInputError for vectors the map cannot take, AlreadyExistsError where the target
    was not made by this map, BusyError where others write faster, VerificationError.
    """
    name = source.facts().name
    beside = source.beside(target)
    written = 0
    for _ in range(MOST_SWEEPS):
        before = written
        for range_ in source.windows(window):
            rows = checked(beside.pending(range_), None, name)
            if len(rows):
                checked(rows, mapping.dims[0], name)
                beside.write(rows, mapping(rows.vectors))
                written += len(rows)
            if progress is not None and len(rows):
                progress(written)
        if written == before:
            break
    else:
        raise BusyError(
            f"{name}: after {MOST_SWEEPS} sweeps items are still changed faster than they are "
            "carried; what is done is kept, run it again at a quieter hour"
        )
    steps = beside.finish()
    return Carried(written, verify(source, beside, mapping, window), steps)


def verify(source: Source, beside: Beside, mapping: Map, window: int = WINDOW) -> int:
    """Read every new vector back and compare it with the map of the old one; how many there are.

    Rows that others have added or changed since are passed over. Raises VerificationError.
    """
    wrong: list[str] = []
    missing = total = 0
    for range_ in source.windows(window):
        old, new = source.read(range_), beside.read(range_)
        rows = {name: row for row, name in enumerate(new.ids)}
        both = [(row, rows[name]) for row, name in enumerate(old.ids) if name in rows]
        total += len(both)
        missing += len(old.ids) - len(both)
        if not both:
            continue
        here, there = np.array(both).T
        scale = np.abs(new.vectors[there]).max()
        distance = np.abs(mapping(old.vectors[here]) - new.vectors[there]).max(1)
        far = np.flatnonzero(~(distance <= TOLERANCE * max(1.0, float(scale))))
        wrong += [old.ids[here[row]] for row in far.tolist()]
    if wrong and set(wrong) - _pending(source, beside, window):
        raise VerificationError(
            f"{source.facts().name}: {len(wrong)} of {total} new vectors are not what the map "
            f"gives, the first in {wrong[0]!r}; take them back with --rollback and carry again"
        )
    if missing > len(_pending(source, beside, window)):
        raise VerificationError(
            f"{source.facts().name}: {missing} items have no new vector; carry again"
        )
    return total


def _pending(source: Source, beside: Beside, window: int) -> set[str]:
    return {name for range_ in source.windows(window) for name in beside.pending(range_).ids}
