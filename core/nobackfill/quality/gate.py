"""Decide whether a release may be published: only if M(new, served old) > M(old, old) (BCT Eq. 2).

The gate measures the exported files, through the HNSW index of galleries, on held-out images. For
mAP and CMC-1, the lower bound of the paired bootstrap must be above 0. Whole classes are drawn;
fewer than 10 are no sample, so the gate then decides for these classes only and says so. "Served"
means every way of answering from old vectors: direct search if the release declares it, and each
route, direct (1->3) or chained (1->2->3). Routes are measured with int8 files where they exist, as
gateways and devices run them, and with float32 files alone, which a device may request.

After direct search, a gallery holds old vectors among new ones until all are replaced: those of new
items, and migrated ones. Each such mixture must beat M(old, old), too, at the share of new vectors
where it gains least.

For texts without classes, agreement@10 with new/new decides, and known-item search must not get
worse. With classes, the same is measured without labels in addition: a second view of a picture
(another part, lighter or darker) or the first sentence of a text is the query for its own item.
This does not block a release; it tells for which kind of search the verdict holds.
"""

import hashlib
import itertools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageEnhance

from nobackfill.class_folders import ImageListing
from nobackfill.errors import join_few
from nobackfill.images import Pixels, decode_for_display, read_file
from nobackfill.metrics.backfill import IDENTITY_LINE, DistanceLine, random_order
from nobackfill.metrics.bootstrap import FEWEST_DECIDING_CLASSES, Difference, paired_bootstrap
from nobackfill.metrics.ranking import Ints
from nobackfill.metrics.retrieval import PerQuery, mean_of_answerable
from nobackfill.quality.cells import CellName, native_cell, served_cells
from nobackfill.quality.embedded import PublishedListing
from nobackfill.quality.listing import (
    ITEMS,
    Rows,
    TextListing,
    relevance_among_others,
    relevance_by_class,
    split_halves,
)
from nobackfill.quality.retrieval import CellFigures, measure_cell, rank_mixture, search_cell
from nobackfill.quality.route_evidence import (
    QuerySet,
    fit_calibration,
    fit_distance_line,
    measure_lazy_reembedding,
    measure_rank_fusion,
)
from nobackfill.release.calibration import find_curve
from nobackfill.release.manifest import (
    Calibration,
    Cell,
    GateVerdict,
    Manifest,
    RouteEvidence,
    UnlabelledCell,
)
from nobackfill.release.models import Files
from nobackfill.release.routes import plan_route, route_along
from nobackfill.release.trust.trust import Publication
from nobackfill.vectors import Origin

# Hits of each query that are compared with those of new/new.
NEIGHBOURS = 10
# How much known-item search may measurably lose: few queries cannot prove that there is no loss.
_LOSS = 0.01
# Shares of replaced vectors at which mixtures of two cells are measured.
_SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True)
class GainRow:
    """A line of the gate's table: one way to serve the old release's vectors.

    Attributes:
        cell: The served cell.
        old_cell: The old release's own cell.
        float32_only: Measured with float32 files alone, though a step has an int8 twin.
        map_gain: Gain in mAP over the old cell.
        cmc1_gain: Gain in CMC-1 over the old cell.
        has_text_queries: Whether texts are the queries for images.
        agreement_gain: Gain in agreement@10, if the texts have no classes.
        mixture: Which vectors replace some of the cell's, such as `30 % of 2/2`; empty: none.
    """

    cell: CellName
    old_cell: CellName
    float32_only: bool
    map_gain: Difference
    cmc1_gain: Difference
    has_text_queries: bool = False
    agreement_gain: Difference | None = None
    mixture: str = ""

    def __str__(self) -> str:
        exact, by_text = " float32" * self.float32_only, " by text" * self.has_text_queries
        mixture = f" with {self.mixture}" if self.mixture else ""
        return f"{self.cell}{mixture}{exact}{by_text}"

    @property
    def passes(self) -> bool:
        """Tell whether the row passes the gate.

        With classes, both lower bounds must be above 0. Without classes, agreement must rise, and
        known-item search must not get worse, neither by more than a point nor measurably.
        """
        if self.agreement_gain is None:
            return self.map_gain.low > 0 and self.cmc1_gain.low > 0
        return self.finds_similar and self.keeps_items

    @property
    def least_gain(self) -> float:
        """Return the lowest bound of the row's gains, as a share."""
        gains = (self.map_gain, self.cmc1_gain, self.agreement_gain)
        return min(gain.low for gain in gains if gain is not None)

    @property
    def finds_similar(self) -> bool:
        """Tell whether agreement with new/new rises. False where classes decide."""
        return self.agreement_gain is not None and self.agreement_gain.low > 0

    @property
    def keeps_items(self) -> bool:
        """Tell whether known-item search stays as good: no loss above a point, and no measurable
        one."""
        gains = (self.map_gain, self.cmc1_gain)
        return all(gain.mean >= -_LOSS and gain.high >= 0 for gain in gains)

    @property
    def finds_items(self) -> bool:
        """Tell whether known-item search gets better, too."""
        return self.map_gain.low > 0 and self.cmc1_gain.low > 0


