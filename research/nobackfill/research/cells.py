"""The cells of one row: figures by query, stored with the digests of the models behind them.

Figures are also divided by class range (FCT appendix C): classes that the old model was trained on,
and new ones.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from nobackfill.class_folders import ImageListing, list_images
from nobackfill.durable import write_file
from nobackfill.metrics.backfill import IDENTITY_LINE, BackfillCurve, DistanceLine
from nobackfill.metrics.cka import linear_cka
from nobackfill.metrics.distances import Metric
from nobackfill.metrics.hubness import hubness
from nobackfill.metrics.neighbours import exact_neighbours
from nobackfill.metrics.ranking import Relevance
from nobackfill.metrics.retrieval import PerQuery
from nobackfill.quality.cells import CellName, native_cell, upgrade_cells
from nobackfill.quality.embedded import query_vectors
from nobackfill.quality.listing import relevance_among_others
from nobackfill.quality.retrieval import CellFigures, measure_cell, search_and_measure
from nobackfill.quality.route_evidence import PAIRS_A_QUERY, backfill_curves, fit_distance_line
from nobackfill.research.rows import MethodRow
from nobackfill.research.serve import NEW, OLD, TrainedImages
from nobackfill.training.config import load_config
from nobackfill.training.data.folders import hold_out
from nobackfill.training.data.pictures import ListedImages, ReadingOptions
from nobackfill.training.loop.run import CONFIG
from nobackfill.training.networks.frozen import cached_features, encoder_of_run

Floats = NDArray[np.float32]
HUB_NEIGHBOURS = 10
# The key of the classes in a file of cells; keys of figures are CELL:FIGURE.
CLASSES = "classes"


@dataclass(frozen=True)
class Evaluation:
    """Test images with their classes; every image is a query for all others.

    Attributes:
        listing: n images, at least two of a class.
        metric: how vectors are compared.
        feature_cache: the folder of cached features; it is made when features are stored.
    """

    listing: ImageListing
    metric: Metric
    feature_cache: Path

    @cached_property
    def relevance(self) -> Relevance:
        """The other images of each image's class (fct.txt section 4.2)."""
        return relevance_among_others(self.listing)

    def features(self, run_dir: Path, kind: str) -> Floats:
        """Return vectors float32 [n,dim] of the test images by a run's encoder.

        Features are read from the cache if it has them, and stored there otherwise. The order is
        that of the listing.

        Args:
            run_dir: the folder of a finished run.
            kind: the expected kind of run, embedder or side_encoder.

        Raises:
            ConfigurationError: the run is missing, unfinished or of another kind.
            VerificationError: its checkpoint is damaged.
            InvalidInputError: a test image is missing or cannot be decoded.
            CannotWriteError: the cache cannot be written.
            NotFoundError, UnavailableError: a backbone of local-dir or hf-hub is missing, or its
                description cannot be downloaded.
            OSError: the checkpoint exists, but cannot be opened.
            NobackfillError: a process that reads images was killed.
        """
        encoder = encoder_of_run(run_dir, kind)
        images = ListedImages(self.listing, encoder.image_size, ReadingOptions())
        return cached_features(encoder, images, self.feature_cache)


@dataclass(frozen=True)
class Cells:
    """The figures of one row in one place.

    Attributes:
        figures_by_query: figures [q] by cell and name, e.g. `figures_by_query["new/old"]["map"]`.
        row_figures: figures of the whole row.
        query_classes: the name of each query's class [q].
    """

    figures_by_query: Mapping[str, Mapping[str, PerQuery]]
    row_figures: Mapping[str, float]
    query_classes: NDArray[np.str_]


