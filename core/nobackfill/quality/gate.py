"""The gate: a release goes out only if M(new, served old) > M(old, old) (BCT Eq. 2).

Measured on the exported files, through the gallery room's HNSW index, on images that nothing was
trained on; for mAP and CMC-1, with the paired bootstrap's lower bound above 0. Classes are drawn;
fewer than 10 are no sample, and the gate decides for these alone and says so. "Served" is every
way in which the release would have old vectors answered: direct search where it declares it, and
each route, direct (1->3) or chained (1->2->3), with the int8 files that gateways and devices run
where there are any, and with float32 files alone, which a device may ask for. Where texts have no
classes, agreement@10 with new/new decides, and finding the very item may not get worse (gains.py);
where they have, both are told beside (second_views.py).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nobackfill.class_folders import Listing
from nobackfill.metrics.backfill import AS_THEY_ARE, Line
from nobackfill.metrics.ranking import Ints
from nobackfill.metrics.retrieval import mean
from nobackfill.quality.backfill import healing_evidence
from nobackfill.quality.both import Asked, both_evidence
from nobackfill.quality.calibrate import fit_calibration, same_scale
from nobackfill.quality.cells import CellName, alone, served_cells
from nobackfill.quality.embedded import Published
from nobackfill.quality.gains import Row, gain, verdict
from nobackfill.quality.halves import halves
from nobackfill.quality.relevance import among_others, of_class
from nobackfill.quality.retrieval import Measured, search_cell
from nobackfill.quality.second_views import measure_unlabelled
from nobackfill.quality.text_listing import TextListing
from nobackfill.release.manifest import (
    Calibration,
    Cell,
    GateVerdict,
    Manifest,
    RouteEvidence,
    Unlabelled,
)
from nobackfill.release.models import Files
from nobackfill.release.routes import route_along
from nobackfill.release.trust.publication import Publication
from nobackfill.vectors import Origin


@dataclass(frozen=True)
class Evidence:
    """What measuring a release gives to its manifest."""

    cells: tuple[Cell, ...]
    routes: tuple[RouteEvidence, ...]
    calibration: tuple[Calibration, ...]
    verdict: GateVerdict
    rows: tuple[Row, ...]
    cells_by_text: tuple[Cell, ...] = ()
    unlabelled: tuple[Unlabelled, ...] = ()


class Measuring:
    """Cells on one set of images, or of texts, each a query against all others; each cell is
    measured once. `asked`: texts that are the queries instead, for images of the same classes.
    Texts of no known class are asked for by queries of their own."""

    def __init__(
        self, listing: Listing, files: Files, manifests: Mapping[int, Manifest],
        asked: TextListing | None = None,
    ) -> None:  # fmt: skip
        self.embedded = self.asked = Published(listing, files, manifests)
        self.by_text = asked is not None
        # Each text is a class of its own.
        self.of_items = isinstance(listing, TextListing) and bool(listing.queries)
        if isinstance(listing, TextListing) and listing.queries:
            asked = listing.asking()
        if asked is not None or isinstance(listing, TextListing):
            self.asked = Published(asked or listing, files, manifests, role="query")
        self.relevance = among_others(listing) if asked is None else of_class(asked, listing)
        # Of each query; None where each is a class of its own.
        self.classes: Ints | None = None if self.of_items else self.asked.listing.labels
        self._done: dict[tuple[CellName, bool], Measured] = {}

    def quantised(self, name: CellName) -> bool:
        """Whether a step of the cell's route has an int8 twin."""
        return route_along(self.embedded.manifests, name.gallery).quantised

    def cell(self, name: CellName, *, exact: bool = False) -> Measured:
        """The cell through HNSW, as it is served; `exact`: with float32 files alone."""
        int8 = self.quantised(name) and not exact
        if (name, int8) not in self._done:
            self._done[name, int8] = search_cell(
                name, self.asked, self.embedded, self.relevance, int8=int8
            )
        return self._done[name, int8]

    def replace(self, manifest: Manifest) -> None:
        """Go on with another manifest of a release; what int8 files gave is measured again."""
        for one in (self.asked, self.embedded):
            one.manifests[manifest.release] = manifest
        self._done = {key: done for key, done in self._done.items() if not key[1]}

    def evidence(self, name: CellName) -> Cell:
        """The cell as the manifest records it."""
        measured = self.cell(name)
        return Cell(
            query=str(name.query),
            gallery=name.carried,
            cmc1=mean(measured.cmc1),
            cmc5=mean(measured.cmc5),
            map=mean(measured.map),
            queries=len(self.asked.listing),
            items=len(self.embedded.listing),
        )