def gain_row(
    cell: CellName, old_cell: CellName, served_figures: CellFigures, old_figures: CellFigures,
    native_figures: CellFigures | None, *, classes: Ints | None, float32_only: bool = False,
    has_text_queries: bool = False, mixture: str = "",
) -> GainRow:  # fmt: skip
    """Compare a served cell with the old release's own cell.

    The bootstrap has a fixed seed: the same figures give the same row.

    Args:
        cell: The served cell.
        old_cell: The old release's own cell.
        served_figures: Figures of the served cell.
        old_figures: Figures of the old cell.
        native_figures: Figures of new/new, if agreement with it decides; None if classes decide.
        classes: Class of each query, [q]; None if unknown.
        float32_only: Whether float32 files alone were used.
        has_text_queries: Whether texts are the queries for images.
        mixture: Which vectors replace some of the cell's; empty: none.

    Raises:
        ValueError: The cells do not answer the same queries, no query has an answer, or `classes`
            has another length.
    """

    def bootstrap(values: PerQuery, other: PerQuery) -> Difference:
        labels = None if classes is None else [classes]
        return paired_bootstrap([values], [other], classes=labels)

    agreement_gain = (
        None
        if native_figures is None
        else bootstrap(
            agreement_with_native(served_figures, native_figures),
            agreement_with_native(old_figures, native_figures),
        )
    )
    return GainRow(
        cell, old_cell, float32_only,
        bootstrap(served_figures.map, old_figures.map),
        bootstrap(served_figures.cmc1, old_figures.cmc1),
        has_text_queries, agreement_gain, mixture,
    )  # fmt: skip


def agreement_with_native(figures: CellFigures, native_figures: CellFigures) -> PerQuery:
    """Return the share of each query's first NEIGHBOURS hits that new/new has among its own.

    A hit counts wherever it stands among those of new/new.

    Args:
        figures: The cell, with neighbours [q, k]; positions of -1 count as no hit.
        native_figures: The cell new/new of the same queries.

    Returns:
        [q], 0 to 1; 0 where new/new has no hits.

    Raises:
        ValueError: The cells have different numbers of queries.
    """
    pairs = zip(
        figures.neighbours[:, :NEIGHBOURS], native_figures.neighbours[:, :NEIGHBOURS], strict=True
    )
    return np.array([np.isin(a[a >= 0], b).sum() / max(1, (b >= 0).sum()) for a, b in pairs])


