"""The quality/cost curve: mAP kept against bytes and microseconds an item, as one SVG."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """A way to serve an old gallery. `kept`: its mAP over the independent new/new, 0..1."""

    name: str
    stored: float
    microseconds: float
    kept: float


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
    """All points; those of the front are joined and named."""
    # Imported here: only compare.py's last step draws.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    figure.suptitle(title)
    for axes, (cost, label) in zip(
        figure.subplots(1, 2, sharey=True), _PANELS.items(), strict=True
    ):
        axes.scatter([getattr(p, cost) for p in points], [100 * p.kept for p in points], s=12)
        best = front(points, cost)
        axes.plot(
            [getattr(p, cost) for p in best], [100 * p.kept for p in best], drawstyle="steps-post"
        )
        for point in best:
            axes.annotate(
                point.name,
                (getattr(point, cost), 100 * point.kept),
                xytext=(3, -9),
                textcoords="offset points",
                fontsize=7,
            )
        axes.set_xlabel(label)
    figure.axes[0].set_ylabel("mAP kept of embedding everything again, %")
    image = io.BytesIO()
    # The same bytes for the same points.
    with rc_context({"svg.hashsalt": "nobackfill"}):
        figure.savefig(image, format="svg", metadata={"Date": None})
    return image.getvalue()
