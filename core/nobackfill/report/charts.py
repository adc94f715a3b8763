"""Draw the report's charts as SVG images in data URIs."""

import base64
import io
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from numpy.typing import NDArray

from nobackfill.metrics.retrieval import mean_of_answerable
from nobackfill.report.comparison import Comparison
from nobackfill.vectors import Vectors

# Colours that most colour-blind readers can tell apart (Okabe and Ito), then two more.
COLOURS = (
    "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#f0e442", "#000000",
    "#7b4fa3", "#8a6d3b",
)  # fmt: skip
GREY = "#c8ccd0"
# Titles of the orders of a backfill.
ORDERS = {
    "random": "random order",
    "uncertainty": "least certain first",
    "gain": "most expected gain first",
}
# Width in inches. A phone shows a chart about this wide, so that its text keeps its size.
CHART_INCHES = 4.6


@dataclass(frozen=True)
class Panel:
    """A chart with its title."""

    title: str
    chart: str


@dataclass(frozen=True)
class GalleryMap:
    """The gallery in two dimensions: a panel for each state, and the colour of each class."""

    panels: list[Panel]
    legend: dict[str, str]


def backfill_chart(comparison: Comparison) -> str:
    """Draw mAP in percent against the share of re-embedded images, with the upper bound.

    Returns:
        A data URI with an SVG image; equal figures give equal bytes. Without curves, only the upper
        bound is drawn.

    Raises:
        ValueError: No picture shares its class with another one.
        KeyError: The cells lack new/new, or a curve has another order than those of ORDERS.
    """
    figure = Figure(figsize=(CHART_INCHES, 3.2), layout="constrained")
    axes = figure.add_subplot()
    for (order, curve), colour in zip(comparison.curves.items(), COLOURS, strict=False):
        area = 100 * curve.area_under(curve.map)
        axes.plot(
            100 * curve.reembedded_shares, 100 * curve.map, color=colour, marker="o", markersize=3,
            label=f"{ORDERS[order]} (mean {area:.1f})",
        )  # fmt: skip
    bound = 100 * mean_of_answerable(comparison.cells["new/new"].map)
    axes.axhline(bound, color="#555", linestyle="--", linewidth=1, label=f"new/new {bound:.1f}")
    axes.set_xlabel("images embedded again, % of the gallery")
    axes.set_ylabel("mAP, %")
    axes.legend(fontsize=9, frameon=False)
    return _data_uri(figure)


def gallery_map(comparison: Comparison) -> GalleryMap:
    """Draw the gallery in two dimensions: as stored, after the upgrade, and re-embedded.

    Old and new vectors are projected onto their own two principal components. Upgraded and
    re-embedded vectors share theirs, so that they can be compared point by point. The panel of
    upgraded vectors is left out if they have another dimension. The ten largest classes get a
    colour; the others are grey.

    Returns:
        A panel for each state, in this order, each an SVG image in a data URI, and the colours by
        class.

    Raises:
        ValueError: There are fewer than two pictures, or vectors of one dimension.
    """
    pictures = comparison.pictures
    labels = [pictures.class_of(row) for row in range(len(pictures))]
    classes = sorted(label for label, _ in Counter(labels).most_common(len(COLOURS)))
    points = {"stored by the old model": _plane(comparison.old_vectors)(comparison.old_vectors)}
    project_new = _plane(comparison.new_vectors)
    if comparison.served_vectors.shape[1] == comparison.new_vectors.shape[1]:
        points["after the upgrade"] = project_new(comparison.served_vectors)
    points["images embedded again"] = project_new(comparison.new_vectors)
    legend = dict(zip(classes, COLOURS, strict=False))
    colours = np.array([legend.get(label, GREY) for label in labels])
    panels = [Panel(title, _scatter(places, colours)) for title, places in points.items()]
    if len(set(labels)) > len(classes):
        legend["other classes"] = GREY
    return GalleryMap(panels, legend)


def _scatter(points: NDArray[np.float64], colours: NDArray[np.str_]) -> str:
    figure = Figure(figsize=(CHART_INCHES, CHART_INCHES), layout="constrained")
    axes = figure.add_subplot()
    # Grey points are drawn first.
    order = np.argsort(colours != GREY, kind="stable")
    size = float(np.clip(12000 / len(points), 8, 60))
    across, up = points[order].T
    axes.scatter(across, up, s=size, c=colours[order], linewidths=0)
    axes.set_xticks([])
    axes.set_yticks([])
    return _data_uri(figure)


def _plane(vectors: Vectors) -> Callable[[Vectors], NDArray[np.float64]]:
    """Return the projection onto the two principal components of vectors [n, dim]."""
    centre = vectors.mean(axis=0)
    _, _, components = np.linalg.svd(vectors - centre, full_matrices=False)

    def project(others: Vectors) -> NDArray[np.float64]:
        return np.asarray((others - centre) @ components[:2].T, np.float64)

    return project


def _data_uri(figure: Figure) -> str:
    buffer = io.BytesIO()
    # Text stays text, and nothing depends on time or run: equal reports are equal files.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "nobackfill"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"