def decide_gate(
    published: Publication,
    rows: Sequence[GainRow],
    new: Manifest,
    unlabelled: Sequence[UnlabelledCell] = (),
) -> GateVerdict:
    """Decide whether a release passes the gate, by all rows, and describe for what the verdict
    holds.

    Withdrawn releases need not be served; if all are withdrawn, no rows are needed to pass. The
    verdict is failed if the newest release that is in use is not served, if its texts are left
    behind, or if any row does not pass.

    Args:
        published: The published releases.
        rows: The gate's table; none where no older release is served.
        new: The release.
        unlabelled: The same cells measured without labels; they only add to the description.

    Returns:
        "first" without published releases, otherwise "passed" or "failed" with the reasons, or with
        what the verdict holds for. The bounds are the lowest of all rows, None without rows.
        `forced` is not set here.
    """
    if not published.manifests:
        return GateVerdict(verdict="first")
    problems = []
    current = set(published.manifests) - published.withdrawn_releases
    if current and max(current) not in {row.old_cell.query_release for row in rows}:
        problems.append(
            f"no upgrade and no direct search serves the stored vectors of release {max(current)}, "
            "the newest one"
        )
    if current and _texts_left_behind(published, max(current), new):
        problems.append(
            f"stored texts of release {max(current)} have no side-information, which every upgrade "
            "from it reads; add an upgrade that reads none"
        )
    beaten = [f"{row} does not beat {row.old_cell}{_why(row)}" for row in rows if not row.passes]
    if beaten:
        problems.append(join_few(beaten))
    details = problems or [_holds_for(rows) or _holds_beside(unlabelled)]
    return GateVerdict(
        verdict="failed" if problems else "passed",
        map_gain_low=min((row.map_gain.low for row in rows), default=None),
        cmc1_gain_low=min((row.cmc1_gain.low for row in rows), default=None),
        detail="; ".join(filter(None, [*details, _of_these_classes(rows)])),
    )


def _of_these_classes(rows: Sequence[GainRow]) -> str:
    """Tell that the verdict holds for no other classes, if they are too few to draw."""
    few_classes = [
        row.map_gain.class_count or 0 for row in rows if row.map_gain.is_limited_to_classes
    ]
    if not few_classes:
        return ""
    return (
        f"decided for the {min(few_classes)} evaluated classes alone; "
        f"evaluate {FEWEST_DECIDING_CLASSES} or more to decide for others"
    )


def _texts_left_behind(published: Publication, newest: int, new: Manifest) -> bool:
    """Tell whether an upgrade migrates images, but not texts of the same galleries."""
    old = published.manifests[newest]
    if old.text_encoder is None or new.searches_space_directly(old.space):
        return False
    usable = {
        n: one for n, one in published.manifests.items() if n not in published.withdrawn_releases
    }
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
    return " at known-item search (lazy re-embedding or a backfill does)"


def _holds_beside(cells: Sequence[UnlabelledCell]) -> str:
    """Describe for which kinds of search a verdict by classes holds; the worst way counts."""
    if not cells:
        return ""
    similar = min(cells, key=lambda one: one.agreement - one.stayed_agreement)
    item = min(cells, key=lambda one: one.recall1 - one.stayed_recall1)
    agreement = f"{100 * similar.stayed_agreement:.1f} to {100 * similar.agreement:.1f}"
    recall = f"{100 * item.stayed_recall1:.1f} to {100 * item.recall1:.1f}"
    kinds = {
        f"similar things (agreement@10 {agreement} %)": all(one.similar for one in cells),
        f"finding the very item (R@1 {recall} %)": all(one.very_item for one in cells),
    }
    kinds_held = ["things of a class", *(kind for kind, holds in kinds.items() if holds)]
    missed = [kind for kind, holds in kinds.items() if not holds]
    return f"holds for {', '.join(kinds_held)}" + (
        f"; not for {', '.join(missed)}" if missed else ""
    )


def _holds_for(rows: Sequence[GainRow]) -> str:
    """Describe for which kind of search a verdict without classes holds."""
    decided = [row for row in rows if row.agreement_gain is not None]
    if not decided:
        return ""
    least = min(row.agreement_gain.low for row in decided if row.agreement_gain is not None)
    similar = f"holds for similar things (agreement@10 {100 * least:+.1f} at least)"
    if all(row.finds_items for row in decided):
        return f"{similar} and for finding the very item"
    return f"{similar}; the very item is found neither better nor worse, as far as these texts say"


