"""Compare rivals on frozen vectors: `compare.py --vectors FILE.npz`.

A file of numpy arrays holds the vectors of the same items by an old and by a new model, divided
into training items and test items:

    old, new             [n, a] and [n, b]: training items
    side                 [n, s]: side-information stored with old vectors (may be absent)
    labels               [n]: classes (may be absent)
    test_old, test_new, test_side, test_labels: the same of test items

Any of them may be int8 with an array NAME_scale [d] that multiplies it. `side_NAME` is read as
`side`. Several files are read as one.

Each test item queries all others. With labels, items of its class are relevant (CMC-1 and mAP).
agreement@10 is the share of the new model's own ten hits that a row also returns. known-item is the
share of items that are the nearest item to their own new vector.

Every difference is measured against the old model (old/old) and against our own row (the first of
residual_side and residual that was run), paired by query, over all seeds. Its 95 % interval draws
classes where there are at least ten, and queries otherwise.
"""

import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from nobackfill.durable import write_file
from nobackfill.errors import ConfigurationError, InvalidInputError, NotFoundError, join_few
from nobackfill.metrics.backfill import (
    ReembeddingOrder,
    curves_by_order,
    gain_order,
    random_order,
    uncertainty_order,
)
from nobackfill.metrics.bootstrap import FEWEST_DECIDING_CLASSES, paired_bootstrap
from nobackfill.metrics.neighbours import exact_neighbours
from nobackfill.metrics.ranking import rank, relevance_by_label
from nobackfill.metrics.retrieval import PerQuery, average_precision, cmc
from nobackfill.research.results import ResultPart, read_result_file
from nobackfill.research.rivals.rival import Floats, Rival, TrainingVectors, UncertainRival
from nobackfill.research.rivals.rows import list_rivals

_AGREEMENT = 10
# Rows without a transform: the search of the old model, and of the new model after a re-embedding.
STAY, REEMBED = "old/old", "new/new"
# Our own rows: the default of training with side-information, and without.
OUR_MAPS = ("residual_side", "residual")
# Orders in which a gallery is re-embedded.
RANDOM = "random"
ORDERS = (RANDOM, "uncertainty", "gain")
# Names of the figures in tables.
MEASURES = {"cmc1": "CMC-1", "map": "mAP", "agreement": "agreement@10", "known_item": "known-item"}


@dataclass(frozen=True)
class FrozenVectors:
    """The arrays of one or more files.

    Attributes:
        train: the training items, at least one.
        old: float32 [m, a], the test items by the old model, m at least 2.
        new: float32 [m, b], the same by the new model.
        side: float32 [m, s], their side-information; None unless training and test items have it.
        labels: int64 [m], their classes; None without classes.
    """

    train: TrainingVectors
    old: Floats
    new: Floats
    side: Floats | None
    labels: NDArray[np.int64] | None

    def test_parts(self) -> dict[str, NDArray[np.bool_]]:
        """Return masks of the test queries by part, bool [m].

        Returns:
            "seen classes" and "unseen classes", by whether a training item has the query's class; a
            part without queries is left out. If test or training items lack labels, only "all".
        """
        if self.labels is None or self.train.labels is None:
            return {"all": np.ones(len(self.old), bool)}
        known = np.isin(self.labels, self.train.labels)
        parts = {"seen classes": known, "unseen classes": ~known}
        return {name: part for name, part in parts.items() if part.any()}

    def take_pairs(self, count: int, seed: int) -> "FrozenVectors":
        """Return a copy with `count` training items, drawn by a seed.

        Args:
            count: the number of training items, at least 0.
            seed: chooses them, at least 0; a seed gives the same again. Their order stays.

        Returns:
            The copy, with the same test items; this object itself if it does not have more items.

        Raises:
            ValueError: the seed is negative, and there are more items.
        """
        train = self.train
        if count >= len(train.old):
            return self
        drawn = np.sort(np.random.default_rng(seed).permutation(len(train.old))[:count])
        fewer = replace(
            train,
            old=train.old[drawn],
            new=train.new[drawn],
            side=None if train.side is None else train.side[drawn],
            labels=None if train.labels is None else train.labels[drawn],
        )
        return replace(self, train=fewer)


