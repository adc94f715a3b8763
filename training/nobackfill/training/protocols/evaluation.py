"""All protocols by name, and the measurement of cells of the compatibility matrix."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from nobackfill.errors import ConfigurationError
from nobackfill.quality.cells import CellName
from nobackfill.quality.embedded import PublishedListing, cell_vectors
from nobackfill.release.manifest import Manifest
from nobackfill.training.protocols import landmarks, persons
from nobackfill.training.protocols.persons import OperatingPoints
from nobackfill.training.protocols.protocol import Figures, Protocol

# Each reads its files below a first folder, and may write images to a second, temporary one.
PROTOCOLS: Mapping[str, Callable[[Path, Path], Protocol]] = {
    "ijbc": persons.ijbc,
    "gldv2": landmarks.gldv2,
    "roxford5k": landmarks.oxford,
    "rparis6k": landmarks.paris,
    "market1501": persons.market1501,
    "vggface2": persons.vggface2,
}


def protocol_named(
    name: str, points: persons.OperatingPoints | None = None
) -> Callable[[Path, Path], Protocol]:
    """Return the reader of a protocol, a function of its folder and of a temporary folder.

    No file is opened here. The reader raises the errors of the protocol's function, such as `ijbc`.

    Args:
        name: a key of PROTOCOLS.
        points: operating points for ijbc; None: the protocol's own.

    Raises:
        ConfigurationError: the name is unknown, or the protocol has no operating points.
    """
    if name not in PROTOCOLS:
        raise ConfigurationError(
            f"--protocol: unknown protocol {name!r}; known: {', '.join(PROTOCOLS)}"
        )
    if points is None:
        return PROTOCOLS[name]
    if name != "ijbc":
        raise ConfigurationError(
            f"--far and --fpir need ijbc, because protocol {name} has no operating points; leave "
            "them out"
        )
    return partial(persons.ijbc, points=points)


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
    """Embed the images of a protocol by published releases, and measure its figures for each cell.

    Images are embedded once for each release, and cells are measured in their order. Query images
    that are cut out are written to a temporary folder, which is removed.

    Args:
        name: the protocol.
        root: the folder of its files and images.
        model_repo: the publication folder.
        manifests: the releases by number.
        cells: the cells to measure; none give an empty result.
        int8: use quantised upgrades where they exist.
        points: operating points for ijbc; None: the protocol's own.

    Returns:
        Figures by cell; shares 0..1.

    Raises:
        ConfigurationError: the name is unknown, the protocol has no operating points, or the folder
            of vggface2 cannot be read.
        NotFoundError: a file or image is missing, or a cell names an unpublished release.
        InvalidInputError: a file has another form, or vectors of a cell cannot be compared.
        VerificationError: a file of a release is damaged, or a model returns unusable vectors.
        NoEncoderError: a release of a cell embeds no images.
        ValueError: a figure has no query with an answer, a rate is out of range, or the first
            elements of a longer query are all zero.
        IndexError: an image id of gldv2 has fewer than three characters.
        OSError: a file of the protocol exists, but cannot be read.
    """
    read = protocol_named(name, points)
    with tempfile.TemporaryDirectory(prefix="nobackfill-protocol-") as folder:
        protocol = read(root, Path(folder))
        queries = gallery = PublishedListing(protocol.queries, model_repo, manifests)
        if protocol.gallery is not protocol.queries:
            gallery = PublishedListing(protocol.gallery, model_repo, manifests)
        return {
            str(cell): protocol.figures(
                *cell_vectors(cell, queries, gallery, int8=int8), queries.metric_of(cell)
            )
            for cell in cells
        }