# Largest number of queries: their cost for each model does not grow with --eval.
MOST = 500
# Second views: larger pictures are reduced first; share of either side; brightness.
_SIDE = 640
_PART = (0.75, 0.875)
_LIGHT = (0.8, 1.2)


def measure_unlabelled(
    items: PublishedListing, served: Sequence[CellName]
) -> tuple[UnlabelledCell, ...]:
    """Measure served cells without labels, by exact search.

    Images get a second view, which is written to a temporary folder. Texts are cut into a query and
    the rest; texts without two parts are left out. Items are drawn by a digest of their paths, so
    that a set always gives the same queries. Images are searched among all items, texts only among
    the rests of the drawn texts. int8 files are used where they exist.

    Args:
        items: The images or texts; at most MOST of them become queries.
        served: The cells.

    Returns:
        The cells in the order of `served`. Empty if there are fewer than ITEMS items, or no cells.

    Raises:
        InvalidInputError: A file is no image, no text has two parts, the vectors of two releases
            cannot be compared, or a route reads side-information that the items lack.
        ValueError: No query has its item in the gallery, or vectors are not finite.
        VerificationError: A file differs from its manifest, cannot be loaded, or returns no usable
            vectors.
        NoEncoderError: A release has no model for this kind of item, images or texts.
        NotFoundError: A release or an upgrade of a cell does not exist.
        ConfigurationError: The library for a tokenizer is not installed.
        OSError: A view cannot be written.
    """
    rows = _sample_rows(items.listing)
    if len(rows) < ITEMS or not served:
        return ()
    sample = items.listing.select(rows)
    if isinstance(sample, TextListing):
        parts = sample.split_first_sentences()
        label = dict(zip(sample.paths, sample.labels, strict=True))
        rest_of_texts = PublishedListing(parts, items.files, items.manifests)
        classes = np.array([label[path] for path in parts.paths])
        return _measure_views(parts.as_queries(), rest_of_texts, served, classes)
    with tempfile.TemporaryDirectory() as folder:
        views = write_second_views(sample, Path(folder))
        return _measure_views(views, items, served, sample.labels)


def write_second_views(listing: ImageListing, folder: Path) -> ImageListing:
    """Write a second view of each picture below a folder.

    A view is a part of the picture, three quarters to seven eighths of each side, and lighter or
    darker. Pictures above 640 pixels are reduced first. A picture always gets the same view,
    whatever else is in the listing. Views are PNG files at the picture's path with .png appended
    (a.jpg.png); existing files are replaced, and missing folders are made.

    Args:
        listing: The pictures.
        folder: The folder; the caller removes it.

    Returns:
        The views; each is a class of its own, named by the picture's path.

    Raises:
        InvalidInputError: A file is missing or is no image; earlier views stay.
        OSError: A view cannot be written.
    """
    views = tuple(f"{path}.png" for path in listing.paths)
    for path, view in zip(listing.paths, views, strict=True):
        place = folder / view
        place.parent.mkdir(parents=True, exist_ok=True)
        _view(decode_for_display(read_file(listing.root / path), _SIDE), path).save(place)
    return ImageListing(folder, listing.paths, views, np.arange(len(listing)))


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


def _sample_rows(listing: ImageListing) -> Rows:
    order = sorted(range(len(listing)), key=lambda row: _digest(listing.paths[row]))
    return np.sort(np.array(order[:MOST], np.int64))


