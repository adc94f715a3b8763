"""The report's two charts, as SVG images in data URIs."""

import base64
import io
from collections import Counter
from collections.abc import Callable

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from metrics.retrieval import mean
from release.vectors import Vectors
from report.comparison import Comparison

# Colours that stay apart for most colour-blind eyes (Okabe and Ito), then two more.
COLOURS = (
    "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#f0e442", "#000000",
    "#7b4fa3", "#8a6d3b",
)  # fmt: skip
GREY = "#c8ccd0"


def backfill_chart(comparison: Comparison) -> str:
    """mAP in percent against the share of images embedded again, up to the upper bound."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for (name, curve), colour in zip(comparison.curves.items(), COLOURS, strict=False):
        area = 100 * curve.mean_over(curve.map)
        axes.plot(
            100 * curve.shares, 100 * curve.map, color=colour, marker="o", markersize=3,
            label=f"{name} (mean {area:.1f})",
        )  # fmt: skip
    bound = 100 * mean(comparison.cells["new/new"].map)
    axes.axhline(bound, color="#555", linestyle="--", linewidth=1, label=f"new/new {bound:.1f}")
    axes.set_xlabel("images embedded again, % of the gallery")
    axes.set_ylabel("mAP, %")
    axes.legend(fontsize=8, frameon=False)
    return _data_uri(figure)


def map_chart(comparison: Comparison) -> str:
    """The gallery in two dimensions: as stored, upgraded, and as re-embedding would have it.

    Each side on its own two principal components; upgraded and re-embedded share theirs, so that
    they can be compared point by point.
    """
    labels = [picture.label for picture in comparison.pictures]
    shown = sorted(label for label, _ in Counter(labels).most_common(len(COLOURS)))
    panels = [("stored by the old model", _plane(comparison.old_vectors)(comparison.old_vectors))]
    after = _plane(comparison.new_vectors)
    if comparison.served_vectors.shape[1] == comparison.new_vectors.shape[1]:
        panels.append(("after the upgrade", after(comparison.served_vectors)))
    panels.append(("images embedded again", after(comparison.new_vectors)))
    figure = Figure(figsize=(3.3 * len(panels), 3.5), layout="constrained")
    for number, (title, points) in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), number)
        _scatter(axes, points, labels, shown)
        axes.set_title(title, fontsize=10)
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(
        handles, names, loc="outside lower center", ncols=len(COLOURS), fontsize=8, frameon=False
    )
    return _data_uri(figure)


def _scatter(axes: Axes, points: NDArray[np.float64], labels: list[str], shown: list[str]) -> None:
    size = float(np.clip(6000 / len(points), 4, 30))
    belongs = np.array([shown.index(label) if label in shown else -1 for label in labels])
    for number in range(-1, len(shown)):
        chosen = points[belongs == number]
        if len(chosen):
            colour = GREY if number < 0 else COLOURS[number]
            name = "other classes" if number < 0 else shown[number]
            axes.scatter(chosen[:, 0], chosen[:, 1], s=size, color=colour, label=name, linewidths=0)
    axes.set_xticks([])
    axes.set_yticks([])


def _plane(vectors: Vectors) -> Callable[[Vectors], NDArray[np.float64]]:
    """The projection onto the two principal components of `vectors` [n, dim]."""
    centre = vectors.mean(axis=0)
    _, _, components = np.linalg.svd(vectors - centre, full_matrices=False)

    def project(others: Vectors) -> NDArray[np.float64]:
        return np.asarray((others - centre) @ components[:2].T, np.float64)

    return project


def _data_uri(figure: Figure) -> str:
    buffer = io.BytesIO()
    # Text stays text, and nothing depends on the hour or the run: equal reports are equal files.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "nobackfill"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"
