"""What a backfill would bring: quality while served vectors are replaced by re-embedded ones."""

from collections.abc import Callable, Sequence

from nobackfill.metrics.backfill import (
    AS_THEY_ARE,
    BackfillCurve,
    Line,
    Order,
    class_order,
    class_shares,
    curves_by_order,
    gain_order,
    oracle_order,
    random_order,
    uncertainty_order,
)
from nobackfill.metrics.bootstrap import Difference
from nobackfill.metrics.ranking import Ints, Relevance
from nobackfill.quality.both import Asked
from nobackfill.quality.cells import CellName
from nobackfill.quality.embedded import Embedded, Published, asking
from nobackfill.release.calibration import find
from nobackfill.release.manifest import HealingEvidence

# Random; by class in steps of 2 % of them (BCT's supplement); by the true error (what a perfect
# uncertainty would reach); by the upgrade's uncertainty; by that and by how many searches meet it.
ORDERS = ("random", "class", "oracle", "uncertainty", "gain")
# A valley of less is no reason to rank carried vectors otherwise than by distance.
MOST_BELOW = 0.01


def backfill_curves(
    cell: CellName,
    queries: Embedded,
    gallery: Embedded,
    relevance: Relevance,
    orders: Sequence[str] = ORDERS,
    *,
    int8: bool = False,
    line: Line | None = None,
) -> dict[str, BackfillCurve]:
    """The curves of a cell of an older gallery, searched as it is or carried along a route, by
    order; by uncertainty and gain where the upgrade predicts a variance. `line`: of what is
    carried; None: the one that the release ranks it along."""
    line = served_line(cell, queries) if line is None else line
    served, whole = gallery.along(cell.gallery, int8=int8), gallery.native(cell.query)
    meets_served = asking(cell, queries, served.embedding)
    uncertainty = served.uncertainty
    made: dict[str, Callable[[], Ints]] = {
        "random": lambda: random_order(len(whole), 0),
        "class": lambda: class_order(gallery.listing.labels, 0),
        "oracle": lambda: oracle_order(served.embedding, whole),
    }
    if uncertainty is not None:
        made["uncertainty"] = lambda: uncertainty_order(uncertainty)
        metric = queries.metric(cell.query)
        made["gain"] = lambda: gain_order(served.embedding, uncertainty, metric)
    wanted = {}
    for name in orders:
        if name in made:
            order = made[name]()
            labels = gallery.listing.labels
            wanted[name] = (
                Order(order, class_shares(labels, order)) if name == "class" else Order(order)
            )
    return curves_by_order(
        queries.native(cell.query),
        served.embedding,
        whole,
        wanted,
        relevance,
        metric=queries.metric(cell.query),
        served_queries=meets_served,
        line=line,
    )


def served_line(cell: CellName, queries: Embedded) -> Line:
    """The line that the cell's carried vectors are ranked along beside embedded ones, if a release
    says so."""
    if len(cell.gallery) == 1 or not isinstance(queries, Published):
        return AS_THEY_ARE
    manifest = queries.manifest(cell.query)
    curve = find(manifest, manifest.space, manifest.space, "upgraded")
    return AS_THEY_ARE if curve is None or curve.scale is None else Line(*curve.scale)


def ranked_along(healing: HealingEvidence, gains: Sequence[Difference], line: Line) -> Line:
    """`line` where distances fall into a valley that it closes, at least in part, and one of its
    `gains` over the way is more than chance; else distances as they are, which need no second
    search."""
    closes = healing.valley > MOST_BELOW and healing.scaled_valley < healing.valley
    # A few queries fall by more than a point without any valley.
    return line if closes and any(gain.low > 0 for gain in gains) else AS_THEY_ARE


def healing_evidence(
    cell: CellName, asked: Asked, line: Line, *, int8: bool
) -> tuple[HealingEvidence, Line]:
    """What a release says of its galleries on the way, the curves in random order, and the line
    that it ranks them along; `line` as in `backfill_curves`."""
    raw, scaled = (
        backfill_curves(
            cell, asked.queries, asked.items, asked.relevance, ("random",), int8=int8, line=one
        )["random"]
        for one in (AS_THEY_ARE, line)
    )
    evidence = HealingEvidence(
        map=tuple(raw.map.tolist()),
        cmc1=tuple(raw.cmc1.tolist()),
        scaled_map=tuple(scaled.map.tolist()),
        scaled_cmc1=tuple(scaled.cmc1.tolist()),
    )
    gains = [
        asked.gained(scaled.map_areas, raw.map_areas),
        asked.gained(scaled.cmc1_areas, raw.cmc1_areas),
    ]
    return evidence, ranked_along(evidence, gains, line)