def _measure_views(
    views: ImageListing, items: PublishedListing, served: Sequence[CellName], classes: Ints
) -> tuple[UnlabelledCell, ...]:
    own = items.listing
    relevance = relevance_by_class(
        views, ImageListing(own.root, own.paths, own.paths, np.arange(len(own)))
    )
    queries = PublishedListing(views, items.files, items.manifests, role="query")
    figures: dict[CellName, CellFigures] = {}

    def cell(name: CellName) -> CellFigures:
        if name not in figures:
            figures[name] = measure_cell(
                name, queries, items, relevance, neighbour_count=NEIGHBOURS, int8=True
            )
        return figures[name]

    cells = []
    for name in served:
        old = native_cell(name.gallery_releases[0])
        migrated, stayed, new = cell(name), cell(old), cell(native_cell(name.query_release))
        row = gain_row(name, old, migrated, stayed, new, classes=classes)
        cells.append(
            UnlabelledCell(
                query=str(name.query_release), gallery=name.gallery_name, queries=len(views),
                items=len(own), agreement=mean_of_answerable(agreement_with_native(migrated, new)),
                stayed_agreement=mean_of_answerable(agreement_with_native(stayed, new)),
                recall1=mean_of_answerable(migrated.cmc1),
                stayed_recall1=mean_of_answerable(stayed.cmc1),
                mrr=mean_of_answerable(migrated.map), stayed_mrr=mean_of_answerable(stayed.map),
                similar=row.finds_similar, very_item=row.keeps_items,
            )
        )  # fmt: skip
    return tuple(cells)


@dataclass(frozen=True)
class ReleaseEvidence:
    """The result of measuring a release, for its manifest."""

    cells: tuple[Cell, ...]
    routes: tuple[RouteEvidence, ...]
    calibrations: tuple[Calibration, ...]
    gate_verdict: GateVerdict
    gain_rows: tuple[GainRow, ...]
    text_query_cells: tuple[Cell, ...] = ()
    unlabelled_cells: tuple[UnlabelledCell, ...] = ()


class CellMeasurer:
    """Measure cells on one set of images or texts, each cell once; each item searches all others.

    Attributes:
        embedded: The items.
        queries: The queries.
        has_text_queries: Whether texts are the queries for images.
        is_unlabelled: Whether each text is a class of its own.
        relevance: The relevant items of each query.
        classes: Class of each query; None if each is its own class.

    Raises:
        InvalidInputError: The texts have no class in common with the images.
    """

    def __init__(
        self, listing: ImageListing, files: Files, manifests: Mapping[int, Manifest],
        texts: TextListing | None = None,
    ) -> None:  # fmt: skip
        self.embedded = self.queries = PublishedListing(listing, files, manifests)
        self.has_text_queries = texts is not None
        self.is_unlabelled = isinstance(listing, TextListing) and bool(listing.queries)
        if isinstance(listing, TextListing) and listing.queries:
            texts = listing.as_queries()
        if texts is not None or isinstance(listing, TextListing):
            self.queries = PublishedListing(texts or listing, files, manifests, role="query")
        self.relevance = (
            relevance_among_others(listing) if texts is None else relevance_by_class(texts, listing)
        )
        self.classes: Ints | None = None if self.is_unlabelled else self.queries.listing.labels
        self._done: dict[tuple[CellName, bool], CellFigures] = {}

    def has_int8_step(self, name: CellName) -> bool:
        """Tell whether a step of the cell's route has an int8 twin.

        False for a cell without a route.

        Raises:
            NotFoundError: An upgrade of the route does not exist.
        """
        return route_along(self.embedded.manifests, name.gallery_releases).has_int8

    def measure_cell(self, name: CellName, *, exact: bool = False) -> CellFigures:
        """Measure a cell through an HNSW graph, as a gateway serves it; a cell is measured once.

        Later calls return the same figures, and so does another measurer of the same items.
        Relevant items beyond 1000 hits count as not found.

        Args:
            name: The cell.
            exact: Use float32 files alone; otherwise int8 files where they exist.

        Raises:
            NotFoundError: A release or an upgrade of the route does not exist.
            InvalidInputError: The vectors of the two releases cannot be compared, the route reads
                side-information that the items lack, or a file is no image.
            VerificationError: A file differs from its manifest, cannot be loaded, or returns no
                usable vectors.
            ValueError: Queries and relevance do not match, or the listing is empty.
            NoEncoderError: A release has no model for this kind of item, images or texts.
            ConfigurationError: The library for a tokenizer is not installed.
        """
        int8 = self.has_int8_step(name) and not exact
        if (name, int8) not in self._done:
            self._done[name, int8] = search_cell(
                name, self.queries, self.embedded, self.relevance, int8=int8
            )
        return self._done[name, int8]

    def replace_manifest(self, manifest: Manifest) -> None:
        """Use another manifest of a release.

        Cells with int8 files are measured again when they are needed. Others keep their figures, as
        do the release's own vectors: only upgrades may differ.
        """
        for one in (self.queries, self.embedded):
            one.manifests[manifest.release] = manifest
        self._done = {key: figures for key, figures in self._done.items() if not key[1]}

    def manifest_cell(self, name: CellName) -> Cell:
        """Return a cell as the manifest records it, measured as it is served.

        Raises:
            NotFoundError: A release or an upgrade of the route does not exist.
            InvalidInputError: The vectors of the two releases cannot be compared, the route reads
                side-information that the items lack, or a file is no image.
            VerificationError: A file differs from its manifest, cannot be loaded, or returns no
                usable vectors.
            ValueError: No query has a relevant item, or the listing is empty.
            NoEncoderError: A release has no model for this kind of item, images or texts.
            ConfigurationError: The library for a tokenizer is not installed.
        """
        figures = self.measure_cell(name)
        return Cell(
            query=str(name.query_release),
            gallery=name.gallery_name,
            cmc1=mean_of_answerable(figures.cmc1),
            cmc5=mean_of_answerable(figures.cmc5),
            map=mean_of_answerable(figures.map),
            queries=len(self.queries.listing),
            items=len(self.embedded.listing),
        )