def measure_release(
    release: Manifest,
    published: Publication,
    files: Files,
    listing: Listing,
    *,
    seed: int,
    int8_loss: float,
    texts: TextListing | None = None,
) -> tuple[Manifest, Evidence]:
    """Measure a drafted release on two disjoint halves of `listing`: one for calibration, one for
    evidence and the gate. `texts`, of the same classes as images, ask for those, too: then the gate
    is passed by both kinds of queries.

    Returns the manifest without the int8 twins that lose more than `int8_loss` mAP (a share) or the
    gate, and what was measured. Raises InvalidInputError where a half holds too few images to
    compare anything.
    """
    calibration_rows, gate_rows = halves(listing, seed)
    manifests = {**published.manifests, release.release: release}
    gate = Measuring(listing.select(gate_rows), files, manifests)
    new = _without_twins(release, _lossy_twins(gate, release, int8_loss))
    gate.replace(new)
    rows = tuple(_rows(gate, new, manifests, published.withdrawn))
    harmful = _harmful_twins(rows)
    if harmful:
        new = _without_twins(new, harmful)
        gate.replace(new)
        rows = tuple(_rows(gate, new, manifests, published.withdrawn))
    manifests[release.release] = new
    cells = [alone(new.release)]
    cells += [name for row in rows for name in (row.old, row.cell)]
    cells += [
        CellName(new.release, (number,))
        for number in sorted({row.old.query for row in rows})
        if manifests[number].embedder.dim == new.embedder.dim
    ]
    calibrating = Measuring(listing.select(calibration_rows), files, manifests)
    cross, cells_by_text = tuple[Row, ...](), tuple[Cell, ...]()
    if texts is not None:
        asking = Measuring(listing.select(gate_rows), files, manifests, texts)
        asking.embedded = gate.embedded  # the same images, embedded once
        cross = tuple(_rows(asking, new, manifests, published.withdrawn))
        cells_by_text = tuple(asking.evidence(name) for name in dict.fromkeys(cells))
    lines, routes = dict[CellName, Line](), list[RouteEvidence]()
    for name in (row.cell for row in rows if len(row.cell.gallery) > 1 and not row.exact):
        route, lines[name] = _route(gate, calibrating, name)
        routes.append(route)
    unlabelled = _unlabelled(gate, rows)
    return new, Evidence(
        tuple(gate.evidence(name) for name in dict.fromkeys(cells)),
        tuple(routes),
        tuple(_calibrations(calibrating, new, manifests, rows, lines)),
        verdict(published, (*rows, *cross), new, unlabelled),
        (*rows, *cross),
        cells_by_text,
        unlabelled,
    )


def _unlabelled(gate: Measuring, rows: tuple[Row, ...]) -> tuple[Unlabelled, ...]:
    """What needs no labels, where the gate decided by them."""
    if gate.of_items:
        return ()
    return measure_unlabelled(gate.embedded, [row.cell for row in rows if not row.exact])


def _lossy_twins(gate: Measuring, release: Manifest, int8_loss: float) -> set[int]:
    """The sources whose int8 twin loses more than `int8_loss` mAP."""
    lossy = set()
    for upgrade in release.upgrades:
        name = CellName(release.release, (upgrade.from_release, release.release))
        loss = mean(gate.cell(name, exact=True).map) - mean(gate.cell(name).map)
        if upgrade.int8_file is not None and loss > int8_loss:
            lossy.add(upgrade.from_release)
    return lossy


