"""The same items' vectors by two models: what maps are fitted and judged on."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from nobackfill.adopt.sources.source import Facts, Rows, SearchMetric, Source, checked, repeated
from nobackfill.errors import InvalidInputError, few
from nobackfill.metrics.distances import Metric
from nobackfill.vectors import Vectors

# Items read at a time.
WINDOW = 10_000
# Metrics of stores that searches can be judged and ranked by.
_JUDGED: Mapping[SearchMetric, Metric] = {
    "cosine": "cosine", "squared_l2": "l2", "inner_product": "inner_product",
}  # fmt: skip


@dataclass(frozen=True)
class Pairs:
    """Row i of both is item ids[i]: old [n, a], new [n, b]. `metric`: that of the old ones' store,
    cosine where it names none."""

    ids: list[str]
    old: Vectors
    new: Vectors
    metric: Metric = "cosine"

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Matched:
    """Pairs, and the ids that only one side has."""

    pairs: Pairs
    without_old: list[str]
    without_new: list[str]


def read_all(source: Source, only: Collection[str] | None = None) -> Rows:
    """Every row of a source, or those with an id in `only`; vectors are checked.

    Raises InvalidInputError for NaN, several dimensions, an id that comes twice.
    """
    where = source.facts().name
    ids: list[str] = []
    vectors: list[Vectors] = []
    dim = None
    for window in source.windows(WINDOW):
        rows = checked(source.read(window), dim, where)
        if not len(rows):
            continue
        dim = rows.vectors.shape[1]
        kept = (
            range(len(rows)) if only is None else [i for i, x in enumerate(rows.ids) if x in only]
        )
        ids += [rows.ids[i] for i in kept]
        vectors.append(rows.vectors[np.asarray(kept, np.int64)])
    if twice := repeated(ids):
        raise InvalidInputError(
            f"{where}: expected each id once, got {few(map(repr, twice))} more than once"
        )
    return Rows(ids, np.concatenate(vectors) if vectors else np.empty((0, dim or 0), np.float32))


def judged_by(facts: Facts) -> Metric:
    """The metric by which searches of a store are judged and ranked. Raises InvalidInputError."""
    metric = facts.metric or "cosine"
    if metric not in _JUDGED:
        raise InvalidInputError(
            f"{facts.name}: its vectors are searched by {metric}, which is carried but not judged; "
            f"expected {few(_JUDGED)}"
        )
    return _JUDGED[metric]


def match(old: Source, new: Source, *, least: int = 20) -> Matched:
    """Pairs by id, whatever the order of either side; `new` is the smaller side as a rule.

    Raises InvalidInputError for fewer than `least` pairs, and a vector of zeros only.
    """
    made = read_all(new)
    wanted = set(made.ids)
    stored = read_all(old, wanted)
    places = {name: row for row, name in enumerate(made.ids)}
    order = np.array([places[name] for name in stored.ids], np.int64)
    known = set(stored.ids)
    lost = [name for name in made.ids if name not in known]
    if len(stored) < least:
        why = "embed more of them by the new model"
        if lost:
            missing = few(map(repr, lost))
            why = f"{old.facts().name} has none for {missing}; are the ids of both sides the same?"
        raise InvalidInputError(
            f"expected at least {least} items with both vectors, found {len(stored)}: {why}"
        )
    pairs = Pairs(stored.ids, stored.vectors, made.vectors[order], judged_by(old.facts()))
    for side, vectors in ((old, pairs.old), (new, pairs.new)):
        if len(zeros := np.flatnonzero(~vectors.any(1))):
            raise InvalidInputError(
                f"{side.facts().name}: expected vectors with a direction, got zeros only in "
                f"{few(repr(pairs.ids[row]) for row in zeros.tolist())}; leave these items out"
            )
    return Matched(pairs, lost, [])