def measure_release(
    release: Manifest,
    published: Publication,
    files: Files,
    listing: ImageListing,
    *,
    seed: int,
    int8_loss: float,
    texts: TextListing | None = None,
) -> tuple[Manifest, ReleaseEvidence]:
    """Measure a drafted release on two disjoint halves of a listing.

    One half fits the calibration, the other gives evidence and decides the gate.

    Every release is run on every item; this takes as long as embedding them all, several times.
    Only a temporary folder is written.

    Args:
        release: The draft's manifest.
        published: The published releases.
        files: The publication folder or the draft's files.
        listing: Held-out images or texts.
        seed: Chooses the halves, any whole number; a seed gives the same halves again.
        int8_loss: Largest loss of mAP by an int8 twin, a share 0 to 1; an equal loss is allowed.
        texts: Texts of the same classes as images; then the gate must pass for both kinds of
            queries. None: images or texts search among themselves.

    Returns:
        The manifest without the int8 twins that lose more or fail the gate, and the evidence.

    Raises:
        InvalidInputError: A half has too few images to compare anything, or texts and images have
            no class in common. Or vectors of two releases cannot be compared, a route reads
            side-information that the items lack, or a file is no image.
        NotFoundError: An upgrade's source is not published.
        VerificationError: A file differs from its manifest, cannot be loaded, or returns no usable
            vectors.
        ValueError: No query of a half has a relevant item.
        NoEncoderError: A release has no model for this kind of item, images or texts.
        ConfigurationError: The library for a tokenizer is not installed.
        OSError: A temporary file cannot be written.
        ModuleNotFoundError: scikit-learn, of the extra `training`, is not installed.
    """
    calibration_rows, gate_rows = split_halves(listing, seed)
    manifests = {**published.manifests, release.release: release}
    gate = CellMeasurer(listing.select(gate_rows), files, manifests)
    new = _without_twins(release, _lossy_twins(gate, release, int8_loss))
    gate.replace_manifest(new)
    rows = tuple(_rows(gate, new, manifests, published.withdrawn_releases))
    harmful = _harmful_twins(rows)
    if harmful:
        new = _without_twins(new, harmful)
        gate.replace_manifest(new)
        rows = tuple(_rows(gate, new, manifests, published.withdrawn_releases))
    manifests[release.release] = new
    cells = [native_cell(new.release)]
    cells += [name for row in rows for name in (row.old_cell, row.cell)]
    cells += [
        CellName(new.release, (number,))
        for number in sorted({row.old_cell.query_release for row in rows})
        if manifests[number].embedder.dim == new.embedder.dim
    ]
    calibrating = CellMeasurer(listing.select(calibration_rows), files, manifests)
    measurers, cross, cells_by_text = [gate], tuple[GainRow, ...](), tuple[Cell, ...]()
    if texts is not None:
        by_texts = CellMeasurer(listing.select(gate_rows), files, manifests, texts)
        by_texts.embedded = gate.embedded  # the same images, embedded once
        measurers.append(by_texts)
        cross = tuple(_rows(by_texts, new, manifests, published.withdrawn_releases))
        cells_by_text = tuple(by_texts.manifest_cell(name) for name in dict.fromkeys(cells))
    lines, routes = dict[CellName, DistanceLine](), list[RouteEvidence]()
    for name in (
        row.cell for row in rows if len(row.cell.gallery_releases) > 1 and not row.float32_only
    ):
        route, lines[name] = _route(gate, calibrating, name)
        routes.append(route)
    # Also without labels, if classes decide the gate.
    served = [row.cell for row in rows if not (row.float32_only or gate.is_unlabelled)]
    unlabelled = measure_unlabelled(gate.embedded, served)
    calibration = tuple(_calibrations(calibrating, new, manifests, rows, lines))
    calibrated = new.model_copy(update={"calibration": calibration})
    mixtures = (_mixtures(one, calibrated, manifests, rows) for one in measurers)
    all_rows = (*rows, *cross, *itertools.chain.from_iterable(mixtures))
    return new, ReleaseEvidence(
        tuple(gate.manifest_cell(name) for name in dict.fromkeys(cells)),
        tuple(routes),
        calibration,
        decide_gate(published, all_rows, new, unlabelled),
        all_rows,
        cells_by_text,
        unlabelled,
    )