def row_cells(row: MethodRow, test: Evaluation) -> Cells:
    """Measure every cell of a row whose models are trained.

    A cell that compares vectors of different dimensions is omitted. Rows with upgrades also get
    `served/served` and curves of a backfill; see docs/methods.md for the figures. Features are
    stored in the cache of `test`. The cells themselves are only returned.

    Args:
        row: the row; its trainings are finished.
        test: the test images.

    Raises:
        ConfigurationError: a run is missing, unfinished or of another kind, or its training images
            cannot be read.
        VerificationError: a checkpoint is damaged, or an exported file computes other vectors.
        InvalidInputError: a test image, or a held-out training image, cannot be decoded.
        ValueError: no test image shares its class with another one, or the log of the new model's
            training is damaged.
        OSError: the log of the new model's training is missing, or a checkpoint cannot be opened.
            PermissionError: this user may not list the folder of held-out training images.
        CannotWriteError: the cache cannot be written.
        NotFoundError, UnavailableError: a backbone of local-dir or hf-hub is missing, or its
            description cannot be downloaded.
        NobackfillError: a process that reads images was killed.
    """
    images = embed_row_images(row, test)
    old, new = images.native_vectors(OLD), images.native_vectors(NEW)
    names = upgrade_cells(OLD, NEW, (OLD, NEW) if row.upgrade_runs else ())
    # First elements of a longer embedding (BCT section 3.6); a shorter one has no such cell.
    measured = {
        cell: per_query_figures(
            measure_cell(cell, images, images, test.relevance, int8=row.uses_int8)
        )
        for cell in names.values()
        if not cell.searches_unmigrated or new.shape[1] >= old.shape[1]
    }
    cells = {name: measured[cell] for name, cell in names.items() if cell in measured}
    served = images.vectors_along(names["new/served"].gallery_releases, int8=row.uses_int8)
    if row.upgrade_runs:
        figures = search_and_measure(
            served.embedding, served.embedding, test.relevance, test.metric
        )
        cells["served/served"] = per_query_figures(figures)
    for name, curve in _curves(row, names["new/served"], images, test).items():
        cells[f"backfill {name}"] = {"cmc1": curve.cmc1_areas, "map": curve.map_areas}
    queries = query_vectors(names["new/served"], images, served.embedding)
    extras = {"hubness": _hubness(queries, served.embedding, test)}
    if served.uncertainty is not None:
        squared = ((served.embedding - new) ** 2).mean(axis=1)
        extras["variance_ratio"] = float(np.mean(squared / served.uncertainty))
    if row.side_run is not None:
        extras["cka"] = linear_cka(old, test.features(row.side_run.folder, "side_encoder"))
    classes = np.array(test.listing.class_names)[test.listing.labels]
    return Cells(cells, extras | _logged(row.new_run.folder / "stats.jsonl"), classes)


def embed_row_images(row: MethodRow, images: Evaluation) -> TrainedImages:
    """Embed images with the models of a row, which are trained; the relevance is not read.

    Raises:
        ConfigurationError: a run is missing, unfinished or of another kind.
        VerificationError: a checkpoint is damaged.
        InvalidInputError: an image is missing or cannot be decoded.
        CannotWriteError: the cache cannot be written.
        NotFoundError, UnavailableError: a backbone of local-dir or hf-hub is missing, or its
            description cannot be downloaded.
        OSError: a checkpoint exists, but cannot be opened.
        NobackfillError: a process that reads images was killed.
    """
    vectors = {
        number: images.features(run.folder, "embedder")
        for number, run in ((OLD, row.old_run), (NEW, row.new_run))
    }
    side = None if row.side_run is None else images.features(row.side_run.folder, "side_encoder")
    return TrainedImages(row, images.listing, images.metric, vectors, side)


def _curves(
    row: MethodRow, served: CellName, images: TrainedImages, test: Evaluation
) -> dict[str, BackfillCurve]:
    """Return the curves of a gallery that is gradually re-embedded.

    Curves use plain distances, and for a migrated gallery also calibrated scores by origin (`…,
    calibrated`)."""

    def curves(
        orders: Sequence[str], line: DistanceLine = IDENTITY_LINE
    ) -> dict[str, BackfillCurve]:
        return backfill_curves(
            served, images, images, test.relevance, orders, int8=row.uses_int8, line=line
        )

    if not row.upgrade_runs:
        return curves(("random",))
    calibrated = curves(("random", "uncertainty", "gain"), _line(row, served, test))
    return curves(("random", "oracle", "uncertainty", "gain")) | {
        f"{order}, calibrated": curve for order, curve in calibrated.items()
    }


def _line(row: MethodRow, served: CellName, test: Evaluation) -> DistanceLine:
    """Fit what migrated distances are worth, on images that no model of the row was trained on."""
    config = load_config(row.upgrade_runs[-1].folder / CONFIG)
    held_out = _held_out(
        config.images, config.classes, config.class_list, config.held_out, config.split_seed,
        test.metric, test.feature_cache,
    )  # fmt: skip
    if held_out is None:
        return IDENTITY_LINE
    images = embed_row_images(row, held_out)
    migrated, native = (
        measure_cell(
            cell,
            images,
            images,
            held_out.relevance,
            neighbour_count=PAIRS_A_QUERY,
            int8=row.uses_int8,
        )
        for cell in (served, native_cell(NEW))
    )
    return fit_distance_line(migrated, native, held_out.relevance)


@lru_cache(maxsize=2)
def _held_out(
    root: Path,
    classes: int | None,
    class_list: Path | None,
    share: float,
    seed: int,
    metric: Metric,
    cache: Path,
) -> Evaluation | None:
    """Return the images that trainings held out; None if there are none."""
    listing = list_images(root, classes, class_list)
    _, rows = hold_out(listing, share, seed)
    return Evaluation(listing.select(rows), metric, cache) if len(rows) else None


