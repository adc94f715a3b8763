"""The gate: a release goes out only if M(new, served old) > M(old, old) (BCT Eq. 2).

Measured on the exported files, through the gallery room's HNSW index, on images that nothing was
trained on; for mAP and CMC-1, with the paired bootstrap's lower bound above 0. "Served" is every
way in which the release would have old vectors answered: direct search where it declares it, and
each route, direct (1->3) or chained (1->2->3).
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from metrics.bootstrap import Difference, paired_bootstrap
from metrics.ranking import Relevance, same_label
from metrics.retrieval import mean
from release.errors import InvalidInputError
from release.manifest import Calibration, Cell, GateVerdict, Manifest, Origin, RouteEvidence
from release.models import Files
from training.calibrate import fit_calibration
from training.data import Listing, halves
from training.measure import CellName, Embedded, Measured, search_cell, served_cells
from training.published import Publication


@dataclass(frozen=True)
class Row:
    """One line of the gate's table: how the old release's vectors would be served."""

    cell: CellName
    old: CellName
    map_gain: Difference
    cmc1_gain: Difference

    @property
    def passed(self) -> bool:
        """Both lower bounds are above 0."""
        return self.map_gain.low > 0 and self.cmc1_gain.low > 0


@dataclass(frozen=True)
class Evidence:
    """What measuring a release gives to its manifest."""

    cells: tuple[Cell, ...]
    routes: tuple[RouteEvidence, ...]
    calibration: tuple[Calibration, ...]
    verdict: GateVerdict
    rows: tuple[Row, ...]


class Measuring:
    """Cells on one set of images, every image a query against all others; each measured once."""

    def __init__(self, listing: Listing, files: Files, manifests: Mapping[int, Manifest]) -> None:
        self.embedded = Embedded(listing, files, manifests)
        self.relevance: Relevance = same_label(
            listing.labels, listing.labels, listing.paths, listing.paths
        )
        self._done: dict[tuple[CellName, bool], Measured] = {}

    def cell(self, name: CellName, *, int8: bool = False) -> Measured:
        """The cell through HNSW."""
        key = (name, int8)
        if key not in self._done:
            self._done[key] = search_cell(
                name, self.embedded, self.embedded, self.relevance, int8=int8
            )
        return self._done[key]

    def replace(self, manifest: Manifest) -> None:
        """Go on with another manifest of a release; what int8 files gave is measured again."""
        self.embedded.manifests[manifest.release] = manifest
        self._done = {key: done for key, done in self._done.items() if not key[1]}

    def evidence(self, name: CellName) -> Cell:
        """The cell as the manifest records it."""
        measured, n = self.cell(name), len(self.embedded.listing)
        return Cell(
            query=str(name.query),
            gallery=str(name).partition("/")[2],
            cmc1=mean(measured.cmc1),
            cmc5=mean(measured.cmc5),
            map=mean(measured.map),
            queries=n,
            items=n,
        )


def measure_release(
    release: Manifest,
    published: Publication,
    files: Files,
    listing: Listing,
    *,
    seed: int,
    int8_loss: float,
) -> tuple[Manifest, Evidence]:
    """Measure a drafted release on two disjoint halves of `listing`: one for calibration, one for
    evidence and the gate.

    Returns the manifest without the int8 twins that lose more than `int8_loss` mAP (a share), and
    what was measured. Raises InvalidInputError where a half holds too few images to compare
    anything.
    """
    calibration_rows, gate_rows = halves(listing, seed)
    for half in (calibration_rows, gate_rows):
        _check_enough(listing.select(half))
    manifests = {**published.manifests, release.release: release}
    gate = Measuring(listing.select(gate_rows), files, manifests)
    new = _without_lossy_twins(gate, release, int8_loss)
    gate.replace(new)
    manifests[release.release] = new
    rows = tuple(_rows(gate, new, manifests, published.withdrawn))
    cells = [CellName(new.release, (new.release,))]
    cells += [name for row in rows for name in (row.old, row.cell)]
    cells += [
        CellName(new.release, (number,))
        for number in sorted({row.old.query for row in rows})
        if manifests[number].embedder.dim == new.embedder.dim
    ]
    calibrating = Measuring(listing.select(calibration_rows), files, manifests)
    return new, Evidence(
        tuple(gate.evidence(name) for name in dict.fromkeys(cells)),
        tuple(_route(gate, row.cell) for row in rows if len(row.cell.gallery) > 1),
        tuple(_calibrations(calibrating, new, manifests, rows)),
        _verdict(published, rows),
        rows,
    )


def _without_lossy_twins(gate: Measuring, release: Manifest, int8_loss: float) -> Manifest:
    upgrades = []
    for upgrade in release.upgrades:
        name = CellName(release.release, (upgrade.from_release, release.release))
        if upgrade.int8_file is not None:
            loss = mean(gate.cell(name).map) - mean(gate.cell(name, int8=True).map)
            if loss > int8_loss:
                upgrade = upgrade.model_copy(update={"int8_file": None})
        upgrades.append(upgrade)
    return release.model_copy(update={"upgrades": tuple(upgrades)})


def _rows(
    gate: Measuring, new: Manifest, manifests: Mapping[int, Manifest], withdrawn: frozenset[int]
) -> Iterator[Row]:
    for name in served_cells(new, manifests, withdrawn):
        old = CellName(name.gallery[0], (name.gallery[0],))
        served, before = gate.cell(name), gate.cell(old)
        yield Row(
            name,
            old,
            paired_bootstrap([served.map], [before.map]),
            paired_bootstrap([served.cmc1], [before.cmc1]),
        )


def _route(gate: Measuring, name: CellName) -> RouteEvidence:
    upper = mean(gate.cell(CellName(name.query, (name.query,))).map)
    measured = gate.cell(name)
    quantised = any(
        upgrade is not None and upgrade.int8_file is not None
        for source, target in itertools.pairwise(name.gallery)
        for upgrade in (gate.embedded.manifest(target).upgrade_from(source),)
    )
    return RouteEvidence(
        releases=name.gallery,
        map=mean(measured.map),
        cmc1=mean(measured.cmc1),
        kept=mean(measured.map) / upper if upper > 0 else 0.0,
        int8_map=mean(gate.cell(name, int8=True).map) if quantised else None,
    )


def _calibrations(
    measuring: Measuring, new: Manifest, manifests: Mapping[int, Manifest], rows: tuple[Row, ...]
) -> Iterator[Calibration]:
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

    own = CellName(new.release, (new.release,))
    native = fit(own, new.space, new.space, "native")
    yield native
    yield native.model_copy(update={"origin": "re-embedded"})
    # Of the newest release that is served through an upgrade, by its best route.
    routes = [row for row in rows if len(row.cell.gallery) > 1]
    if routes:
        newest = max(row.cell.gallery[0] for row in routes)
        best = max(
            (row for row in routes if row.cell.gallery[0] == newest), key=lambda r: r.map_gain.mean
        )
        yield fit(best.cell, new.space, new.space, "upgraded")
    for row in rows:
        if len(row.cell.gallery) == 1:
            yield fit(row.cell, new.space, manifests[row.old.query].space, "direct")
    for number in sorted({row.old.query for row in rows}):
        space = manifests[number].space
        yield fit(CellName(number, (number,)), space, space, "old-model")


def _verdict(published: Publication, rows: tuple[Row, ...]) -> GateVerdict:
    if not published.manifests:
        return GateVerdict(verdict="first")
    problems = [f"{row.cell} does not beat {row.old}" for row in rows if not row.passed]
    current = set(published.manifests) - published.withdrawn
    if current and max(current) not in {row.old.query for row in rows}:
        problems.append(
            f"vectors of release {max(current)} are served by no upgrade and no direct search"
        )
    return GateVerdict(
        verdict="failed" if problems else "passed",
        map_gain_low=min((row.map_gain.low for row in rows), default=None),
        cmc1_gain_low=min((row.cmc1_gain.low for row in rows), default=None),
        detail="; ".join(problems),
    )


def _check_enough(half: Listing) -> None:
    counts = {name: int((half.labels == i).sum()) for i, name in enumerate(half.class_names)}
    if sum(count >= 2 for count in counts.values()) < 2:
        raise InvalidInputError(
            f"--eval {half.root}: half of it is for calibration and half for the gate, and each "
            f"needs two classes with two images; one got {counts}"
        )
