"""The cells of one row: figures by query, kept on disk with the digests of what made them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nobackfill.class_folders import Listing, decode
from nobackfill.durable import write_file
from nobackfill.metrics.backfill import (
    backfill_curve,
    oracle_order,
    random_order,
    uncertainty_order,
)
from nobackfill.metrics.cka import linear_cka
from nobackfill.metrics.distances import Metric, unit
from nobackfill.metrics.hubness import hubness
from nobackfill.metrics.neighbours import nearest
from nobackfill.metrics.ranking import Relevance, same_label
from nobackfill.metrics.retrieval import PerQuery, score
from nobackfill.training.comparison.rows import Row
from nobackfill.training.comparison.serve import Served, serve
from nobackfill.training.networks.frozen import features, of_run

Floats = NDArray[np.float32]
FIGURES = ("cmc1", "cmc5", "map")
HUB_NEIGHBOURS = 10


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
        return features(encoder, decode(self.listing, encoder.image_size), self.cache)


def evaluation(listing: Listing, metric: Metric, cache: Path) -> Evaluation:
    """Query set = gallery, without the query's own image (fct.txt section 4.2)."""
    images = np.arange(len(listing))
    relevance = same_label(listing.labels, listing.labels, images, images)
    return Evaluation(listing, relevance, metric, cache)


@dataclass(frozen=True)
class Cells:
    """Figures of one row in one place: by query, e.g. `by_query["new/old"]["map"]`, and others."""

    by_query: Mapping[str, Mapping[str, PerQuery]]
    extras: Mapping[str, float]


def measure(row: Row, test: Evaluation) -> Cells:
    """Every cell of a row. A cell whose two sides differ in dimension is left out."""
    old = test.features(row.old.folder, "embedder")
    new = test.features(row.new.folder, "embedder")
    side = None if row.side is None else test.features(row.side.folder, "side_encoder")
    served = serve(row, old, side)
    cells = {
        "old/old": score(old, old, test.relevance, test.metric),
        "new/new": score(new, new, test.relevance, test.metric),
    }
    if new.shape[1] >= old.shape[1]:
        # The first elements of a longer embedding, as BCT section 3.6 has it.
        meets_old = as_old(new, old, test.metric)
        cells["new/old"] = score(meets_old, old, test.relevance, test.metric)
    if served is None:
        cells["new/served"] = cells["new/old"]
        answers, gallery = meets_old, old
    else:
        cells["new/served"] = score(new, served.embedding, test.relevance, test.metric)
        cells["served/served"] = score(
            served.embedding, served.embedding, test.relevance, test.metric
        )
        answers, gallery = new, served.embedding
    extras = _curves(new, answers, gallery, served, test, cells)
    near, _ = nearest(answers, gallery, min(HUB_NEIGHBOURS + 1, len(gallery)), test.metric)
    extras["hubness"] = hubness(near, len(gallery)).skewness
    if side is not None:
        extras["cka"] = linear_cka(old, side)
    extras |= _logged(row.new.folder / "stats.jsonl")
    return Cells(cells, extras)


def as_old(new: Floats, old: Floats, metric: Metric) -> Floats:
    """The first elements of new vectors, renormalised where directions are compared."""
    first = new[:, : old.shape[1]]
    unit_space = np.allclose(np.linalg.norm(old, axis=1), 1, atol=1e-3)
    return unit(first).astype(np.float32) if metric == "cosine" or unit_space else first


def _curves(
    new: Floats,
    answers: Floats,
    gallery: Floats,
    served: Served | None,
    test: Evaluation,
    cells: dict[str, dict[str, PerQuery]],
) -> dict[str, float]:
    """Backfill curves in random order and, where there is something to order by, by it."""
    orders = {"random": random_order(len(gallery), 0)}
    extras = {}
    if served is not None:
        orders["oracle"] = oracle_order(gallery, new)
        if served.log_variance is not None:
            orders["uncertainty"] = uncertainty_order(served.log_variance)
            squared = ((gallery - new) ** 2).mean(axis=1)
            extras["variance_ratio"] = float(np.mean(squared / np.exp(served.log_variance)))
    for name, order in orders.items():
        curve = backfill_curve(
            new,
            gallery,
            new,
            order,
            test.relevance,
            metric=test.metric,
            served_queries=answers,
        )
        cells[f"backfill {name}"] = {"cmc1": curve.cmc1_areas, "map": curve.map_areas}
    return extras


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
    np.savez_compressed(temporary, allow_pickle=False, **arrays)
    temporary.replace(path)
    text = json.dumps({"key": key, "extras": dict(cells.extras)}, indent=1)
    write_file(path.with_suffix(".json"), text.encode(), 0o644)


def read_cells(path: Path, key: str | None = None) -> Cells | None:
    """The kept cells; None where there are none, or of another key."""
    if not path.is_file() or not path.with_suffix(".json").is_file():
        return None
    told = json.loads(path.with_suffix(".json").read_text("utf-8"))
    if key is not None and told["key"] != key:
        return None
    by_query: dict[str, dict[str, PerQuery]] = {}
    with np.load(path, allow_pickle=False) as arrays:
        for name in arrays.files:
            cell, _, figure = name.rpartition(":")
            by_query.setdefault(cell, {})[figure] = arrays[name]
    return Cells(by_query, told["extras"])
