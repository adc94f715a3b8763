"""The gate: a release goes out only if M(new, served old) > M(old, old) (BCT Eq. 2).

Measured on the exported files, through the gallery room's HNSW index, on images that nothing was
trained on; for mAP and CMC-1, with the paired bootstrap's lower bound above 0. Classes are drawn;
fewer than 10 are no sample, and the gate decides for these alone and says so. "Served" is every
way in which the release would have old vectors answered: direct search where it declares it, and
each route, direct (1->3) or chained (1->2->3), with the int8 files that gateways and devices run
where there are any, and with float32 files alone, which a device may ask for.

Where texts have no classes, agreement@10 with new/new decides, and finding the very item may not
get worse. Where there are classes, the same is measured beside them, without labels: a second view
of a picture (another part of it, lighter or darker), or the first sentence of a text, asks for the
very item. That does not keep a release from going out, it says for which kind of search the verdict
holds.
"""

import hashlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageEnhance

from nobackfill.class_folders import Listing
from nobackfill.errors import few
from nobackfill.images import Pixels, decode_within, read_file
from nobackfill.metrics.backfill import AS_THEY_ARE, Line
from nobackfill.metrics.bootstrap import FEWEST_CLASSES, Difference, paired_bootstrap
from nobackfill.metrics.ranking import Ints
from nobackfill.metrics.retrieval import PerQuery, mean
from nobackfill.quality.cells import CellName, alone, served_cells
from nobackfill.quality.embedded import Published
from nobackfill.quality.listing import ITEMS, Rows, TextListing, among_others, halves, of_class
from nobackfill.quality.retrieval import Measured, measure_cell, search_cell
from nobackfill.quality.route_evidence import (
    QuerySet,
    both_evidence,
    fit_calibration,
    healing_evidence,
    same_scale,
)
from nobackfill.release.manifest import (
    Calibration,
    Cell,
    GateVerdict,
    Manifest,
    RouteEvidence,
    Unlabelled,
)
from nobackfill.release.models import Files
from nobackfill.release.routes import plan_route, route_along
from nobackfill.release.trust.trust import Publication
from nobackfill.vectors import Origin

# Of each query's hits: how many are compared with those of new/new.
NEIGHBOURS = 10
# What finding the very item may lose as it is measured: few queries prove no loss.
_LOSS = 0.01


@dataclass(frozen=True)
class GainRow:
    """One line of the gate's table: how the old release's vectors would be served."""

    cell: CellName
    old: CellName
    # With float32 files alone, though some of the way has int8 twins.
    exact: bool
    map_gain: Difference
    cmc1_gain: Difference
    # Images that are asked for by texts.
    by_text: bool = False
    # Where no class is known: of agreement@10, beside figures of finding the very item.
    agreement_gain: Difference | None = None

    def __str__(self) -> str:
        exact, by_text = " float32" * self.exact, " by text" * self.by_text
        return f"{self.cell}{exact}{by_text}"

    @property
    def passed(self) -> bool:
        """Both lower bounds are above 0. Without classes: what is similar is found better, and the
        very item not worse, neither by more than a point nor measurably."""
        if self.agreement_gain is None:
            return self.map_gain.low > 0 and self.cmc1_gain.low > 0
        return self.finds_similar and self.keeps_items

    @property
    def finds_similar(self) -> bool:
        """Whether what is similar is found better."""
        return self.agreement_gain is not None and self.agreement_gain.low > 0

    @property
    def keeps_items(self) -> bool:
        """Whether the very item is found not worse, neither by more than a point nor measurably."""
        gains = (self.map_gain, self.cmc1_gain)
        return all(gain.mean >= -_LOSS and gain.high >= 0 for gain in gains)

    @property
    def finds_items(self) -> bool:
        """Whether the very item is found better, too."""
        return self.map_gain.low > 0 and self.cmc1_gain.low > 0


def gain_row(
    name: CellName, old: CellName, served: Measured, before: Measured, own: Measured | None,
    *, classes: Ints | None, exact: bool, by_text: bool,
) -> GainRow:  # fmt: skip
    """Compare a served cell with the old release.

    `own`: new/new, where agreement with it decides. `classes`: of each query, where they are known.
    """

    def gained(found: PerQuery, other: PerQuery) -> Difference:
        labels = None if classes is None else [classes]
        return paired_bootstrap([found], [other], classes=labels)

    agreement = None if own is None else gained(agrees(served, own), agrees(before, own))
    return GainRow(
        name, old, exact,
        gained(served.map, before.map), gained(served.cmc1, before.cmc1),
        by_text, agreement,
    )  # fmt: skip