def _lossy_twins(gate: CellMeasurer, release: Manifest, int8_loss: float) -> set[int]:
    """Return the sources whose int8 twin loses more than `int8_loss` mAP."""
    lossy = set()
    for upgrade in release.upgrades:
        name = CellName(release.release, (upgrade.from_release, release.release))
        loss = mean_of_answerable(gate.measure_cell(name, exact=True).map) - mean_of_answerable(
            gate.measure_cell(name).map
        )
        if upgrade.int8_file is not None and loss > int8_loss:
            lossy.add(upgrade.from_release)
    return lossy


def _harmful_twins(rows: tuple[GainRow, ...]) -> set[int]:
    """Return the sources whose int8 twin makes a route fail that passes with float32 files."""
    exactly = {row.cell for row in rows if row.float32_only and row.passes}
    return {
        row.cell.gallery_releases[-2]
        for row in rows
        if row.cell in exactly and not row.float32_only and not row.passes
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
    gate: CellMeasurer, new: Manifest, manifests: Mapping[int, Manifest], withdrawn: frozenset[int]
) -> Iterator[GainRow]:
    for name in served_cells(new, manifests, withdrawn):
        old = native_cell(name.gallery_releases[0])
        stayed = gate.measure_cell(old)
        for exact in (False, True) if gate.has_int8_step(name) else (False,):
            served = gate.measure_cell(name, exact=exact)
            own = gate.measure_cell(native_cell(new.release)) if gate.is_unlabelled else None
            yield gain_row(
                name, old, served, stayed, own,
                classes=gate.classes, float32_only=exact, has_text_queries=gate.has_text_queries,
            )  # fmt: skip