def read_vectors(paths: Sequence[Path]) -> FrozenVectors:
    """Read the arrays of one or more files; an array of a later file replaces an earlier one.

    Args:
        paths: .npz files, as the module's docstring describes them; none lacks every array.

    Returns:
        The arrays in float32; int8 is scaled if the files have its scale. Side-information counts
        only if training and test items have it. `train.unit_norm` is set if all new test vectors
        have norm 1 within 0.02.

    Raises:
        NotFoundError: a file does not exist.
        InvalidInputError: a file is no .npz without pickled objects. An array is missing, has
            another shape than its partners, is not finite, or has two candidates. Labels are no
            whole numbers, or a scale does not fit. Or there is no training item, or fewer than two
            test items.
        EOFError, zlib.error, TypeError: a file is empty, has damaged compressed data, or is a .npy.
    """
    arrays: dict[str, NDArray[Any]] = {}
    for path in paths:
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays |= {name: file[name] for name in file.files}
        except FileNotFoundError as error:
            raise NotFoundError(
                f"--vectors {path}: there is no such file; write it with numpy.savez"
            ) from error
        except (ValueError, OSError, zipfile.BadZipFile, AttributeError) as error:
            raise InvalidInputError(
                f"--vectors {path}: expected arrays of numbers in a file of numpy.savez, but the "
                f"file cannot be read ({error}); write it again"
            ) from error

    def vectors(prefix: str, name: str, rows: int | None = None) -> Floats | None:
        key = _key(arrays, prefix, name)
        if key is None:
            return None
        array = arrays[key]
        if array.dtype.kind not in "iuf" or array.ndim != 2:
            raise InvalidInputError(
                f"--vectors: expected the array {key} to hold numbers of shape [n, d], got "
                f"{array.dtype} {list(array.shape)}; write the array again"
            )
        values = array.astype(np.float32)
        for scale in (f"{key}_scale", f"{key.removeprefix('test_')}_scale"):
            if array.dtype == np.int8 and scale in arrays:
                try:
                    values = values * arrays[scale].astype(np.float32)
                except ValueError as error:
                    raise InvalidInputError(
                        f"--vectors: expected the array {scale} to hold {array.shape[1]} numbers, "
                        f"one for each column of {key}, got {arrays[scale].dtype} "
                        f"{list(arrays[scale].shape)}; correct the array"
                    ) from error
                break
        if not np.isfinite(values).all():
            raise InvalidInputError(
                f"--vectors: expected finite numbers in the array {key}, got NaN or infinity; "
                "remove the rows of these items from all arrays"
            )
        if rows is not None and len(values) != rows:
            raise InvalidInputError(
                f"--vectors: expected {rows} rows in the array {key}, as in {prefix}old, got "
                f"{len(values)}; row i of both must be the same item"
            )
        return values

    sides = []
    for prefix in ("", "test_"):
        old = vectors(prefix, "old")
        if old is None or (new := vectors(prefix, "new", len(old))) is None:
            raise InvalidInputError(
                f"--vectors: expected the arrays {prefix}old and {prefix}new in the files, got "
                f"{join_few(sorted(arrays)) or 'no array'}; add them with numpy.savez"
            )
        if len(old) < (least := 2 if prefix else 1):
            raise InvalidInputError(
                f"--vectors: expected at least {least} rows in the array {prefix}old, got "
                f"{len(old)}; add vectors of more items"
            )
        labels = arrays.get(f"{prefix}labels")
        if labels is not None and (labels.shape != (len(old),) or labels.dtype.kind not in "iu"):
            raise InvalidInputError(
                f"--vectors: expected the array {prefix}labels to hold {len(old)} whole numbers, "
                f"got {labels.dtype} {list(labels.shape)}; number the classes, for example by "
                "numpy.unique(labels, return_inverse=True)"
            )
        sides.append((old, new, vectors(prefix, "side", len(old)), labels))
    (old, new, side, labels), (test_old, test_new, test_side, test_labels) = sides
    for name, one, other in (("old", old, test_old), ("new", new, test_new)):
        if one.shape[1] != other.shape[1]:
            raise InvalidInputError(
                f"--vectors: expected dimension {one.shape[1]} of the array test_{name}, as of "
                f"{name}, got {other.shape[1]}; compute both with the same model"
            )
    unit = bool(np.abs(np.linalg.norm(test_new, axis=1) - 1).max() < 0.02)
    if side is None or test_side is None:
        side = test_side = None
    train = TrainingVectors(old, new, side, None if labels is None else labels.astype(int), unit)
    tested = None if test_labels is None else test_labels.astype(int)
    return FrozenVectors(train, test_old, test_new, test_side, tested)