def agrees(found: Measured, own: Measured) -> PerQuery:
    """The share of each query's first NEIGHBOURS hits that new/new has among its own."""
    pairs = zip(found.neighbours[:, :NEIGHBOURS], own.neighbours[:, :NEIGHBOURS], strict=True)
    return np.array([np.isin(a[a >= 0], b).sum() / max(1, (b >= 0).sum()) for a, b in pairs])


def verdict(
    published: Publication,
    rows: Sequence[GainRow],
    new: Manifest,
    unlabelled: Sequence[Unlabelled] = (),
) -> GateVerdict:
    """Of all rows; what it holds for. `unlabelled`: of the same ways by what needs no labels, which
    decide nothing where there are classes."""
    if not published.manifests:
        return GateVerdict(verdict="first")
    problems = []
    current = set(published.manifests) - published.withdrawn
    if current and max(current) not in {row.old.query for row in rows}:
        problems.append(
            f"vectors of release {max(current)} are served by no upgrade and no direct search"
        )
    if current and _texts_left_behind(published, max(current), new):
        problems.append(
            f"texts under release {max(current)} have no side-information, which every upgrade "
            "from it reads; add one that reads none"
        )
    beaten = [f"{row} does not beat {row.old}{_why(row)}" for row in rows if not row.passed]
    if beaten:
        problems.append(few(beaten))
    told = problems or [_holds_for(rows) or _holds_beside(unlabelled)]
    return GateVerdict(
        verdict="failed" if problems else "passed",
        map_gain_low=min((row.map_gain.low for row in rows), default=None),
        cmc1_gain_low=min((row.cmc1_gain.low for row in rows), default=None),
        detail="; ".join(filter(None, [*told, _of_these_classes(rows)])),
    )


def _of_these_classes(rows: Sequence[GainRow]) -> str:
    """Say that the verdict holds for no other classes, where they are too few to draw."""
    few_classes = [row.map_gain.classes or 0 for row in rows if row.map_gain.of_these_classes]
    if not few_classes:
        return ""
    return (
        f"decided for the {min(few_classes)} evaluated classes alone; "
        f"evaluate {FEWEST_CLASSES} or more to decide for others"
    )


def _texts_left_behind(published: Publication, newest: int, new: Manifest) -> bool:
    """Whether images are carried, and texts in the same galleries are not."""
    old = published.manifests[newest]
    if old.text_encoder is None or new.searches(old.space):
        return False
    usable = {n: one for n, one in published.manifests.items() if n not in published.withdrawn}
    usable[new.release] = new
    carried, texts = (
        plan_route(usable, newest, new.release, side) for side in (old.side_space, None)
    )
    return carried is not None and texts is None


def _why(row: GainRow) -> str:
    if row.agreement_gain is None:
        return ""
    if row.agreement_gain.low <= 0:
        return " in agreement@10 with new/new"
    return " at finding the very item (healing or embedding again does)"


def _holds_beside(told: Sequence[Unlabelled]) -> str:
    """For which kinds of search a verdict by classes holds; what is worst of each."""
    if not told:
        return ""
    similar = min(told, key=lambda one: one.agreement - one.stayed_agreement)
    item = min(told, key=lambda one: one.recall1 - one.stayed_recall1)
    agreement = f"{100 * similar.stayed_agreement:.1f} to {100 * similar.agreement:.1f}"
    recall = f"{100 * item.stayed_recall1:.1f} to {100 * item.recall1:.1f}"
    kinds = {
        f"similar things (agreement@10 {agreement} %)": all(one.similar for one in told),
        f"finding the very item (R@1 {recall} %)": all(one.very_item for one in told),
    }
    held = ["things of a class", *(kind for kind, holds in kinds.items() if holds)]
    missed = [kind for kind, holds in kinds.items() if not holds]
    return f"holds for {', '.join(held)}" + (f"; not for {', '.join(missed)}" if missed else "")


def _holds_for(rows: Sequence[GainRow]) -> str:
    """For which kind of search a verdict without classes holds."""
    known = [row for row in rows if row.agreement_gain is not None]
    if not known:
        return ""
    least = min(row.agreement_gain.low for row in known if row.agreement_gain is not None)
    similar = f"holds for similar things (agreement@10 {100 * least:+.1f} at least)"
    if all(row.finds_items for row in known):
        return f"{similar} and for finding the very item"
    return f"{similar}; the very item is found neither better nor worse, as far as these texts say"


# Queries: what they cost, once a model, does not grow with --eval.
MOST = 500
# Of a view: larger pictures are made smaller first; its share of either side; its light.
_SIDE = 640
_PART = (0.75, 0.875)
_LIGHT = (0.8, 1.2)


