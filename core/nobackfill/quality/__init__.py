"""How good it is: the compatibility matrix of releases, measured by one engine.

`cells` names what is measured, `embedded` has the vectors, `retrieval` searches them; `matrix`,
`criterion` and `backfill` say what an upgrade keeps, `calibrate` fits distances to probabilities,
and `gate` lets a release out.

>>> from nobackfill.class_folders import list_images
>>> from nobackfill.quality import Published, evaluate_cells, every_cell
>>> from nobackfill.quality.relevance import among_others
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
    from nobackfill.quality.backfill import backfill_curves as backfill_curves
    from nobackfill.quality.cells import (
        CellName as CellName,
        every_cell as every_cell,
        parse_cell as parse_cell,
        served_cells as served_cells,
    )
    from nobackfill.quality.embedded import Embedded as Embedded, Published as Published
    from nobackfill.quality.gate import Evidence as Evidence, measure_release as measure_release
    from nobackfill.quality.matrix import (
        MatrixCell as MatrixCell,
        evaluate_cells as evaluate_cells,
    )
    from nobackfill.quality.retrieval import (
        Measured as Measured,
        measure as measure,
        measure_cell as measure_cell,
    )
else:
    __getattr__ = offer(
        __name__,
        {
            "backfill": "backfill_curves",
            "cells": "CellName every_cell parse_cell served_cells",
            "embedded": "Embedded Published",
            "gate": "Evidence measure_release",
            "matrix": "MatrixCell evaluate_cells",
            "retrieval": "Measured measure measure_cell",
        },
    )