def _key(arrays: Mapping[str, NDArray[Any]], prefix: str, name: str) -> str | None:
    """Return the key of an array, PREFIX NAME or PREFIX NAME_WORD; None without one."""
    if prefix + name in arrays:
        return prefix + name
    starts = f"{prefix}{name}_"
    keys = [key for key in arrays if key.startswith(starts) and not key.endswith("_scale")]
    if len(keys) > 1:
        raise InvalidInputError(
            f"--vectors: expected one array {prefix}{name} in the files, got {', '.join(keys)}; "
            "remove the others"
        )
    return keys[0] if keys else None


class BenchDifference(ResultPart):
    """A row's figure minus that of another row: mean and 95 % interval.

    Attributes:
        classes: how many classes the interval draws; None: it draws queries.
    """

    mean: float
    low: float
    high: float
    classes: int | None

    @property
    def sign(self) -> int:
        """1 or -1 if the interval over classes lies on one side of 0, else 0."""
        if self.classes is None:
            return 0
        return int(self.low > 0) - int(self.high < 0)


class BenchRow(ResultPart):
    """The measured figures of one row: of a rival, or of a search without a transform.

    Attributes:
        maps: which vectors it maps: items, queries or none.
        figures: mean over queries and seeds, 0 to 1, by part of the test and name.
        differences: the same minus those of old/old.
        against_ours: the same minus those of our own row; empty for itself, or if none was run.
        backfill: mean over the curve from the mapped to the re-embedded gallery, by part, order and
            figure; only of a row that predicts variances.
        against_random: the same minus that of the random order.
        seconds: mean time to fit, in seconds; 0 without a transform.
        parameters: the number of fitted values; 0 without a transform.
        refusal: why the row was not run; the other fields are then empty.
    """

    maps: str
    figures: dict[str, dict[str, float]] = Field({})
    differences: dict[str, dict[str, BenchDifference]] = Field({})
    against_ours: dict[str, dict[str, BenchDifference]] = Field({})
    backfill: dict[str, dict[str, dict[str, float]]] = Field({})
    against_random: dict[str, dict[str, dict[str, BenchDifference]]] = Field({})
    seconds: float = 0.0
    parameters: int = 0
    refusal: str = ""


class BenchResults(ResultPart):
    """The results of one comparison, as they are written to a JSON file.

    Attributes:
        command: the command line, without folders.
        machine: where it ran.
        pairs: the number of training pairs of each seed.
        seeds: the number of seeds.
        queries: the number of test queries by part of the test.
        classes: the number of their classes by part; 0 without labels.
        rows: by name; first old/old and new/new, then the rivals.
    """

    command: str
    machine: str
    pairs: int
    seeds: int
    queries: dict[str, int]
    classes: dict[str, int]
    rows: dict[str, BenchRow]

    @property
    def our_row(self) -> str | None:
        """The name of our own row, the first of OUR_MAPS that was run; None without one."""
        return next(
            (one for one in OUR_MAPS if one in self.rows and not self.rows[one].refusal), None
        )


PerRow = dict[str, PerQuery]


