"""The quality/cost curve: mAP kept against bytes and microseconds an item, as one SVG."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nobackfill.training.comparison.results import Results


@dataclass(frozen=True)
class Point:
    """A way to serve an old gallery. `kept`: its mAP over the best new/new, 0..1."""

    name: str
    stored: float
    microseconds: float
    kept: float


def points(results: Results) -> list[Point]:
    """The rows that serve the shared old model's vectors, all that have something to be held to."""
    return [
        Point(name, cost.stored, cost.microseconds, row.extras["kept_map"])
        for name, row in results.main.rows.items()
        if row.shared and row.held_to and (cost := results.costs[name])
    ]


def front(points: Sequence[Point], cost: str) -> list[Point]:
    """Those that no other point beats: none costs as little and keeps more, or costs less and keeps
    as much. Ascending by cost.
    """
    chosen: list[Point] = []
    for point in sorted(points, key=lambda p: (getattr(p, cost), -p.kept)):
        if not chosen or point.kept > chosen[-1].kept:
            chosen.append(point)
    return chosen


_PANELS: Mapping[str, str] = {
    "stored": "bytes stored for an item",
    "microseconds": "microseconds of transform an item, one thread",
}


def draw(points: Sequence[Point], title: str) -> bytes:
    """All points in grey; those of the front are joined, coloured and named, the cheapest first."""
    # Imported here: only compare.py's last step draws.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (cost, label) in zip(panels, _PANELS.items(), strict=True):

        def place(shown: Sequence[Point], cost: str = cost) -> tuple[list[float], list[float]]:
            return [getattr(p, cost) for p in shown], [100 * p.kept for p in shown]

        best = front(points, cost)
        axes.plot(*place(points), ".", color="#c8ccd0")
        axes.plot(*place(best), drawstyle="steps-post", color="#c8ccd0", zorder=1)
        for point in best:
            told = f"{point.name}: {getattr(point, cost):.3g}, {100 * point.kept:.1f} %"
            axes.plot(*place([point]), "o", label=told)
        axes.legend(loc="lower right", fontsize=8)
        axes.set_xlabel(label)
    # From 0, which a gallery searched as it is costs, over tenths to tens.
    panels[1].set_xscale("symlog", linthresh=0.1)
    panels[0].set_ylabel("mAP kept of embedding everything again, %")
    image = io.BytesIO()
    # The same bytes for the same points.
    with rc_context({"svg.hashsalt": "nobackfill"}):
        figure.savefig(image, format="svg", metadata={"Date": None})
    return image.getvalue()