def per_query_figures(figures: CellFigures) -> dict[str, PerQuery]:
    """Return the figures of a cell that a row stores, [q] each: cmc1, cmc5 and map."""
    return {"cmc1": figures.cmc1, "cmc5": figures.cmc5, "map": figures.map}


def _hubness(queries: Floats, gallery: Floats, test: Evaluation) -> float:
    near, _ = exact_neighbours(queries, gallery, min(HUB_NEIGHBOURS + 1, len(gallery)), test.metric)
    return hubness(near, len(gallery))


def _logged(stats: Path) -> dict[str, float]:
    """Return the mean of the statistics that DMU logs about its weights."""
    lines = [json.loads(line) for line in stats.read_text("utf-8").splitlines()]
    spreads = [line["weight_spread"] for line in lines if "weight_spread" in line]
    return {"weight_spread": float(np.mean(spreads))} if spreads else {}


def write_cells(path: Path, cells: Cells, key: str) -> None:
    """Store cells as PATH and PATH with the suffix .json; replace those that are there.

    A kill between the two files leaves cells that `read_cells` takes for missing or of another key.

    Args:
        path: the .npz file; its folder is made.
        cells: the cells.
        key: identifies the models and images that they were measured on.

    Raises:
        CannotWriteError: the .json file cannot be written; the .npz file is the new one then.
        OSError: the .npz file or its folder cannot be written; PATH with the suffix .part.npz may
            stay.
    """
    arrays = {
        f"{cell}:{name}": v
        for cell, part in cells.figures_by_query.items()
        for name, v in part.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part.npz")
    np.savez_compressed(temporary, allow_pickle=False, **{CLASSES: cells.query_classes}, **arrays)
    temporary.replace(path)
    text = json.dumps({"key": key, "extras": dict(cells.row_figures)}, indent=1)
    write_file(path.with_suffix(".json"), text.encode(), 0o644)


def read_cells(path: Path, key: str | None = None) -> Cells | None:
    """Read cells that `write_cells` stored.

    Args:
        path: the .npz file.
        key: the expected key; None: accept any.

    Returns:
        None if they are missing, unreadable, damaged, of another key, or of an older version
        without classes. No error is raised for these.

    Raises:
        TypeError: the .json file has valid JSON that is no object.
    """
    try:
        return _read_cells(path, key)
    except (OSError, EOFError, ValueError, KeyError, BadZipFile, zlib.error):
        return None


def _read_cells(path: Path, key: str | None) -> Cells | None:
    notes = json.loads(path.with_suffix(".json").read_text("utf-8"))
    if key is not None and notes["key"] != key:
        return None
    by_query: dict[str, dict[str, PerQuery]] = {}
    # Opened here, because numpy does not close a file that is no archive.
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        classes = arrays[CLASSES]
        for name in arrays.files:
            cell, _, figure = name.rpartition(":")
            if cell:
                by_query.setdefault(cell, {})[figure] = arrays[name]
    return Cells(by_query, notes["extras"], classes)


KNOWN_CLASSES, NEW_CLASSES = "known classes", "new classes"
RANGED = ("new/new", "new/served")


def is_class_known_to_old(row: MethodRow, tested: ImageListing) -> NDArray[np.bool_]:
    """Return whether the row's old model was trained on the class of each tested image, bool [n].

    Classes are compared by name. Only the keys `images` and `classes` of the old model's
    configuration count, not `class_list`.

    Args:
        row: the row; its old model need not be trained.
        tested: n images.

    Raises:
        ConfigurationError: the folder of the old model's training images cannot be read.
        InvalidInputError: this folder has too few classes, or an empty one.
        PermissionError: this user may not list that folder.
    """
    images, classes = row.old_run.config_values["images"], row.old_run.config_values["classes"]
    names = set(list_images(images, classes).class_names)
    return np.array([name in names for name in tested.class_names])[tested.labels]


def add_class_ranges(cells: Cells, is_known: NDArray[np.bool_]) -> Cells:
    """Add the cells by class range, such as `new/new, known classes`.

    A range's figures are NaN for queries of the other range, which excludes them from means but
    keeps figures paired.

    Args:
        cells: the cells of q queries.
        is_known: whether the old model was trained on a query's class, bool [q].

    Returns:
        `cells` itself if all queries are of one range. Otherwise a copy that has the further cells
        of RANGED.

    Raises:
        KeyError: a cell of RANGED is missing.
    """
    if is_known.all() or not is_known.any():
        return cells
    ranged = {
        f"{cell}, {name}": {
            figure: np.where(inside, values, np.nan)
            for figure, values in cells.figures_by_query[cell].items()
        }
        for cell in RANGED
        for name, inside in ((KNOWN_CLASSES, is_known), (NEW_CLASSES, ~is_known))
    }
    return replace(cells, figures_by_query={**cells.figures_by_query, **ranged})
