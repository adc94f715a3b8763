"""Measure releases: the compatibility matrix, computed by one engine.

`cells` names the cells, `listing` the data, `embedded` holds the vectors, and `retrieval` searches
them. `criterion` computes what an upgrade keeps, `route_evidence` fits the facts about routes, and
`gate` decides whether a release may be published.

>>> from nobackfill.class_folders import list_images
>>> from nobackfill.quality import Published, evaluate_cells, every_cell
>>> from nobackfill.quality.listing import among_others
>>> from nobackfill.release.trust import read_publication
>>> manifests, pictures = read_publication(model_repo).manifests, list_images(class_folders)
>>> images = Published(pictures, model_repo, manifests)
>>> relevance = among_others(pictures)
>>> cells = evaluate_cells(every_cell(manifests), images, images, relevance, neighbours=0)
>>> [str(cell.name) for cell in cells]
['1/1', '2/2', '2/1>2', '2/1']
"""

from typing import TYPE_CHECKING

from nobackfill.faces import offer

if TYPE_CHECKING:
    from nobackfill.quality.cells import (
        CellName as CellName,
        every_cell as every_cell,
        parse_cell as parse_cell,
        served_cells as served_cells,
    )
    from nobackfill.quality.embedded import Embedded as Embedded, Published as Published
    from nobackfill.quality.gate import (
        Evidence as Evidence,
        measure_release as measure_release,
    )
    from nobackfill.quality.retrieval import (
        MatrixCell as MatrixCell,
        CellFigures as CellFigures,
        evaluate_cells as evaluate_cells,
        measure as measure,
        measure_cell as measure_cell,
    )
    from nobackfill.quality.route_evidence import backfill_curves as backfill_curves
else:
    __getattr__ = offer(
        __name__,
        {
            "cells": "CellName every_cell parse_cell served_cells",
            "embedded": "Embedded Published",
            "gate": "Evidence measure_release",
            "retrieval": "MatrixCell CellFigures evaluate_cells measure measure_cell",
            "route_evidence": "backfill_curves",
        },
    )