def _mixtures(
    gate: CellMeasurer, new: Manifest, manifests: Mapping[int, Manifest], rows: Sequence[GainRow]
) -> Iterator[GainRow]:
    """Yield a row for each mixture of old vectors that `new` searches directly with better ones.

    The others are the new model's own, and migrated ones if there is a route. The row is that of
    the share with the smallest gain.
    """
    order = random_order(len(gate.embedded.listing), 0)
    own = gate.measure_cell(native_cell(new.release)) if gate.is_unlabelled else None
    for name in (row.cell for row in rows if len(row.cell.gallery_releases) == 1):
        old = native_cell(name.gallery_releases[0])
        direct = find_curve(new, new.space, manifests[old.query_release].space, "direct")
        others: dict[Origin, CellName] = {"native": native_cell(new.release)}
        if routes := [row for row in rows if row.old_cell == old and row.cell != name]:
            others["upgraded"] = max(routes, key=lambda row: row.map_gain.mean).cell
        for origin, other in others.items():
            curve = find_curve(new, new.space, new.space, origin)
            if direct is None or curve is None:
                continue
            cells = gate.measure_cell(name), gate.measure_cell(other)
            mixed = []
            for share in _SHARES:
                replaced = np.zeros(len(order), np.bool_)
                replaced[order[: round(share * len(order))]] = True
                served = rank_mixture(cells, (direct, curve), replaced, gate.relevance)
                mixed.append(
                    gain_row(
                        name, old, served, gate.measure_cell(old), own,
                        classes=gate.classes, has_text_queries=gate.has_text_queries,
                        mixture=f"{share:.0%} of {other}".replace("%", " %"),
                    )
                )  # fmt: skip
            yield min(mixed, key=lambda row: (row.passes, row.least_gain))


def _route(
    gate: CellMeasurer, calibrating: CellMeasurer, name: CellName
) -> tuple[RouteEvidence, DistanceLine]:
    """Return the evidence of a route, and the line by which its migrated vectors are ranked."""
    upper = mean_of_answerable(gate.measure_cell(native_cell(name.query_release)).map)
    # Fitted on one half of the images; its effect on the curves is measured on the other.
    scale = fit_distance_line(
        calibrating.measure_cell(name),
        calibrating.measure_cell(native_cell(name.query_release)),
        calibrating.relevance,
    )
    exact = gate.measure_cell(name, exact=True)
    served = mean_of_answerable(gate.measure_cell(name).map)
    fitting, judging = (
        QuerySet(one.queries, one.embedded, one.relevance, one.classes)
        for one in (calibrating, gate)
    )
    healing, line = measure_lazy_reembedding(name, judging, scale, int8=gate.has_int8_step(name))
    both = measure_rank_fusion(name, fitting, judging, int8=gate.has_int8_step(name))
    evidence = RouteEvidence(
        releases=name.gallery_releases,
        map=mean_of_answerable(exact.map),
        cmc1=mean_of_answerable(exact.cmc1),
        int8_map=served if gate.has_int8_step(name) else None,
        kept=served / upper if upper > 0 else 0.0,
        healing=healing,
        both=both,
    )
    return evidence, line


def _calibrations(
    measuring: CellMeasurer,
    new: Manifest,
    manifests: Mapping[int, Manifest],
    rows: tuple[GainRow, ...],
    lines: Mapping[CellName, DistanceLine],
) -> Iterator[Calibration]:
    def fit(name: CellName, query: str, gallery: str, origin: Origin) -> Calibration:
        figures = measuring.measure_cell(name)
        return fit_calibration(
            query,
            gallery,
            origin,
            figures.neighbours,
            figures.distances,
            measuring.relevance,
            len(measuring.embedded.listing),
        )

    own = native_cell(new.release)
    native = fit(own, new.space, new.space, "native")
    yield native
    yield native.model_copy(update={"origin": "re-embedded"})
    # The newest release that is served through an upgrade, by its best route.
    routes = [row for row in rows if len(row.cell.gallery_releases) > 1 and not row.float32_only]
    if routes:
        newest = max(row.cell.gallery_releases[0] for row in routes)
        best = max(
            (row for row in routes if row.cell.gallery_releases[0] == newest),
            key=lambda r: r.map_gain.mean,
        )
        line = lines[best.cell]
        scale = None if line == IDENTITY_LINE else (line.slope, line.offset)
        upgraded = fit(best.cell, new.space, new.space, "upgraded")
        yield upgraded.model_copy(update={"scale": scale})
    for row in rows:
        if len(row.cell.gallery_releases) == 1:
            yield fit(row.cell, new.space, manifests[row.old_cell.query_release].space, "direct")
    for number in sorted({row.old_cell.query_release for row in rows}):
        space = manifests[number].space
        yield fit(native_cell(number), space, space, "old-model")
