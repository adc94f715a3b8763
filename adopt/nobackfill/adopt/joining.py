"""One ranking of items whose vectors come from two models: every score as the log-odds of a match.

A carried item's score joins old/old and new/carried, a native one's is new/new, and may keep a
share of what it scored while it was carried. Each distance is standardised per query over the same
few anchor items, so that "near" means the same in every space; a line per origin, fitted on
relevance, turns it into log-odds. Distances themselves are never compared between origins: a new
query is nearer to carried items than to native ones on average.
"""

import io
import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from nobackfill.adopt.maps import read_arrays, written_by
from nobackfill.durable import write_file
from nobackfill.metrics.distances import Metric, distances
from nobackfill.vectors import Vectors, check_vectors, normalised

# Of the file; those of format 2 keep no share, those of format 4 name another metric than cosine.
FORMAT, OTHERWISE, FORMATS = 3, 4, (2, 3, 4)
# Candidates of a query from each search, and those of them that are embedded again.
HITS = 100
# Items by which a query's distances are standardised.
ANCHORS = 1000
# Queries that a hub is told by, and the nearest of them that say how much of one an item is.
CROWD, NEAREST = 1000, 10
# Values of the many that are no match on which a line is fitted.
_MOST_OTHERS = 200_000
_ROUNDS = 30

Block = NDArray[np.float32]
Mask = NDArray[np.bool_]
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class OddsLine:
    """log-odds = slope x nearness + share x nearness as a carried item + intercept."""

    slope: float = 1.0
    intercept: float = 0.0
    share: float = 0.0

    def __call__(self, nearness: Block, carried: Block) -> Block:
        odds = self.slope * nearness + self.intercept
        return np.asarray(odds + self.share * carried if self.share else odds, np.float32)


@dataclass(frozen=True)
class Joining:
    """`weight`: the new model's share in a carried item's score, 0 is the old model alone.

    `joined`, `native`: lines of the two origins. Anchors are the same items by the old model
    [m, a], carried [m, b] and by the new model [m, b], rows of norm 1 where `metric`, the store's,
    is cosine. `crowd`: queries by the new model [q, b] that correct hubs among carried items; none:
    they are not corrected. `mark`: the digest of the map that carries.
    """

    weight: float
    joined: OddsLine
    native: OddsLine
    old: Vectors
    carried: Vectors
    new: Vectors
    mark: str = ""
    crowd: Vectors = field(default_factory=lambda: np.empty((0, 0), np.float32))
    metric: Metric = "cosine"

    def near(self, by_old: Vectors, by_new: Vectors, old: Vectors, carried: Vectors) -> Block:
        """Both models' nearness [q, n] of items with vectors old [n, a] and carried [n, b] to
        queries by either model, [q, a] and [q, b]."""
        near_old = nearness(by_old, old, self.old, metric=self.metric)
        less = (hubs(carried, self.crowd), self._hubs)
        near_new = nearness(by_new, carried, self.carried, less, self.metric)
        return np.asarray(self.weight * near_new + (1 - self.weight) * near_old, np.float32)

    def of_carried(self, near: Block) -> Block:
        """Log-odds [q, n] of carried items by their `near`."""
        return self.joined(near, near)

    @cached_property
    def _hubs(self) -> Block:
        return hubs(self.carried, self.crowd)

    def of_native(self, by_new: Vectors, new: Vectors, near: Block) -> Block:
        """Log-odds [q, n] of items with the new model's own vectors [n, b] for queries [q, b];
        `near`: as if carried."""
        return self.native(nearness(by_new, new, self.new, metric=self.metric), near)


def candidates(*searches: Callable[[int], Sequence[Key]]) -> list[Key]:
    """Collect the items that are ranked for a query, each once: the HITS nearest of each search.

    `nobackfill.serve.Dual` searches the store, `fit` searches the judged items: what is predicted
    is what is served.
    """
    return list(dict.fromkeys(key for search in searches for key in search(HITS)))


def hubs(vectors: Vectors, crowd: Vectors) -> Block:
    """How near vectors [n, d] are to any query at all: half the mean cosine to the 10 nearest of
    `crowd` [q, d], 0 without one; [n].

    Taken from a cosine it leaves what is near to one query (CSLS: Conneau et al. 2018, Eq. 3,
    without the term that all items of a query share).
    """
    if not len(crowd):
        return np.zeros(len(vectors), np.float32)
    near = normalised(vectors) @ crowd.T
    count = min(NEAREST, len(crowd))
    return np.asarray(np.partition(near, -count, axis=1)[:, -count:].mean(1) / 2, np.float32)


def nearness(
    queries: Vectors,
    vectors: Vectors,
    anchors: Vectors,
    less: tuple[Block, Block] | None = None,
    metric: Metric = "cosine",
) -> Block:
    """Deviations [q, n] by which vectors are nearer to queries [q, d] than anchors on average;
    `less` is taken from the cosines of either."""
    if metric == "cosine":
        unit = normalised(queries)
        block = np.concatenate([unit @ normalised(vectors).T, unit @ anchors.T], axis=1)
    else:
        sides = [distances(queries, side, metric) for side in (vectors, anchors)]
        block = -np.concatenate(sides, axis=1).astype(np.float32)
    if less is not None:
        block -= np.concatenate(less)
    columns = np.arange(len(vectors), block.shape[1])
    standard: Block = standardised(-block, columns)[:, : len(vectors)]
    return standard


