"""Inspect the vectors of a store, choose a sample of its items, and match pairs of vectors.

A pair is the old and the new model's vectors of one item. Maps are fitted to pairs and judged by
them.
"""

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nobackfill.adopt.sources.source import (
    Dimensioned,
    Facts,
    Rows,
    SearchMetric,
    Source,
    check_rows,
    repeated_ids,
)
from nobackfill.errors import InvalidInputError, join_few
from nobackfill.metrics.distances import Metric
from nobackfill.metrics.ranking import Ints
from nobackfill.ridge import Doubles
from nobackfill.vectors import Vectors, normalise

# Items read at a time.
WINDOW_ITEMS = 10_000
# Metrics of stores that searches can be judged and ranked by.
_JUDGED: Mapping[SearchMetric, Metric] = {
    "cosine": "cosine", "squared_l2": "l2", "inner_product": "inner_product",
}  # fmt: skip


@dataclass(frozen=True)
class Pairs:
    """The old and the new model's vectors of n items, row by row.

    Attributes:
        ids: The n ids.
        old: Vectors by the old model, float32 [n, a].
        new: Vectors by the new model, float32 [n, b].
        metric: Metric of the old vectors' store; cosine if the store declares none.
    """

    ids: list[str]
    old: Vectors
    new: Vectors
    metric: Metric = "cosine"

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def exchange_models(self) -> "Pairs":
        """Return the same pairs with the roles of both models exchanged, for a query adapter.
        Arrays are shared, and the metric stays.
        """
        return Pairs(self.ids, self.new, self.old, self.metric)


@dataclass(frozen=True)
class MatchResult:
    """The result of `match_by_id`.

    Attributes:
        pairs: Items with a vector by both models.
        ids_without_old: Ids that only the new side has.
    """

    pairs: Pairs
    ids_without_old: list[str]


def read_all(source: Source, only_ids: Collection[str] | None = None) -> Rows:
    """Read the rows of a source into memory.

    Args:
        source: The source; every vector of it is read.
        only_ids: Ids of the rows to return; None: all. Ids that the source lacks are ignored. With
            no ids, every vector is still read and checked.

    Returns:
        Ids and vectors, float32 [n, dim]; [0, 0] for a source without vectors. Keys and versions
        are left out. They are in the order of the source.

    Raises:
        InvalidInputError: A vector holds NaN or infinity, dimensions differ, an id occurs twice
            among the returned rows, or a file is damaged.
        UnavailableError: The source's server does not answer.
        NotPermittedError: The server refuses the user, or may hide rows from this role.
        IncompatibleSpaceError: Files of one folder record different models.
        NotFoundError: The table or the collection was deleted meanwhile.
        BusyError: Others hold the store, or its server has too many requests.
        ConfigurationError: The process was forked after the source was opened (LanceDB).
    """
    where = source.facts().name
    ids: list[str] = []
    vectors: list[Vectors] = []
    dim = None
    for window in source.windows(WINDOW_ITEMS):
        rows = check_rows(source.read(window), dim, where)
        if not len(rows):
            continue
        dim = rows.vectors.shape[1]
        kept = (
            range(len(rows))
            if only_ids is None
            else [i for i, x in enumerate(rows.ids) if x in only_ids]
        )
        ids += [rows.ids[i] for i in kept]
        vectors.append(rows.vectors[np.asarray(kept, np.int64)])
    _refuse_repeated(ids, where)
    return Rows(ids, np.concatenate(vectors) if vectors else np.empty((0, dim or 0), np.float32))


def judging_metric(facts: Facts) -> Metric:
    """Return the metric by which searches of a store are judged; cosine if it declares none.

    Returns:
        "cosine", "l2" or "inner_product".

    Raises:
        InvalidInputError: The store searches by a metric that is migrated but not judged (l1).
    """
    metric = facts.metric or "cosine"
    if metric not in _JUDGED:
        raise InvalidInputError(
            f"{facts.name}: its vectors are searched by {metric}, for which there is no verdict; "
            f"expected one of {join_few(_JUDGED)}. `nobackfill carry` migrates the vectors "
            "without a verdict"
        )
    return _JUDGED[metric]


