"""How good it is: the compatibility matrix of releases, measured by one engine.

    from nobackfill.quality import Published, evaluate_cells, every_cell

    images = Published(list_images(folder), model_repo, manifests)
    cells = evaluate_cells(every_cell(manifests), images, images, relevance, neighbours=0)

`cells` names what is measured, `embedded` has the vectors, `retrieval` searches them; `matrix`,
`criterion` and `backfill` say what an upgrade keeps, `calibrate` fits distances to probabilities,
and `gate` lets a release out. Names below are loaded when they are asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nobackfill.quality.backfill import backfill_curves
    from nobackfill.quality.cells import CellName, every_cell, parse_cell, served_cells
    from nobackfill.quality.embedded import Embedded, Published
    from nobackfill.quality.gate import Evidence, measure_release
    from nobackfill.quality.matrix import MatrixCell, evaluate_cells
    from nobackfill.quality.retrieval import Measured, measure, measure_cell

_PLACES = {
    "backfill": ("backfill_curves",),
    "cells": ("CellName", "every_cell", "parse_cell", "served_cells"),
    "embedded": ("Embedded", "Published"),
    "gate": ("Evidence", "measure_release"),
    "matrix": ("MatrixCell", "evaluate_cells"),
    "retrieval": ("Measured", "measure", "measure_cell"),
}

__all__ = [
    "CellName",
    "Embedded",
    "Evidence",
    "MatrixCell",
    "Measured",
    "Published",
    "backfill_curves",
    "evaluate_cells",
    "every_cell",
    "measure",
    "measure_cell",
    "measure_release",
    "parse_cell",
    "served_cells",
]


def __getattr__(name: str) -> Any:
    for place, names in _PLACES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{place}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