def standardised(block: Block, anchors: NDArray[np.int64]) -> Block:
    """Nearness [q, g] from distances [q, g]: how far below the mean of the anchors' columns, in
    their deviations."""
    some = block[:, anchors]
    spread = np.maximum(some.std(1, keepdims=True), 1e-12)
    return np.asarray((some.mean(1, keepdims=True) - block) / spread, np.float32)


def fit_line(matches: Block, rest: Block, seed: int = 0) -> OddsLine:
    """Logistic regression on the nearness of matches [m, 1] and of all else [n, 1], by Newton's
    method; [m, 2] and [n, 2] with their nearness as carried items.

    Among all items, so that lines of two origins speak of the same odds; of the rest, 200,000 drawn
    by `seed` stand for all.
    """
    count = matches.shape[1]
    if not len(matches) or not len(rest):
        return OddsLine()
    weight, others = 1.0, rest
    if len(rest) > _MOST_OTHERS:
        weight = len(rest) / _MOST_OTHERS
        others = rest[np.random.default_rng(seed).choice(len(rest), _MOST_OTHERS, replace=False)]
    x = np.concatenate([matches, others]).astype(np.float64)
    rows = np.concatenate([x, np.ones((len(x), 1))], 1)
    truth = np.arange(len(x)) < len(matches)
    weights = np.where(truth, 1.0, weight)
    # A slope of 1 is expected with a deviation of 10: perfect separation has no other end.
    prior, precision = np.eye(count + 1)[0], np.array([*[0.01] * count, 1e-9])
    line = prior + np.eye(count + 1)[-1] * np.log(len(matches) / len(rest))
    for _ in range(_ROUNDS):
        odds = 1 / (1 + np.exp(-np.clip(rows @ line, -30, 30)))
        slope = rows.T @ (weights * (truth - odds)) - precision * (line - prior)
        curve = (rows * (weights * odds * (1 - odds))[:, None]).T @ rows + np.diag(precision)
        step = np.linalg.solve(curve, slope)
        line = line + step * min(1.0, 4.0 / max(1e-12, float(np.abs(step).max())))
        if np.abs(step).max() < 1e-6:
            break
    # What is nearer is never less likely.
    found = OddsLine(
        max(1e-3, float(line[0])), float(line[-1]), float(line[1]) if count == 2 else 0.0
    )
    return found if found.share >= 0 else fit_line(matches[:, :1], rest[:, :1], seed)


def save_joining(path: Path, found: Joining) -> None:
    """Write it as arrays and a line of JSON. Raises CannotWriteError."""
    lines = {name: [line.slope, line.intercept, line.share] for name, line in _lines(found)}
    header = {"format": FORMAT, "weight": found.weight, "mark": found.mark, **lines}
    if found.metric != "cosine":
        header |= {"format": OTHERWISE, "metric": found.metric}
    buffer = io.BytesIO()
    text = np.array(json.dumps(header, sort_keys=True))
    np.savez(
        buffer, header=text, old=found.old, carried=found.carried, new=found.new, crowd=found.crowd
    )
    write_file(path, buffer.getvalue(), 0o600)


def load_joining(path: Path) -> Joining:
    """Read what `save_joining` wrote. Raises NotFoundError, InvalidInputError for another file."""
    with written_by(path, "nobackfill fit --joining"):
        header, arrays = read_arrays(path)
        if header["format"] not in FORMATS:
            raise ValueError(f"format {header['format']}")
        old, carried, new, crowd = (
            check_vectors(arrays[name], arrays[name].shape[1], what=name)
            for name in ("old", "carried", "new", "crowd")
        )
        if not len(old) == len(carried) == len(new) > 0 or 0 in (old.shape[1], new.shape[1]):
            raise ValueError(f"anchors {old.shape}, {carried.shape} and {new.shape}")
        if carried.shape != new.shape or (len(crowd) and crowd.shape[1] != new.shape[1]):
            raise ValueError(f"vectors of dimensions {carried.shape}, {new.shape}, {crowd.shape}")
        joined, native = (OddsLine(*map(float, header[name])) for name in ("joined", "native"))
        weight, metric = float(header["weight"]), header.get("metric", "cosine")
        numbers = (weight, *astuple(joined), *astuple(native))
        if metric not in get_args(Metric) or not np.isfinite(numbers).all():
            raise ValueError(f"metric {metric!r}, numbers {numbers}")
        return Joining(
            weight, joined, native, old, carried, new, str(header["mark"]), crowd, metric
        )


def _lines(found: Joining) -> list[tuple[str, OddsLine]]:
    return [("joined", found.joined), ("native", found.native)]