def measure_unlabelled(items: Published, served: Sequence[CellName]) -> tuple[Unlabelled, ...]:
    """Of each served cell, by MOST of the items at most; nothing where they are too few to tell.
    Searches are exact. Raises InvalidInputError for what is no image."""
    rows = _drawn(items.listing)
    if len(rows) < ITEMS or not served:
        return ()
    drawn = items.listing.select(rows)
    if isinstance(drawn, TextListing):
        known, label = drawn.by_parts(), dict(zip(drawn.paths, drawn.labels, strict=True))
        held = Published(known, items.files, items.manifests)
        classes = np.array([label[path] for path in known.paths])
        return _measured_unlabelled(known.asking(), held, served, classes)
    with tempfile.TemporaryDirectory() as folder:
        views = second_views(drawn, Path(folder))
        return _measured_unlabelled(views, items, served, drawn.labels)


def second_views(listing: Listing, folder: Path) -> Listing:
    """A second view of each picture, written below `folder`; each is a class of its own, named by
    the picture's path. A picture has the same view whatever is beside it.

    Raises InvalidInputError for what is no image.
    """
    views = tuple(f"{path}.png" for path in listing.paths)
    for path, view in zip(listing.paths, views, strict=True):
        place = folder / view
        place.parent.mkdir(parents=True, exist_ok=True)
        _view(decode_within(read_file(listing.root / path), _SIDE), path).save(place)
    return Listing(folder, listing.paths, views, np.arange(len(listing)))


def _view(pixels: Pixels, path: str) -> Image.Image:
    image = Image.fromarray(pixels)
    rng = np.random.default_rng(int.from_bytes(_digest(path)[:8]))
    share = rng.uniform(*_PART)
    width, height = (max(1, round(side * share)) for side in image.size)
    left = int(rng.integers(0, image.width - width + 1))
    top = int(rng.integers(0, image.height - height + 1))
    part = image.crop((left, top, left + width, top + height))
    return ImageEnhance.Brightness(part).enhance(float(rng.uniform(*_LIGHT)))


def _digest(path: str) -> bytes:
    return hashlib.sha256(path.encode("utf-8", "surrogateescape")).digest()


def _drawn(listing: Listing) -> Rows:
    order = sorted(range(len(listing)), key=lambda row: _digest(listing.paths[row]))
    return np.sort(np.array(order[:MOST], np.int64))


def _measured_unlabelled(
    asking: Listing, held: Published, served: Sequence[CellName], classes: Ints
) -> tuple[Unlabelled, ...]:
    own = held.listing
    relevance = of_class(asking, Listing(own.root, own.paths, own.paths, np.arange(len(own))))
    asked = Published(asking, held.files, held.manifests, role="query")
    done: dict[CellName, Measured] = {}

    def cell(name: CellName) -> Measured:
        if name not in done:
            done[name] = measure_cell(
                name, asked, held, relevance, neighbours=NEIGHBOURS, int8=True
            )
        return done[name]

    told = []
    for name in served:
        old = alone(name.gallery[0])
        found, before, new = cell(name), cell(old), cell(alone(name.query))
        row = gain_row(name, old, found, before, new, classes=classes, exact=False, by_text=False)
        told.append(
            Unlabelled(
                query=str(name.query), gallery=name.carried, queries=len(asking), items=len(own),
                agreement=mean(agrees(found, new)), stayed_agreement=mean(agrees(before, new)),
                recall1=mean(found.cmc1), stayed_recall1=mean(before.cmc1),
                mrr=mean(found.map), stayed_mrr=mean(before.map),
                similar=row.finds_similar, very_item=row.keeps_items,
            )
        )  # fmt: skip
    return tuple(told)


@dataclass(frozen=True)
class Evidence:
    """What measuring a release gives to its manifest."""

    cells: tuple[Cell, ...]
    routes: tuple[RouteEvidence, ...]
    calibration: tuple[Calibration, ...]
    verdict: GateVerdict
    rows: tuple[GainRow, ...]
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
    cross, cells_by_text = tuple[GainRow, ...](), tuple[Cell, ...]()
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


def _unlabelled(gate: Measuring, rows: tuple[GainRow, ...]) -> tuple[Unlabelled, ...]:
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


def _harmful_twins(rows: tuple[GainRow, ...]) -> set[int]:
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
) -> Iterator[GainRow]:
    for name in served_cells(new, manifests, withdrawn):
        old = alone(name.gallery[0])
        before = gate.cell(old)
        for exact in (False, True) if gate.quantised(name) else (False,):
            served = gate.cell(name, exact=exact)
            own = gate.cell(alone(new.release)) if gate.of_items else None
            yield gain_row(
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
        QuerySet(one.asked, one.embedded, one.relevance, one.classes) for one in (calibrating, gate)
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
    measuring: Measuring,
    new: Manifest,
    manifests: Mapping[int, Manifest],
    rows: tuple[GainRow, ...],
    lines: Mapping[CellName, Line],
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