def compare_vectors(
    vectors: FrozenVectors,
    *,
    names: Sequence[str] | None = None,
    pair_count: int | None = None,
    seed_count: int = 1,
    command: str = "compare_vectors()",
    machine: str = "",
    registry: Mapping[str, Callable[[], Rival]] | None = None,
) -> BenchResults:
    """Fit rivals on frozen vectors, and measure the searches that each of them serves.

    A rival that refuses the vectors becomes a row with the reason, and no error. The rows old/old
    and new/new, searches without a transform, are always there. No result is written; trained maps
    use a temporary folder, and seed torch's default generator.

    Args:
        vectors: the vectors.
        names: rivals to run, without repeats; None: all; empty: none.
        pair_count: training pairs, drawn anew for each seed, at least 1; None, or more than there
            are: all. Rivals that need more pairs become rows with the reason.
        seed_count: how many seeds, at least 1, from 0 on; each fits every rival again.
        command, machine: recorded in the results.
        registry: constructors of rivals by name; None: those of rivals/rows.py.

    Raises:
        ConfigurationError: a name is unknown.
        DivergedError: a loss is not finite.
        IndexError: there is no seed.
        ValueError: in a part of the test, no query has another item of its class.
        CannotWriteError, OSError: the temporary folder of a trained map cannot be written.
    """
    known = list_rivals() if registry is None else registry
    selected = list(known) if names is None else list(names)
    if unknown := [name for name in selected if name not in known]:
        raise ConfigurationError(
            f"--methods: with --vectors there is no method {join_few(unknown)}; expected some of "
            f"{', '.join(known)}"
        )
    own = _nearest(vectors.new, vectors.new)
    # Neither depends on a seed.
    runs_of: dict[str, list[PerRow]] = {
        STAY: [_measure(vectors.old, vectors.old, vectors, own)] * seed_count,
        REEMBED: [_measure(vectors.new, vectors.new, vectors, own)] * seed_count,
    }
    maps = {STAY: "none", REEMBED: "none"}
    curves_of = dict[str, list[dict[str, PerRow]]]()
    parameters, seconds, refused = dict[str, int](), dict[str, list[float]](), dict[str, str]()
    for seed in range(seed_count):
        drawn = vectors if pair_count is None else vectors.take_pairs(pair_count, seed)
        for name in selected:
            rival = known[name]()
            maps[name] = rival.mapped_vectors
            started = time.perf_counter()
            try:
                rival.fit(drawn.train, seed)
            except ConfigurationError as error:
                refused[name] = str(error)
                continue
            seconds.setdefault(name, []).append(time.perf_counter() - started)
            parameters[name] = rival.parameters
            if rival.mapped_vectors == "items":
                gallery, queries = rival.transform(vectors.old, vectors.side), vectors.new
            else:
                gallery, queries = vectors.old, rival.transform(vectors.new, None)
            runs_of.setdefault(name, []).append(_measure(queries, gallery, vectors, own))
            if curves := _backfill(rival, gallery, vectors):
                curves_of.setdefault(name, []).append(curves)
    parts = vectors.test_parts()
    our_row = next((name for name in OUR_MAPS if name in runs_of), None)
    rows = {}
    for name in (STAY, REEMBED, *selected):
        if name in refused:
            rows[name] = BenchRow(maps=maps[name], refusal=refused[name])
            continue
        runs, times = runs_of[name], seconds.get(name, [0.0])
        ours = None if our_row is None or our_row == name else runs_of[our_row]
        by_order = {
            order: [curves[order] for curves in curves_of[name]]
            for order in (ORDERS if name in curves_of else ())
        }
        rows[name] = BenchRow(
            maps=maps[name],
            figures={part: _means(runs, mask) for part, mask in parts.items()},
            differences={
                part: _differences(runs, runs_of[STAY], mask, vectors.labels)
                for part, mask in parts.items()
            },
            against_ours={
                part: _differences(runs, ours, mask, vectors.labels)
                for part, mask in parts.items()
                if ours is not None
            },
            backfill={
                part: {order: _means(curves, mask) for order, curves in by_order.items()}
                for part, mask in parts.items()
                if by_order
            },
            against_random={
                part: {
                    order: _differences(by_order[order], by_order[RANDOM], mask, vectors.labels)
                    for order in ORDERS
                    if order != RANDOM
                }
                for part, mask in parts.items()
                if by_order
            },
            seconds=sum(times) / len(times),
            parameters=parameters.get(name, 0),
        )
    labels = vectors.labels
    return BenchResults(
        command=command,
        machine=machine,
        pairs=len(vectors.train.old)
        if pair_count is None
        else min(pair_count, len(vectors.train.old)),
        seeds=seed_count,
        queries={part: int(mask.sum()) for part, mask in parts.items()},
        classes={
            part: 0 if labels is None else len(np.unique(labels[mask]))
            for part, mask in parts.items()
        },
        rows=rows,
    )


def _nearest(queries: Floats, gallery: Floats) -> NDArray[np.int64]:
    """Return the eleven nearest items [m, 11] of each query, its own item included."""
    return exact_neighbours(queries, gallery, min(_AGREEMENT + 1, len(gallery)))[0]


