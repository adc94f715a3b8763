"""Labels of a space at random, whatever engine holds them."""

from collections.abc import Callable

import numpy as np

from nobackfill.gallery.search.index import Labels


def random_labels(
    bounds: tuple[int | None, int | None],
    count: int,
    following: Callable[[list[int]], Labels],
    shuffled: Callable[[], Labels],
) -> Labels:
    """Labels at random, increasing: about `count`, at least half as many where there are that many,
    never more.

    `bounds`: the least and the largest, None where there is none. `following`: of each number the
    first label from it on, each label once, increasing; so no table is read through, and a label
    behind a gap of deleted ones is drawn somewhat more often. `shuffled`: `count` of all in any
    order, by reading them all.
    """
    first, last = bounds
    if first is None or last is None:
        return np.empty(0, np.int64)
    few, generator = last - first < 2 * count, np.random.default_rng()
    drawn = np.arange(first, last + 1) if few else generator.integers(first, last + 1, count)
    found = following(drawn.tolist())
    if not few and len(found) < count // 2:
        # Most draws fell into one gap, and a few labels would stand for all.
        return np.sort(shuffled())
    return found if len(found) <= count else np.sort(generator.choice(found, count, replace=False))