def match_by_id(old: Source, new: Source, *, min_pair_count: int = 20) -> MatchResult:
    """Match the vectors of two sources by id.

    All vectors of `new` are held in memory, and those vectors of `old` that have a partner. Both
    sources are read once; their orders may differ.

    Args:
        old: Vectors by the old model; usually the gallery.
        new: Vectors by the new model; usually a sample of it.
        min_pair_count: Smallest number of pairs. With 0, no pairs are no error.

    Returns:
        The pairs in the order of `old`, with its metric; ids of `new` that `old` lacks. Ids that
        only `old` has are left out.

    Raises:
        InvalidInputError: Fewer than `min_pair_count` items have both vectors, a vector of a pair
            has only zeros, the metric of `old` cannot be judged; or as `read_all`. An id occurs
            twice in `new`, or twice in `old` among the matched ones.
        UnavailableError: The server of a source does not answer.
        NotPermittedError: The server refuses the user, or may hide rows from this role.
        IncompatibleSpaceError: Files of one folder record different models.
        NotFoundError: The table or the collection of a source was deleted meanwhile.
        BusyError: Others hold a store, or its server has too many requests.
        ConfigurationError: The process was forked after a source was opened (LanceDB).
    """
    # Before minutes of reading: the metric of `old` may be one that cannot be judged.
    metric = judging_metric(old.facts())
    sample = read_all(new)
    stored = read_all(old, set(sample.ids))
    places = {name: row for row, name in enumerate(sample.ids)}
    order = np.array([places[name] for name in stored.ids], np.int64)
    known = set(stored.ids)
    lost = [name for name in sample.ids if name not in known]
    if len(stored) < min_pair_count:
        why = "embed more items by the new model"
        if not len(sample):
            why = f"{new.facts().name} has no items with vectors; name another store with --new"
        if lost:
            missing = join_few(map(repr, lost))
            why = (
                f"{old.facts().name} has no vector for {missing}; check that the ids of both sides "
                "are the same"
            )
        raise InvalidInputError(
            f"expected at least {min_pair_count} items with vectors of both models, found "
            f"{len(stored)}: {why}"
        )
    pairs = Pairs(stored.ids, stored.vectors, sample.vectors[order], metric)
    for side, vectors in ((old, pairs.old), (new, pairs.new)):
        if len(zeros := np.flatnonzero(~vectors.any(1))):
            raise InvalidInputError(
                f"{side.facts().name}: expected vectors other than zero, got only zeros for the "
                f"items {join_few(repr(pairs.ids[row]) for row in zeros.tolist())}; leave these "
                "items out"
            )
    return MatchResult(pairs, lost)


MOST_CLUSTERS = 256
# Vectors that k-means is fitted to.
_FITTED_ON = 20_000
_ROUNDS = 10
_BLOCK = 20_000
# Rows whose distances to the sample are computed at once.
_NEAR_BLOCK = 2000


def sample_spread_rows(rows: Rows, count: int, seed: int = 0) -> list[str]:
    """Choose items at random so that they are spread over the space.

    The old vectors are clustered by k-means. Each cluster gives a share in proportion to its size,
    and at least one item while there are enough.

    Args:
        rows: All items. Their vectors are finite; their order matters for the choice.
        count: Number of items to choose, 1 to all.
        seed: Seed of the random choice; the same seed chooses the same items.

    Returns:
        `count` ids in the order of `rows`.

    Raises:
        InvalidInputError: `count` is less than 1 or more than there are items.
        ValueError: `seed` is below 0.
    """
    _check_count(count, len(rows))
    rng = np.random.default_rng(seed)
    cluster = cluster_vectors(rows.vectors, _cluster_count(count), rng)
    sizes = np.bincount(cluster)
    draws: list[Ints] = []
    for number, share in enumerate(_shares(sizes, count, sizes)):
        members = np.flatnonzero(cluster == number)
        draws.append(rng.choice(members, share, replace=False))
    return [rows.ids[row] for row in sorted(np.concatenate(draws).tolist())]


def _check_count(count: int, total: int) -> None:
    if not 1 <= count <= total:
        raise InvalidInputError(
            f"-n, the number of items to choose: expected 1 to {total}, which is all items, got "
            f"{count}; choose fewer"
        )


