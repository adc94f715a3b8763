"""Cells of the compatibility matrix by a protocol, from published releases."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from nobackfill.quality.cells import CellName
from nobackfill.quality.embedded import Published, cell_vectors
from nobackfill.release.manifest import Manifest
from nobackfill.training.protocols.catalogue import protocol_named
from nobackfill.training.protocols.ijbc import OperatingPoints
from nobackfill.training.protocols.protocol import Figures


def evaluate_protocol(
    name: str,
    root: Path,
    model_repo: Path,
    manifests: Mapping[int, Manifest],
    cells: Sequence[CellName],
    *,
    int8: bool = False,
    points: OperatingPoints | None = None,
) -> dict[str, Figures]:
    """The protocol's figures of each cell, its files and images below `root`.

    Raises ConfigurationError (an unknown name, points of a protocol without), NotFoundError,
    InvalidInputError.
    """
    read = protocol_named(name, points)
    with tempfile.TemporaryDirectory(prefix="nobackfill-protocol-") as folder:
        protocol = read(root, Path(folder))
        queries = gallery = Published(protocol.queries, model_repo, manifests)
        if protocol.gallery is not protocol.queries:
            gallery = Published(protocol.gallery, model_repo, manifests)
        return {
            str(cell): protocol.figures(
                *cell_vectors(cell, queries, gallery, int8=int8), queries.metric(cell.query)
            )
            for cell in cells
        }
