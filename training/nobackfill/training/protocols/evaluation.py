"""All protocols by name, and the measurement of cells of the compatibility matrix."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nobackfill.errors import ConfigurationError
from nobackfill.metrics.backfill import (
    ReembeddingOrder,
    class_order,
    class_shares,
    random_order,
    uncertainty_order,
)
from nobackfill.metrics.compatibility import (
    degradation,
    is_compatible,
    update_gain,
    upgrade_gain,
)
from nobackfill.quality.cells import CellName, native_cell
from nobackfill.quality.criterion import INDEPENDENT, Judgement
from nobackfill.quality.embedded import PublishedListing, cell_vectors
from nobackfill.release.manifest import Manifest
from nobackfill.training.protocols import landmarks, persons
from nobackfill.training.protocols.persons import OperatingPoints
from nobackfill.training.protocols.protocol import Figures, Protocol

# Each reads its files below a first folder, and may write images to a second, temporary one.
PROTOCOLS: Mapping[str, Callable[[Path, Path], Protocol]] = {
    "ijbc": persons.read_ijbc_protocol,
    "gldv2": landmarks.read_gldv2_protocol,
    "roxford5k": landmarks.read_oxford_protocol,
    "rparis6k": landmarks.read_paris_protocol,
    "market1501": persons.read_market1501_protocol,
    "vggface2": persons.read_vggface2_protocol,
}


def protocol_named(
    name: str, points: persons.OperatingPoints | None = None
) -> Callable[[Path, Path], Protocol]:
    """Return the reader of a protocol, a function of its folder and of a temporary folder.

    No file is opened here. The reader raises the errors of the protocol's function, such as
    `read_ijbc_protocol`.

    Args:
        name: a key of PROTOCOLS.
        points: operating points for ijbc; None: the protocol's own.

    Raises:
        ConfigurationError: the name is unknown, or the protocol has no operating points.
    """
    if name not in PROTOCOLS:
        raise ConfigurationError(
            f"--protocol: unknown protocol {name!r}; expected one of {', '.join(PROTOCOLS)}"
        )
    if points is None:
        return PROTOCOLS[name]
    if name != "ijbc":
        raise ConfigurationError(
            f"--far and --fpir need --protocol ijbc, because protocol {name} has no operating "
            "points; leave both out"
        )
    return partial(persons.read_ijbc_protocol, points=points)


@dataclass(frozen=True)
class ProtocolCurve:
    """The figures of a protocol while a growing share of the gallery is re-embedded.

    Attributes:
        reembedded_shares: of re-embedded images, [s], ascending from 0 to 1.
        figures: each figure at these shares, [s].
    """

    reembedded_shares: NDArray[np.float64]
    figures: Mapping[str, NDArray[np.float64]]

    def mean_of(self, figure: str) -> float:
        """Return the area under the curve of a figure: its mean over shares (trapezium rule).

        Raises:
            KeyError: there is no such figure.
        """
        return float(np.trapezoid(self.figures[figure], self.reembedded_shares))


@dataclass(frozen=True)
class ProtocolReport:
    """The measurements of `evaluate_protocol`.

    Attributes:
        cells: figures by cell, shares 0..1.
        criteria: by cell of an older gallery and by figure, as of `figure_criteria`.
        backfill_curves: curves by cell of an older gallery and by order.
    """

    cells: Mapping[str, Figures]
    criteria: Mapping[str, Mapping[str, Judgement]]
    backfill_curves: Mapping[str, Mapping[str, ProtocolCurve]]


def evaluate_protocol(
    name: str,
    root: Path,
    model_repo: Path,
    manifests: Mapping[int, Manifest],
    cells: Sequence[CellName],
    *,
    int8: bool = False,
    points: OperatingPoints | None = None,
    independent_release: int | None = None,
    with_backfill_curves: bool = False,
) -> ProtocolReport:
    """Embed the images of a protocol by published releases, and measure its figures for each cell.

    Images are embedded once for each release, and cells are measured in their order. Query images
    that are cut out are written to a temporary folder, which is removed. A cell of an older gallery
    has criteria only if the own cells of both releases, such as 1/1 and 2/2, are among `cells`.

    Args:
        name: the protocol.
        root: the folder of its files and images.
        model_repo: the publication folder.
        manifests: the releases by number.
        cells: the cells to measure; none give an empty result.
        int8: use quantised upgrades where they exist.
        points: operating points for ijbc; None: the protocol's own.
        independent_release: a release trained without older models, whose own cell is among
            `cells`, for update gain and degradation; None: the query's own, if it was trained so.
        with_backfill_curves: also measure the figures while older galleries are re-embedded.

    Raises:
        ConfigurationError: the name is unknown, the protocol has no operating points, or the folder
            of vggface2 cannot be read.
        NotFoundError: a file or image is missing, or a cell names an unpublished release.
        InvalidInputError: a file cannot be read or has another form, no query has an answer, or
            vectors of a cell cannot be compared.
        VerificationError: a file of a release is damaged, or a model returns unusable vectors.
        NoEncoderError: a release of a cell embeds no images.
        ValueError: a rate is out of range, or the first elements of a longer query are all zero.
        OSError: no temporary folder can be made. PermissionError: this user may not read a folder
            of market1501 or vggface2.
    """
    read = protocol_named(name, points)
    with tempfile.TemporaryDirectory(prefix="nobackfill-protocol-") as folder:
        protocol = read(root, Path(folder))
        queries = gallery = PublishedListing(protocol.queries, model_repo, manifests)
        if protocol.gallery is not protocol.queries:
            gallery = PublishedListing(protocol.gallery, model_repo, manifests)
        measured = {
            cell: protocol.measure(
                *cell_vectors(cell, queries, gallery, int8=int8), queries.search_metric(cell)
            )
            for cell in cells
        }
        older = [cell for cell in cells if cell.gallery_releases[0] != cell.query_release]
        curves = {
            str(cell): _curves(protocol, cell, queries, gallery, int8=int8)
            for cell in older
            if with_backfill_curves
        }
    criteria = {}
    for cell in older:
        reference = independent_release
        if independent_release is None and manifests[cell.query_release].method == INDEPENDENT:
            reference = cell.query_release
        ends = (
            measured.get(native_cell(cell.gallery_releases[0])),
            measured.get(native_cell(cell.query_release)),
        )
        bound = None if reference is None else measured.get(native_cell(reference))
        if ends[0] is not None and ends[1] is not None:
            criteria[str(cell)] = figure_criteria(measured[cell], ends[0], ends[1], bound)
    return ProtocolReport(
        {str(cell): figures for cell, figures in measured.items()},
        criteria,
        {cell: orders for cell, orders in curves.items() if orders},
    )


def figure_criteria(
    served: Figures, old: Figures, new: Figures, independent: Figures | None
) -> dict[str, Judgement]:
    """Compute the papers' criteria for each figure of a cell with an older gallery.

    Args:
        served: figures of the cell, of which more is better.
        old, new: figures of old/old and new/new, with the same names.
        independent: new/new of a model trained without older ones; None: unknown.

    Returns:
        By figure: `compatible` (BCT Eq. 2), `update_gain` (BCT Eq. 9), `upgrade_gain` (DMU Eq. 6)
        and `degradation` (DMU Eq. 7); None where one is not defined, such as without `independent`
        or if it divides by 0.

    Raises:
        KeyError: `old`, `new` or `independent` lacks a figure of `served`.
    """
    criteria: dict[str, Judgement] = {}
    for name, value in served.items():
        bound = None if independent is None else independent[name]
        criteria[name] = {
            "compatible": is_compatible(value, old[name]),
            "update_gain": None if bound is None else update_gain(value, old[name], bound),
            "upgrade_gain": upgrade_gain(value, old[name]) if old[name] > 0 else None,
            "degradation": degradation(new[name], bound) if bound else None,
        }
    return criteria


def _curves(
    protocol: Protocol,
    cell: CellName,
    queries: PublishedListing,
    gallery: PublishedListing,
    *,
    int8: bool,
) -> dict[str, ProtocolCurve]:
    """Measure the protocol while a cell's gallery is re-embedded, by plain distances.

    Orders are random, class (BCT's supplement) if the protocol tells classes, and uncertainty if
    the upgrade predicts it. There are none if old and new vectors cannot be one gallery: they have
    other dimensions, or queries pass an adapter.
    """
    served, native = (
        gallery.vectors_along(cell.gallery_releases, int8=int8),
        gallery.native_vectors(cell.query_release),
    )
    if served.embedding.shape != native.shape or queries.query_adapter(cell) is not None:
        return {}
    orders = {"random": ReembeddingOrder(random_order(len(native), 0))}
    if protocol.gallery_classes is not None:
        items = class_order(protocol.gallery_classes, 0)
        orders["class"] = ReembeddingOrder(items, class_shares(protocol.gallery_classes, items))
    if served.uncertainty is not None:
        orders["uncertainty"] = ReembeddingOrder(uncertainty_order(served.uncertainty))
    curves = {}
    for name, order in orders.items():
        shares = np.asarray(order.measured_shares, np.float64)
        points = []
        for count in np.round(shares * len(native)).astype(int).tolist():
            mixed = served.embedding.copy()
            mixed[order.item_order[:count]] = native[order.item_order[:count]]
            vectors = queries.native_vectors(cell.query_release)
            points.append(protocol.measure(vectors, mixed, queries.metric(cell.query_release)))
        figures = {name: np.array([point[name] for point in points]) for name in points[0]}
        curves[name] = ProtocolCurve(shares, figures)
    return curves
