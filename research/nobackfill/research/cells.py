"""The cells of one row: figures by query, kept on disk with the digests of what made them.

Figures by class range (FCT appendix C): classes that the old model trained on, and new ones.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from nobackfill.class_folders import Listing, list_images
from nobackfill.durable import write_file
from nobackfill.metrics.backfill import AS_THEY_ARE, BackfillCurve, Line
from nobackfill.metrics.cka import linear_cka
from nobackfill.metrics.distances import Metric
from nobackfill.metrics.hubness import hubness
from nobackfill.metrics.neighbours import nearest
from nobackfill.metrics.ranking import Relevance
from nobackfill.metrics.retrieval import PerQuery
from nobackfill.quality.cells import CellName, alone, upgrade_cells
from nobackfill.quality.embedded import asking
from nobackfill.quality.listing import among_others
from nobackfill.quality.retrieval import Measured, measure, measure_cell
from nobackfill.quality.route_evidence import PAIRS_A_QUERY, backfill_curves, same_scale
from nobackfill.research.rows import MethodRow
from nobackfill.research.serve import NEW, OLD, Trained
from nobackfill.training.config import load_config
from nobackfill.training.data.folders import hold_out
from nobackfill.training.data.pictures import Listed, Reading
from nobackfill.training.loop.run import CONFIG
from nobackfill.training.networks.frozen import features, of_run

Floats = NDArray[np.float32]
HUB_NEIGHBOURS = 10
# The array of the classes in a file of cells; figures are CELL:FIGURE there.
CLASSES = "classes"


@dataclass(frozen=True)
class Evaluation:
    """Test images with their classes; every image is a query against all others."""

    listing: Listing
    relevance: Relevance
    metric: Metric
    cache: Path

    def features(self, run_dir: Path, kind: str) -> Floats:
        """Vectors [n,dim] of the test images by a run's encoder."""
        encoder = of_run(run_dir, kind)
        images = Listed(self.listing, encoder.image_size, Reading())
        return features(encoder, images, self.cache)


def evaluation(listing: Listing, metric: Metric, cache: Path) -> Evaluation:
    """Query set = gallery, without the query's own image (fct.txt section 4.2)."""
    return Evaluation(listing, among_others(listing), metric, cache)


@dataclass(frozen=True)
class Cells:
    """Figures of one row in one place: by query, e.g. `by_query["new/old"]["map"]`, and others.
    `classes`: the name of each query's class [q].
    """

    by_query: Mapping[str, Mapping[str, PerQuery]]
    extras: Mapping[str, float]
    classes: NDArray[np.str_]


def row_cells(row: MethodRow, test: Evaluation) -> Cells:
    """Every cell of a row. A cell whose two sides differ in dimension is left out."""
    images = _embedded(row, test)
    old, new = images.native(OLD), images.native(NEW)
    names = upgrade_cells(OLD, NEW, (OLD, NEW) if row.route else ())
    # The first elements of a longer embedding, as BCT section 3.6 has it; none of a shorter one.
    measured = {
        cell: by_query(measure_cell(cell, images, images, test.relevance, int8=row.int8))
        for cell in names.values()
        if not cell.raw or new.shape[1] >= old.shape[1]
    }
    cells = {name: measured[cell] for name, cell in names.items() if cell in measured}
    served = images.along(names["new/served"].gallery, int8=row.int8)
    if row.route:
        carried = measure(served.embedding, served.embedding, test.relevance, test.metric)
        cells["served/served"] = by_query(carried)
    for name, curve in _curves(row, names["new/served"], images, test).items():
        cells[f"backfill {name}"] = {"cmc1": curve.cmc1_areas, "map": curve.map_areas}
    meets_served = asking(names["new/served"], images, served.embedding)
    extras = {"hubness": _hubness(meets_served, served.embedding, test)}
    if served.uncertainty is not None:
        squared = ((served.embedding - new) ** 2).mean(axis=1)
        extras["variance_ratio"] = float(np.mean(squared / served.uncertainty))
    if row.side is not None:
        extras["cka"] = linear_cka(old, test.features(row.side.folder, "side_encoder"))
    classes = np.array(test.listing.class_names)[test.listing.labels]
    return Cells(cells, extras | _logged(row.new.folder / "stats.jsonl"), classes)


def _embedded(row: MethodRow, images: Evaluation) -> Trained:
    """The images in the spaces of the row's models."""
    vectors = {
        number: images.features(run.folder, "embedder")
        for number, run in ((OLD, row.old), (NEW, row.new))
    }
    side = None if row.side is None else images.features(row.side.folder, "side_encoder")
    return Trained(row, images.listing, images.metric, vectors, side)