def _cluster_count(count: int) -> int:
    """Return the number of clusters that a sample of `count` items is drawn from."""
    return min(MOST_CLUSTERS, max(1, count // 8))


def include_query_items(
    choice: list[str], ids: Collection[str], queried: Sequence[str]
) -> list[str]:
    """Replace some items of a sample by items of queries; at least half of it stays.

    Args:
        choice: The ids of the sample.
        ids: The ids of all items.
        queried: Ids of items that test queries should find, in order of preference. Unknown ids
            are ignored, and an id that is listed twice counts once.

    Returns:
        As many ids; the items of queries that replaced others come last.
    """
    chosen, items = set(choice), set(queried)
    spare = [name for name in choice if name not in items]
    missing = [name for name in dict.fromkeys(queried) if name in ids and name not in chosen]
    missing = missing[: min(len(choice) // 2, len(spare))]
    dropped = np.random.default_rng(0).choice(len(spare), len(missing), replace=False)
    leave = {spare[place] for place in dropped.tolist()}
    return [name for name in choice if name not in leave] + missing


@dataclass(frozen=True)
class SourceSample:
    """The result of `sample_source`.

    Attributes:
        ids: The chosen ids.
        source_count: Number of items of the source, at least 1.
        query_item_ids: The ids of `queried` that the source has.
        random_rows: Random items of the source, at most 20,000 or twice the sample; all if it has
            no more.
    """

    ids: list[str]
    source_count: int
    query_item_ids: set[str]
    random_rows: Rows


def sample_source(
    source: Source, count: int, queried: Sequence[str] = (), seed: int = 0
) -> SourceSample:
    """Choose items of a source as `sample_spread_rows` does, without holding all of them in memory.

    A source with more items than both 20,000 and twice the sample is read twice: k-means is fitted
    to random items of the first pass, and the second pass draws from each cluster. If an item
    changes meanwhile, either state may count.

    Args:
        source: The source; nothing is written.
        count: Number of items to choose, at least 1; all are chosen if there are fewer.
        queried: Ids of items that test queries should find, as in `include_query_items`.
        seed: Seed of the random choices; the same seed chooses the same items of a source that has
            not changed.

    Raises:
        InvalidInputError: A vector holds NaN or infinity, dimensions differ, an id occurs twice
            among those held in memory or chosen, or a file is damaged. The source has no items, or
            `count` is less than 1.
        UnavailableError: The source's server does not answer.
        NotPermittedError: The server refuses the user, or may hide rows from this role.
        IncompatibleSpaceError: Files of one folder record different models.
        NotFoundError: The table or the collection was deleted meanwhile.
        BusyError: Others hold the store, or its server has too many requests.
        ConfigurationError: The process was forked after the source was opened (LanceDB).
        ValueError: `seed` is below 0.
    """
    where = source.facts().name
    random, total, query_items = _random_items(
        source, max(_FITTED_ON, 2 * count), set(queried), seed
    )
    _refuse_repeated(random.ids, where)
    if not total:
        raise InvalidInputError(
            f"{where}: expected items with vectors, found none; name another SOURCE"
        )
    if total == len(random):
        choice = sample_spread_rows(random, min(count, total), seed)
    else:
        _check_count(min(count, total), total)
        choice = _draw_from_clusters(source, random, count, seed)
        _refuse_repeated(choice, where)
    ids = include_query_items(choice, query_items, queried)
    return SourceSample(ids, total, query_items, random)


def _random_items(
    source: Source, most: int, query_ids: set[str], seed: int
) -> tuple[Rows, int, set[str]]:
    """Draw up to `most` items of a source, each with the same probability (Vitter's algorithm R).

    Returns:
        The items, in the order of the source if there are no more; the number of all items; the ids
        of `query_ids` among them.
    """
    where, rng = source.facts().name, np.random.default_rng(seed + 1)
    ids: list[str] = []
    vectors = np.empty((0, 0), np.float32)
    query_items, total = set[str](), 0
    for window in source.windows(WINDOW_ITEMS):
        rows = check_rows(source.read(window), vectors.shape[1] if total else None, where)
        if not len(rows):
            continue
        if not total:
            vectors = np.empty((most, rows.vectors.shape[1]), np.float32)
        query_items |= query_ids.intersection(rows.ids)
        numbers = total + np.arange(len(rows))
        places = (rng.random(len(rows)) * (numbers + 1)).astype(np.int64)
        places = np.where(numbers < most, numbers, places)
        for row in np.flatnonzero(places < most).tolist():
            place = int(places[row])
            ids[place : place + 1] = [rows.ids[row]]
            vectors[place] = rows.vectors[row]
        total += len(rows)
    return Rows(ids, vectors[: len(ids)]), total, query_items


def _draw_from_clusters(source: Source, random: Rows, count: int, seed: int) -> list[str]:
    """Read a source again, and draw from each cluster of it a share in proportion to its size.

    Each cluster holds several times its expected share at random, so that the sizes of the whole
    source decide, and nothing else of it is held.
    """
    where, rng = source.facts().name, np.random.default_rng(seed)
    centres = _centres(random.vectors, _cluster_count(count), rng)
    near = np.bincount(_nearest(random.vectors, centres), minlength=len(centres))
    most = 32 + 4 * count * near // len(random)
    # For each cluster, number and id of an item by its place in the cluster's choice.
    choices: list[dict[int, tuple[int, str]]] = [{} for _ in centres]
    sizes, number = np.zeros(len(centres), np.int64), 0
    for window in source.windows(WINDOW_ITEMS):
        rows = check_rows(source.read(window), centres.shape[1], where)
        if not len(rows):
            continue
        cluster = _nearest(rows.vectors, centres)
        added = np.bincount(cluster, minlength=len(centres))
        # Where each row stands among all rows of its cluster.
        order = np.argsort(cluster, kind="stable")
        position = np.empty(len(rows), np.int64)
        position[order] = np.arange(len(rows)) - np.repeat(np.cumsum(added) - added, added)
        position += sizes[cluster]
        places = (rng.random(len(rows)) * (position + 1)).astype(np.int64)
        places = np.where(position < most[cluster], position, places)
        for row in np.flatnonzero(places < most[cluster]).tolist():
            choices[int(cluster[row])][int(places[row])] = number + row, rows.ids[row]
        sizes += added
        number += len(rows)
    held = np.minimum(sizes, most)
    result: list[tuple[int, str]] = []
    for one, share in zip(choices, _shares(sizes, min(count, int(held.sum())), held), strict=True):
        items = list(one.values())
        result += [items[row] for row in rng.choice(len(items), share, replace=False).tolist()]
    return [name for _, name in sorted(result)]


def _refuse_repeated(ids: Sequence[str], where: str) -> None:
    if twice := repeated_ids(ids):
        raise InvalidInputError(
            f"{where}: expected each id once, got {join_few(map(repr, twice))} more than once; "
            "remove the duplicates"
        )


def has_line_break(item_id: str) -> bool:
    """Tell whether an id has a line break, so that `encode_ids` refuses it."""
    return "\n" in item_id or "\r" in item_id


def encode_ids(ids: Sequence[str], error_name: str) -> str:
    """Encode ids as text with one id in each line; an empty text without ids.

    Args:
        ids: The ids.
        error_name: Name of their source in the error.

    Returns:
        Each line ends with a line feed. An empty id gives an empty line, which `read_ids` ignores.

    Raises:
        InvalidInputError: An id contains a line break.
    """
    if (broken := next(filter(has_line_break, ids), None)) is not None:
        raise InvalidInputError(
            f"{error_name}: expected ids without line breaks, because the sample is a file with "
            f"one id in each line; got {broken!r}. Choose another sample by --seed, or give this "
            "item another id"
        )
    return "".join(f"{name}\n" for name in ids)


def read_ids(path: Path) -> set[str]:
    """Read a file of ids, one in each line; empty lines are ignored.

    Spaces belong to the id, and a byte order mark does not. An id that occurs twice counts once.
    Lines may end as on Windows.

    Raises:
        InvalidInputError: The file is missing, cannot be read, or is not UTF-8.
    """
    try:
        return set(path.read_text("utf-8-sig").split("\n")) - {""}
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(
            f"{path}: cannot be read as a file of ids ({error}); `nobackfill sample --out` writes "
            "one"
        ) from error


@dataclass(frozen=True)
class Coverage:
    """The result of `measure_coverage`.

    Attributes:
        sample_distance: Mean cosine distance from an item to the nearest item of the sample.
        random_distance: The same for a random sample of the same size.
    """

    sample_distance: float
    random_distance: float

    @property
    def sentence(self) -> str:
        """Return both distances and their comparison in one sentence.

        If `random_distance` is 0, it says 0 % nearer.
        """
        nearer = (
            1 - self.sample_distance / self.random_distance if self.random_distance > 0 else 0.0
        )
        word = "nearer" if nearer >= 0 else "farther"
        return (
            f"the mean cosine distance from an item to the nearest item of this sample is "
            f"{self.sample_distance:.3f}, and {self.random_distance:.3f} for a random sample of "
            "the same size: "
            f"{abs(nearer):.1%} {word}; for three pairs of text models this made no map measurably "
            "better"
        )


def measure_coverage(source: Source, sampling: SourceSample, seed: int = 0) -> Coverage:
    """Measure how well a sample covers a source, compared with a random sample.

    A zero vector has the distance 1 to each item. The source is read again where the sampling does
    not hold all of it.

    Args:
        source: The source that was sampled.
        sampling: The sample; distances are measured for its random items.
        seed: Seed of the random sample.

    Raises:
        ValueError: The source has none of the sample's ids, or `seed` is below -1.
            InvalidInputError, UnavailableError, NotPermittedError, IncompatibleSpaceError,
            NotFoundError, BusyError: As `read_all`.
        ConfigurationError: The process was forked after the source was opened (LanceDB).
    """
    some, wanted = sampling.random_rows, set(sampling.ids)
    every = some if sampling.source_count == len(some) else read_all(source, wanted)
    rows = np.array([row for row, name in enumerate(every.ids) if name in wanted], np.int64)
    sample = every.vectors[rows]
    random = np.random.default_rng(seed + 1).permutation(len(some))[: len(sample)]
    others = np.setdiff1d(np.arange(len(some)), random)
    of_sample = _mean_distance(some.vectors, sample)
    at_random = _mean_distance(some.vectors[others], some.vectors[random])
    # An item of the random sample has the distance 0.
    return Coverage(of_sample, at_random * (1 - len(random) / sampling.source_count))


def _mean_distance(vectors: Vectors, others: Vectors) -> float:
    """Return the mean cosine distance of vectors to the nearest of `others`; 0 without vectors."""
    near = normalise(others).T
    cosines = [
        (normalise(vectors[first : first + _NEAR_BLOCK]) @ near).max(1)
        for first in range(0, len(vectors), _NEAR_BLOCK)
    ]
    # Rounding leaves an item a little off itself, on either side.
    return max(0.0, 1 - float(np.concatenate(cosines).mean())) if cosines else 0.0


def cluster_vectors(vectors: Vectors, count: int, rng: np.random.Generator) -> Ints:
    """Cluster vectors by k-means, fitted to a random 20,000 of them at most.

    There are fewer clusters than `count` if there are fewer different vectors.

    Args:
        vectors: float32 [n, dim], n at least 1. All are finite.
        count: Most clusters, at least 1.
        rng: Source of the random choices.

    Returns:
        The cluster of each row, int64 [n], numbered from 0 without gaps.

    Raises:
        ValueError: There are no vectors.
    """
    near = _nearest(vectors, _centres(vectors, count, rng))
    return np.unique(near, return_inverse=True)[1].astype(np.int64)


def _centres(vectors: Vectors, count: int, rng: np.random.Generator) -> Vectors:
    """Return the centres of at most `count` clusters of vectors by k-means, float32 [c, dim]."""
    some = vectors
    if len(vectors) > _FITTED_ON:
        some = vectors[rng.choice(len(vectors), _FITTED_ON, replace=False)]
    centres = _far_apart(some, min(count, len(some)), rng)
    for _ in range(_ROUNDS):
        near = _nearest(some, centres)
        sums = np.zeros(centres.shape, np.float64)
        np.add.at(sums, near, some)
        sizes = np.bincount(near, minlength=len(centres))
        filled = sizes > 0
        centres[filled] = (sums[filled] / sizes[filled, None]).astype(np.float32)
    return centres


def _far_apart(vectors: Vectors, count: int, rng: np.random.Generator) -> Vectors:
    """Choose the first centres of k-means++ (Arthur and Vassilvitskii 2007).

    Each is drawn with a probability in proportion to its squared distance from the earlier ones, so
    that no far group is missed.
    """
    chosen = [int(rng.integers(len(vectors)))]
    distance = np.full(len(vectors), np.inf)
    for _ in range(count - 1):
        apart = np.square(vectors - vectors[chosen[-1]]).sum(1, dtype=np.float64)
        distance = np.minimum(distance, apart)
        total = distance.sum()
        if total == 0:
            break
        chosen.append(int(rng.choice(len(vectors), p=distance / total)))
    return vectors[chosen].copy()


def _nearest(vectors: Vectors, centres: Vectors) -> Ints:
    half = np.square(centres).sum(1) / 2
    found = [
        (vectors[first : first + _BLOCK] @ centres.T - half).argmax(1)
        for first in range(0, len(vectors), _BLOCK)
    ]
    return np.concatenate(found).astype(np.int64)


def _shares(sizes: Ints, count: int, most: Ints) -> list[int]:
    """Divide `count` in proportion to the sizes, with at least one each while there are enough.

    No share is larger than its `most`, whose sum is at least `count`.
    """
    exact = count * sizes / max(1, sizes.sum())
    shares = np.minimum(np.maximum(1, np.floor(exact)), most).astype(np.int64)
    # The remainder goes where the most is missing; a surplus comes from where the most is.
    while (left := count - int(shares.sum())) != 0:
        owed = np.where(shares < most, exact - shares, -np.inf) if left > 0 else shares - exact
        owed = np.where(shares > 0, owed, -np.inf) if left < 0 else owed
        shares[int(np.argmax(owed))] += 1 if left > 0 else -1
    return [int(share) for share in shares]


# Rows at either end of the order of keys by which drift is measured.
DRIFT_ROWS = 2000


@dataclass(frozen=True)
class Inspection:
    """The result of `inspect`.

    Attributes:
        facts: The facts that the store declares.
        count: Number of vectors.
        dim: Their dimension; None if there are none, or several dimensions.
        norms: Smallest, mean and largest norm; None without usable vectors.
        duplicates: Number of rows whose vector an earlier row has too.
        unusable: Number of rows with NaN or infinity.
        zeros: Number of rows with zeros only.
        drift: Squared distance between the mean vectors of the first and the last 2,000 rows by
            key, divided by the distance that chance gives. It is about 1 if nothing has changed.
            None for fewer than 200 usable rows, several dimensions, or equal vectors alone.
        refusals: Sentences about parts of the store that cannot be read or migrated.
    """

    facts: Facts
    count: int
    dim: int | None
    norms: tuple[float, float, float] | None
    duplicates: int
    unusable: int
    zeros: int
    drift: float | None
    refusals: list[str]

    @property
    def sentences(self) -> list[str]:
        """Return the inspection in sentences, one line each, with `refusals` last."""
        metric = self.facts.metric or "not declared, so cosine"
        lines = [
            f"{self.facts.name}: {self.count} vectors"
            + (f" of dimension {self.dim}" if self.dim else ""),
            f"metric: {metric}; model: {self.facts.model or 'not declared'}",
        ]
        if self.norms is not None:
            low, mean, high = self.norms
            unit = ", all 1" if abs(low - 1) < 1e-3 and abs(high - 1) < 1e-3 else ""
            lines.append(f"norms: {low:.3f} to {high:.3f}, mean {mean:.3f}{unit}")
            lines.append(f"duplicates: {self.duplicates}")
        if self.unusable or self.zeros:
            lines.append(
                f"NaN or infinity in {self.unusable} rows, only zeros in {self.zeros}: correct or "
                "delete these items before you migrate"
            )
        if self.drift is not None:
            lines.append(
                f"the first and the last rows differ {self.drift:.1f} times as much as two random "
                "parts would"
                + ("; take the sample from all rows" if self.drift > 5 else ", so no drift")
            )
        return lines + self.refusals


def inspect(source: Source) -> Inspection:
    """Count and check the vectors of a source. Reads every vector once, and writes nothing.

    A window that cannot be read becomes a sentence in `refusals`. A source with vectors of several
    dimensions is described by these alone.

    An id that occurs twice is not detected. One hash for each vector stays in memory, 8 bytes.
    Without a finite vector, `norms` is None. Without vectors of one dimension, `dim` and `drift`
    are None.

    Raises:
        UnavailableError: The source's server does not answer.
        NotPermittedError: The server refuses the user, or may hide rows from this role.
        InvalidInputError: The metric is not supported, or the column of vectors cannot be chosen.
        IncompatibleSpaceError: Files of one folder record different models.
        NotFoundError: The table or the collection was deleted meanwhile.
        BusyError: Others hold the store, or its server has too many requests.
        ConfigurationError: The process was forked after the source was opened (LanceDB).
    """
    facts = source.facts()
    if isinstance(source, Dimensioned) and len(mixed := source.count_by_dim()) > 1:
        each = join_few(f"{dim} in {rows} rows" for dim, rows in mixed.items())
        why = (
            f"vectors of several dimensions: {each}; a map needs one dimension, so choose the rows "
            "of one model with --where, as in --where 'vector_dims(COLUMN) = "
            f"{next(iter(mixed))}'"
        )
        return Inspection(facts, sum(mixed.values()), None, None, 0, 0, 0, None, [why])
    hashes = array("q")
    count = unusable = zeros = 0
    low, high, total = np.inf, 0.0, 0.0
    dims: dict[int, str] = {}
    first: list[Vectors] = []
    last: list[Vectors] = []
    refusals = []
    for window in source.windows(WINDOW_ITEMS):
        try:
            rows = source.read(window)
        except InvalidInputError as error:
            refusals.append(str(error))
            continue
        if not len(rows):
            continue
        count += len(rows)
        dims.setdefault(rows.vectors.shape[1], rows.ids[0])
        good = rows.vectors[np.isfinite(rows.vectors).all(1)]
        unusable += len(rows) - len(good)
        hashes.extend(hash(vector.tobytes()) for vector in good)
        norms = np.linalg.norm(good.astype(np.float64), axis=1)
        zeros += int((norms == 0).sum())
        if len(norms):
            low, high = min(low, float(norms.min())), max(high, float(norms.max()))
            total += float(norms.sum())
        if sum(map(len, first)) < DRIFT_ROWS:
            first.append(good)
        last = [*last, good] if sum(map(len, last)) < DRIFT_ROWS else [last[-1], good]
    if len(dims) > 1:
        found = ", ".join(f"{dim} from {name!r} on" for dim, name in dims.items())
        refusals.append(
            f"vectors of several dimensions: {found}; put the vectors of each model into a store "
            "of their own"
        )
    usable = count - unusable
    # A set of 10 million hashes would take 1 GB.
    ordered = np.frombuffer(hashes, np.int64)
    ordered.sort()
    duplicates = int((ordered[1:] == ordered[:-1]).sum())
    return Inspection(
        facts=facts,
        count=count,
        dim=next(iter(dims)) if len(dims) == 1 else None,
        norms=(low, total / usable, high) if usable else None,
        duplicates=duplicates,
        unusable=unusable,
        zeros=zeros,
        drift=_drift(first, last, usable) if len(dims) == 1 else None,
        refusals=refusals,
    )


def _drift(first: list[Vectors], last: list[Vectors], count: int) -> float | None:
    """Compute |mean - mean|² / ((1/n + 1/m) times the variance within both ends of a store."""
    if count < 200 or not first or not last:
        return None
    size = min(DRIFT_ROWS, count // 2)
    ends = [np.concatenate(first)[:size], np.concatenate(last)[-size:]]
    centres: list[Doubles] = [end.mean(0, np.float64) for end in ends]
    within = sum(float(end.var(0, np.float64).sum()) for end in ends) / 2
    apart = float(np.square(centres[0] - centres[1]).sum())
    chance = within * (1 / len(ends[0]) + 1 / len(ends[1]))
    return apart / chance if chance > 0 else None
