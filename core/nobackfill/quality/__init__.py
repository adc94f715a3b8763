"""Measure releases: the compatibility matrix, computed by one engine.

`cells` names the cells, `listing` the data, `embedded` holds the vectors, and `retrieval` searches
them. `criterion` computes what an upgrade keeps, `route_evidence` fits the facts about routes, and
`gate` decides whether a release may be published.

>>> from nobackfill.class_folders import list_images
>>> from nobackfill.quality import PublishedListing, evaluate_cells, list_cells
>>> from nobackfill.quality.listing import relevance_among_others
>>> from nobackfill.release.trust import read_publication
>>> manifests, pictures = read_publication(model_repo).manifests, list_images(class_folders)
>>> images = PublishedListing(pictures, model_repo, manifests)
>>> relevance = relevance_among_others(pictures)
>>> cells = evaluate_cells(list_cells(manifests), images, images, relevance, neighbour_count=0)
>>> [str(cell.name) for cell in cells]
['1/1', '2/2', '2/1>2', '2/1']
"""

from typing import TYPE_CHECKING

from nobackfill.faces import export_lazily

if TYPE_CHECKING:
    from nobackfill.quality.cells import (
        CellName as CellName,
        list_cells as list_cells,
        parse_cell as parse_cell,
        served_cells as served_cells,
    )
    from nobackfill.quality.embedded import (
        EmbeddedListing as EmbeddedListing,
        PublishedListing as PublishedListing,
    )
    from nobackfill.quality.gate import (
        ReleaseEvidence as ReleaseEvidence,
        measure_release as measure_release,
    )
    from nobackfill.quality.retrieval import (
        MatrixCell as MatrixCell,
        CellFigures as CellFigures,
        evaluate_cells as evaluate_cells,
        search_and_measure as search_and_measure,
        measure_cell as measure_cell,
    )
    from nobackfill.quality.route_evidence import backfill_curves as backfill_curves
else:
    __getattr__ = export_lazily(__name__)