def _curves(
    row: MethodRow, served: CellName, images: Trained, test: Evaluation
) -> dict[str, BackfillCurve]:
    """A gallery's curves while it is embedded again: by distances as they are and, of one that was
    carried, by scores of each origin (`…, calibrated`)."""

    def curves(orders: Sequence[str], line: Line = AS_THEY_ARE) -> dict[str, BackfillCurve]:
        return backfill_curves(
            served, images, images, test.relevance, orders, int8=row.int8, line=line
        )

    if not row.route:
        return curves(("random",))
    calibrated = curves(("random", "uncertainty", "gain"), _line(row, served, test))
    return curves(("random", "oracle", "uncertainty", "gain")) | {
        f"{order}, calibrated": curve for order, curve in calibrated.items()
    }


def _line(row: MethodRow, served: CellName, test: Evaluation) -> Line:
    """What carried distances are worth, by the images that neither the row's models nor its
    upgrade trained on."""
    config = load_config(row.route[-1].folder / CONFIG)
    held_out = _held_out(
        config.images, config.classes, config.class_list, config.held_out, config.split_seed,
        test.metric, test.cache,
    )  # fmt: skip
    if held_out is None:
        return AS_THEY_ARE
    images = _embedded(row, held_out)
    carried, embedded = (
        measure_cell(
            cell, images, images, held_out.relevance, neighbours=PAIRS_A_QUERY, int8=row.int8
        )
        for cell in (served, alone(NEW))
    )
    return same_scale(carried, embedded, held_out.relevance)


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
    """Those that trainings left out; None where they leave none."""
    whole = list_images(root, classes, class_list)
    _, rows = hold_out(whole, share, seed)
    return evaluation(whole.select(rows), metric, cache) if len(rows) else None


def by_query(measured: Measured) -> dict[str, PerQuery]:
    """The figures that a row keeps of a cell."""
    return {"cmc1": measured.cmc1, "cmc5": measured.cmc5, "map": measured.map}


def _hubness(queries: Floats, gallery: Floats, test: Evaluation) -> float:
    near, _ = nearest(queries, gallery, min(HUB_NEIGHBOURS + 1, len(gallery)), test.metric)
    return hubness(near, len(gallery)).skewness


def _logged(stats: Path) -> dict[str, float]:
    """The mean of what DMU logs about its weights."""
    lines = [json.loads(line) for line in stats.read_text("utf-8").splitlines()]
    spreads = [line["weight_spread"] for line in lines if "weight_spread" in line]
    return {"weight_spread": float(np.mean(spreads))} if spreads else {}


def write_cells(path: Path, cells: Cells, key: str) -> None:
    """Keep the cells, with a key that says what they were measured on."""
    arrays = {
        f"{cell}:{name}": v for cell, part in cells.by_query.items() for name, v in part.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part.npz")
    np.savez_compressed(temporary, allow_pickle=False, **{CLASSES: cells.classes}, **arrays)
    temporary.replace(path)
    text = json.dumps({"key": key, "extras": dict(cells.extras)}, indent=1)
    write_file(path.with_suffix(".json"), text.encode(), 0o644)


def read_cells(path: Path, key: str | None = None) -> Cells | None:
    """The kept cells; None where there are none, damaged ones, those of another key, or those of
    an older version, which kept no classes."""
    try:
        return _read_cells(path, key)
    except (OSError, EOFError, ValueError, KeyError, BadZipFile, zlib.error):
        return None


def _read_cells(path: Path, key: str | None) -> Cells | None:
    told = json.loads(path.with_suffix(".json").read_text("utf-8"))
    if key is not None and told["key"] != key:
        return None
    by_query: dict[str, dict[str, PerQuery]] = {}
    # Opened here: numpy leaves a file open that is no archive.
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        classes = arrays[CLASSES]
        for name in arrays.files:
            cell, _, figure = name.rpartition(":")
            if cell:
                by_query.setdefault(cell, {})[figure] = arrays[name]
    return Cells(by_query, told["extras"], classes)


KNOWN_CLASSES, NEW_CLASSES = "known classes", "new classes"
RANGED = ("new/new", "new/served")


def known_to_old(row: MethodRow, tested: Listing) -> NDArray[np.bool_]:
    """Of each tested image [n], whether the row's old model trained on its class."""
    images, classes = row.old.values["images"], row.old.values["classes"]
    assert isinstance(images, Path) and (classes is None or isinstance(classes, int))
    names = set(list_images(images, classes).class_names)
    return np.array([name in names for name in tested.class_names])[tested.labels]


def by_range(cells: Cells, known: NDArray[np.bool_]) -> Cells:
    """The cells and, where both ranges are tested, `new/new, known classes` and so on.

    A range's figures are NaN for queries of the other range, which leaves them out of means and
    keeps them paired.
    """
    if known.all() or not known.any():
        return cells
    ranged = {
        f"{cell}, {name}": {
            figure: np.where(inside, values, np.nan)
            for figure, values in cells.by_query[cell].items()
        }
        for cell in RANGED
        for name, inside in ((KNOWN_CLASSES, known), (NEW_CLASSES, ~known))
    }
    return replace(cells, by_query={**cells.by_query, **ranged})