def _harmful_twins(rows: tuple[Row, ...]) -> set[int]:
    """The sources whose upgrade is the last step of a route that passes, but not as it is
    served."""
    exactly = {row.cell for row in rows if row.exact and row.passed}
    return {
        row.cell.gallery[-2]
        for row in rows
        if row.cell in exactly and not row.exact and not row.passed
    }


def _without_twins(release: Manifest, sources: set[int]) -> Manifest:
    upgrades = tuple(
        upgrade.model_copy(update={"int8_file": None})
        if upgrade.from_release in sources
        else upgrade
        for upgrade in release.upgrades
    )
    return release.model_copy(update={"upgrades": upgrades})


def _rows(
    gate: Measuring, new: Manifest, manifests: Mapping[int, Manifest], withdrawn: frozenset[int]
) -> Iterator[Row]:
    for name in served_cells(new, manifests, withdrawn):
        old = alone(name.gallery[0])
        before = gate.cell(old)
        for exact in (False, True) if gate.quantised(name) else (False,):
            served = gate.cell(name, exact=exact)
            own = gate.cell(alone(new.release)) if gate.of_items else None
            yield gain(
                name, old, served, before, own,
                classes=gate.classes, exact=exact, by_text=gate.by_text,
            )  # fmt: skip


def _route(gate: Measuring, calibrating: Measuring, name: CellName) -> tuple[RouteEvidence, Line]:
    """What is said of a route, and the line that its carried vectors are ranked along."""
    upper = mean(gate.cell(alone(name.query)).map)
    # Fitted to one half of the images, what it does to the curves is told of the other.
    scale = same_scale(
        calibrating.cell(name), calibrating.cell(alone(name.query)), calibrating.relevance
    )
    exact, served = gate.cell(name, exact=True), mean(gate.cell(name).map)
    fitting, judging = (
        Asked(one.asked, one.embedded, one.relevance, one.classes) for one in (calibrating, gate)
    )
    healing, line = healing_evidence(name, judging, scale, int8=gate.quantised(name))
    both = both_evidence(name, fitting, judging, int8=gate.quantised(name))
    evidence = RouteEvidence(
        releases=name.gallery,
        map=mean(exact.map),
        cmc1=mean(exact.cmc1),
        int8_map=served if gate.quantised(name) else None,
        kept=served / upper if upper > 0 else 0.0,
        healing=healing,
        both=both,
    )
    return evidence, line


def _calibrations(
    measuring: Measuring, new: Manifest, manifests: Mapping[int, Manifest], rows: tuple[Row, ...],
    lines: Mapping[CellName, Line],
) -> Iterator[Calibration]:  # fmt: skip
    def fit(name: CellName, query: str, gallery: str, origin: Origin) -> Calibration:
        found = measuring.cell(name)
        return fit_calibration(
            query,
            gallery,
            origin,
            found.neighbours,
            found.distances,
            measuring.relevance,
            len(measuring.embedded.listing),
        )

    own = alone(new.release)
    native = fit(own, new.space, new.space, "native")
    yield native
    yield native.model_copy(update={"origin": "re-embedded"})
    # Of the newest release that is served through an upgrade, by its best route.
    routes = [row for row in rows if len(row.cell.gallery) > 1 and not row.exact]
    if routes:
        newest = max(row.cell.gallery[0] for row in routes)
        best = max(
            (row for row in routes if row.cell.gallery[0] == newest), key=lambda r: r.map_gain.mean
        )
        line = lines[best.cell]
        scale = None if line == AS_THEY_ARE else (line.slope, line.offset)
        upgraded = fit(best.cell, new.space, new.space, "upgraded")
        yield upgraded.model_copy(update={"scale": scale})
    for row in rows:
        if len(row.cell.gallery) == 1:
            yield fit(row.cell, new.space, manifests[row.old.query].space, "direct")
    for number in sorted({row.old.query for row in rows}):
        space = manifests[number].space
        yield fit(alone(number), space, space, "old-model")