def _others(hits: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return the ten nearest of each query without its own item."""
    others = hits != np.arange(len(hits))[:, None]
    return [row[keep][:_AGREEMENT] for row, keep in zip(hits, others, strict=True)]


def _measure(
    queries: Floats, gallery: Floats, vectors: FrozenVectors, own: NDArray[np.int64]
) -> PerRow:
    """Return the figures of each test query [m] by name; `own` is `_nearest` of the new model."""
    hits = own if queries is vectors.new and gallery is vectors.new else _nearest(queries, gallery)
    shares = [
        len(np.intersect1d(one, other)) / len(other)
        for one, other in zip(_others(hits), _others(own), strict=True)
    ]
    figures: PerRow = {"agreement": np.array(shares)}
    if queries is not gallery:
        figures["known_item"] = (hits[:, 0] == np.arange(len(queries))).astype(np.float64)
    if vectors.labels is not None:
        places = np.arange(len(queries))
        relevance = relevance_by_label(vectors.labels, vectors.labels, places, places)
        ranking = rank(queries, gallery, relevance)
        figures = {"cmc1": cmc(ranking, 1), "map": average_precision(ranking)} | figures
    return figures


def _backfill(rival: Rival, gallery: Floats, vectors: FrozenVectors) -> dict[str, PerRow]:
    """Return each query's area under the curve of a backfill, by order and figure.

    It is empty without labels, or without variances.
    """
    if vectors.labels is None or not isinstance(rival, UncertainRival):
        return {}
    variances = rival.variances(vectors.old, vectors.side)
    if variances is None:
        return {}
    places = np.arange(len(gallery))
    items = (
        random_order(len(gallery), 0),
        uncertainty_order(variances),
        gain_order(gallery, variances),
    )
    orders = {name: ReembeddingOrder(one) for name, one in zip(ORDERS, items, strict=True)}
    relevance = relevance_by_label(vectors.labels, vectors.labels, places, places)
    curves = curves_by_order(vectors.new, gallery, vectors.new, orders, relevance)
    return {
        name: {"cmc1": curve.cmc1_areas, "map": curve.map_areas} for name, curve in curves.items()
    }


def _means(runs: Sequence[PerRow], mask: NDArray[np.bool_]) -> dict[str, float]:
    return {name: float(np.mean([np.nanmean(run[name][mask]) for run in runs])) for name in runs[0]}


def _differences(
    runs: Sequence[PerRow],
    base: Sequence[PerRow],
    mask: NDArray[np.bool_],
    labels: NDArray[np.int64] | None,
) -> dict[str, BenchDifference]:
    classes = None if labels is None else [labels[mask]] * len(runs)
    differences = {}
    for name in runs[0]:
        if name not in base[0]:
            continue
        difference = paired_bootstrap(
            [run[name][mask] for run in runs], [run[name][mask] for run in base], classes=classes
        )
        differences[name] = BenchDifference(
            mean=difference.mean,
            low=difference.low,
            high=difference.high,
            classes=None if difference.is_limited_to_classes else difference.class_count,
        )
    return differences


def bench_page(results: BenchResults) -> str:
    """Format results as a page of Markdown: up to three tables for each part of the test.

    The second one compares rows with our own, if that was run. The third one has the curves of a
    backfill, if a row predicts variances. Rows that were not run follow, with their reasons.

    Raises:
        KeyError: the results lack the row old/old, or a row lacks a part of the test.
    """
    lines = [
        "# Maps compared on frozen vectors", "",
        f"`{results.command}`", "",
        f"{results.pairs} training pairs, {describe_bench_seeds(results)}, {results.machine}. "
        "Figures in percent. In brackets: the difference to old/old and its 95 % interval, over "
        f"classes where there are at least {FEWEST_DECIDING_CLASSES}, else over queries.",
    ]  # fmt: skip
    for part, count in results.queries.items():
        classes = f" of {results.classes[part]} classes" if results.classes[part] else ""
        lines += ["", f"## {part.capitalize()}: {count} queries{classes}", ""]
        figures = [name for name in MEASURES if name in results.rows[STAY].figures[part]]
        figures += [] if "known_item" in figures else ["known_item"]
        titles = ["row", "maps", *(MEASURES[name] for name in figures), "fit", "parameters"]
        lines += [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
        for name, row in results.rows.items():
            if row.refusal:
                continue
            cells = [_cell(row, part, figure) for figure in figures]
            duration = f"{row.seconds:.1f} s" if row.parameters else "-"
            size = f"{row.parameters:,}" if row.parameters else "-"
            lines.append(f"| {' | '.join((name, row.maps, *cells, duration, size))} |")
        lines += _against_ours(results, part, figures)
        lines += backfill_table(results, part)
    missing = {name: row.refusal for name, row in results.rows.items() if row.refusal}
    if missing:
        lines += ["", "Not run:", ""]
        lines += [f"- {name}: {sentence}" for name, sentence in missing.items()]
    return "\n".join(lines) + "\n"


def describe_bench_seeds(results: BenchResults) -> str:
    """Return the number of seeds in words; one seed says that it stands for no others."""
    if results.seeds == 1:
        return "one seed, which proves nothing about others"
    return f"{results.seeds} seeds"


def _against_ours(results: BenchResults, part: str, figures: Sequence[str]) -> list[str]:
    rows = {name: row for name, row in results.rows.items() if part in row.against_ours}
    if not rows:
        return []
    lines = ["", f"Less {results.our_row}, in points:", ""]
    lines += [f"| {' | '.join(('row', *(MEASURES[name] for name in figures)))} |"]
    lines += ["|---" * (len(figures) + 1) + "|"]
    for name, row in rows.items():
        cells = [format_points(row.against_ours[part].get(figure)) for figure in figures]
        lines.append(f"| {' | '.join((name, *cells))} |")
    return lines


def backfill_table(results: BenchResults, part: str) -> list[str]:
    """Format the means over the curves of a backfill, and other orders less the random one.

    Returns:
        The lines, which begin with an empty one; none if no row predicts variances for this part.
    """
    rows = {name: row for name, row in results.rows.items() if part in row.backfill}
    if not rows:
        return []
    titles = ["row"]
    for order in ORDERS:
        less = "" if order == RANDOM else f", less {RANDOM}"
        titles += [f"{order} {MEASURES[figure]}{less}" for figure in ("cmc1", "map")]
    lines = ["", f"Means over the curve of a backfill, {part}:", "", f"| {' | '.join(titles)} |"]
    lines += ["|---" * len(titles) + "|"]
    for name, row in rows.items():
        cells = [f"{100 * row.backfill[part][RANDOM][figure]:.1f}" for figure in ("cmc1", "map")]
        for order in ORDERS[1:]:
            gains = row.against_random[part][order]
            cells += [format_points(gains[figure]) for figure in ("cmc1", "map")]
        lines.append(f"| {' | '.join((name, *cells))} |")
    return lines


def format_points(difference: BenchDifference | None) -> str:
    """Format a difference and its interval in percentage points, such as "+1.2 [+0.4, +2.0]".

    The text is "-" without a difference, or if it is 0 for every query.
    """
    if difference is None or difference.low == difference.high == 0:
        return "-"
    mean, low, high = (100 * one for one in (difference.mean, difference.low, difference.high))
    return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"


def _cell(row: BenchRow, part: str, figure: str) -> str:
    value = row.figures[part].get(figure)
    if value is None:
        return "-"
    difference = row.differences[part].get(figure)
    if difference is None or difference.low == difference.high == 0:
        return f"{100 * value:.1f}"
    low, high = 100 * difference.low, 100 * difference.high
    return f"{100 * value:.1f} ({100 * difference.mean:+.1f}, {low:+.1f} to {high:+.1f})"


def write_bench(out: Path, name: str, results: BenchResults) -> None:
    """Write OUT/NAME.json and OUT/NAME.md; make OUT if it is missing, and replace existing files.

    Raises:
        CannotWriteError: a file cannot be written; OUT/NAME.json may be new already.
        OSError: the folder cannot be made.
        KeyError: the results lack the row old/old. OUT/NAME.json is written already then.
    """
    out.mkdir(parents=True, exist_ok=True)
    write_file(out / f"{name}.json", (results.model_dump_json(indent=1) + "\n").encode(), 0o644)
    write_file(out / f"{name}.md", bench_page(results).encode(), 0o644)


def read_bench(path: Path) -> BenchResults:
    """Read the results that `write_bench` wrote.

    Raises:
        NotFoundError, InvalidInputError, OSError: as in `read_result_file`.
    """
    return read_result_file(path, BenchResults, "compare.py --vectors", "OUT/FILE.json")
