"""Build the page of a published release: one self-contained HTML file.

It shows the effect of the upgrade on a gallery, measured if there are images.
"""

import base64
import io
import platform
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
from PIL import Image

from nobackfill.class_folders import ImageListing, list_nonempty_classes
from nobackfill.errors import InvalidInputError, NotFoundError, join_few
from nobackfill.images import decode_file
from nobackfill.metrics.backfill import uncertainty_order
from nobackfill.pages.templates import template_environment
from nobackfill.release.manifest import Manifest, PublishedFile, UnlabelledCell
from nobackfill.release.routes import route_along
from nobackfill.release.trust.trust import TrustedFolder
from nobackfill.report.charts import backfill_chart, gallery_map
from nobackfill.report.comparison import (
    GALLERIES,
    QUERIES,
    Comparison,
    Matrix,
    best_route,
    compare,
    describe_manifest_matrix,
    find_flips,
    matrix_from_manifest,
    matrix_from_pictures,
    predecessor,
    retention_percent,
)


@dataclass(frozen=True)
class RunningPages:
    """Addresses of running pages as their commands print them; empty if none run.

    Attributes:
        console_address: Printed by `gateway serve --console`.
        browse_address: Printed by `edge-client browse`.
    """

    console_address: str = ""
    browse_address: str = ""

    def links(self, release: int) -> Sequence[tuple[str, str]]:
        """Return title and address of each page about a release.

        Returns:
            The links to pages that run, in a fixed order; empty if none run.

        Raises:
            InvalidInputError: An address does not begin with http:// or https://.
        """
        pages = (
            (
                self.console_address,
                f"release/{release}",
                f"release {release} at the gateway's console",
            ),
            (self.console_address, "playground", "old and new side by side"),
            (self.browse_address, "release", "what a sync does to the device's gallery"),
            (self.browse_address, "uncertain", "its least certain pictures"),
        )
        return [(title, _base(address) + path) for address, path, title in pages if address]


def _base(address: str) -> str:
    if not address.startswith(("http://", "https://")):
        raise InvalidInputError(
            "--console, --browse: expected the address http://… that `gateway serve --console` or "
            f"`edge-client browse` prints, got {address!r}"
        )
    return address.rstrip("/") + "/"


# Larger folders are sampled: the report compares every image with every other.
MOST_IMAGES = 2000
# Sides of a small copy in pixels.
THUMBNAIL = 64
# JPEG takes a tenth of the bytes of PNG for a small copy of a photograph.
JPEG_QUALITY = 80


def read_folder(folder: Path, seed: int) -> tuple[ImageListing, int]:
    """List the pictures of class folders; draw MOST_IMAGES if there are more.

    Files that are no images are left out, and a warning counts them. No file is opened. The drawn
    pictures are in the order of the folder. A draw does not look at classes, so a class may keep
    one picture or none.

    Args:
        folder: The class folders.
        seed: Chooses the pictures if there are more than MOST_IMAGES, at least 0; a seed gives the
            same again.

    Returns:
        The pictures, and the number of all pictures.

    Raises:
        NotFoundError: No such folder.
        InvalidInputError: Fewer than two classes have two images.
        PermissionError: This user may not list the folder.
    """
    if not folder.is_dir():
        raise NotFoundError(
            f"{folder}: there is no such folder; --images expects a folder of class folders"
        )
    listing = list_nonempty_classes(folder)
    if (np.bincount(listing.labels) >= 2).sum() < 2:
        raise InvalidInputError(
            f"--images {folder}: expected at least two class folders with two images each, got "
            f"{len(listing)} images in {len(listing.class_names)} class folders; add images"
        )
    if len(listing) <= MOST_IMAGES:
        return listing, len(listing)
    sample = np.random.default_rng(seed).choice(len(listing), MOST_IMAGES, replace=False)
    return listing.select(np.sort(sample)), len(listing)


def thumbnail(file: Path) -> str:
    """Return a small JPEG copy of a picture as a data URI, so that the page needs no other file.

    It has 64 x 64 pixels; the picture is stretched to the square.

    Args:
        file: The picture.

    Raises:
        InvalidInputError: The file is missing or is no image.
    """
    image = Image.fromarray(decode_file(file, THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=JPEG_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


# Packages that the figures depend on, besides the release's own files.
SOFTWARE = ("nobackfill", "onnxruntime", "numpy", "pillow")


def download_sizes(
    manifests: Mapping[int, Manifest], old_release: int, release: int, route: tuple[int, ...]
) -> dict[str, int]:
    """Return the bytes that a device downloads to follow a release, by part.

    A device downloads int8 transforms where they are published and the probes of every release of
    the route, but no file that it has already. Manifests and signatures are not counted.

    Args:
        manifests: The releases by number.
        old_release: The release of the device.
        release: The new release.
        route: Releases of the route; empty for a direct search. The first is `old_release`, the
            last `release`.

    Returns:
        Bytes by part, without parts of 0 bytes; empty if the device needs nothing.

    Raises:
        NotFoundError: An upgrade of the route does not exist.
        KeyError: `old_release` or `release` is not among the manifests.
    """
    new = manifests[release]
    steps = route_along(manifests, route).steps
    transforms = [upgrade.int8_file or upgrade.file for _, upgrade in steps]
    side = [] if new.side_encoder is None else [new.side_encoder.file]
    parts: dict[str, list[PublishedFile]] = {
        "new model": [file for file in new.embedding_files() if file not in side],
        "side-information encoder": side,
        "transform": transforms,
        "probes": [manifests[number].probes.file for number in route[1:] or (release,)],
    }
    present = {file.path for file in manifests[old_release].files()}
    lengths = {
        part: sum(file.length for file in files if file.path not in present)
        for part, files in parts.items()
    }
    return {part: length for part, length in lengths.items() if length}


def manifest_facts(manifest: Manifest) -> list[tuple[str, str]]:
    """Return version, method, digests and recipe of a release, as rows of name and value.

    Rows with an empty value are left out. Digests are of every file that the manifest names.
    """
    embedder = manifest.embedder
    rows = [
        ("release", str(manifest.release)),
        ("created", manifest.created),
        ("method", manifest.method),
        ("space", manifest.space),
        ("input", _input(manifest)),
        ("embedding", f"{embedder.dim} numbers, {embedder.metric.replace('_', ' ')}"),
        ("side-information", manifest.side_space or "none"),
        *((f"{cell.name} without labels", _unlabelled(cell)) for cell in manifest.unlabelled),
        *((f"sha256 of {file.path}", file.sha256) for file in manifest.files()),
        *((f"recipe: {key}", str(value)) for key, value in manifest.recipe.items()),
    ]
    return [(name, value) for name, value in rows if value]


def _unlabelled(cell: UnlabelledCell) -> str:
    figures = {
        "agreement@10 with new / new": (cell.agreement, cell.stayed_agreement),
        "R@1 of the very item": (cell.recall1, cell.stayed_recall1),
    }
    parts = [
        f"{name} {100 * new:.1f} % (old / old {100 * old:.1f})"
        for name, (new, old) in figures.items()
    ]
    return f"{', '.join(parts)}; of {cell.queries} second views"


def _input(manifest: Manifest) -> str:
    kinds = []
    if manifest.embedder.file is not None:
        frame = manifest.frame
        parts = [f"{frame.width} x {frame.height} pixels", frame.fit, frame.interpolation]
        kinds.append(", ".join(one for one in parts if one not in ("stretch", "bilinear")))
    if (text := manifest.text_encoder) is not None:
        kinds.append(f"{text.length} tokens of text")
    return ", ".join(kinds)


def software_versions() -> str:
    """Return the versions of the packages that computed the figures, as one line.

    Raises:
        importlib.metadata.PackageNotFoundError: A package is not installed.
    """
    versions = ", ".join(f"{name} {version(name)}" for name in SOFTWARE)
    return f"{versions}, Python {platform.python_version()}"


CELL_TITLES = {
    "old": "stored by the old model",
    "served": "after the upgrade",
    "new": "embedded again",
}
# Names of some cells for readers.
BOUND_LABELS = {("old", "old"): "lower bound", ("new", "new"): "upper bound"}
CELL_LABELS = BOUND_LABELS | {("new", "old"): "naive swap", ("new", "served"): "what you get"}
# Rows of the picture grid, with the cell of each.
GRID_ROWS = {
    "before": "old/old",
    "naive swap": "new/old",
    "upgraded": "new/served",
    "embedded again": "new/new",
}
VERDICTS = {
    "first": "first release, nothing to beat",
    "passed": "passed",
    "failed": "failed, published by force",
    "not_measured": "not measured, published by force",
}
# Queries of each group, and least certain items, on the page.
EXAMPLES = 6
LEAST_CERTAIN = 16


@dataclass(frozen=True)
class Tile:
    """A small picture with its class.

    Attributes:
        picture: A data URI.
        label: The class.
        uncertainty_ratio: Uncertainty as a multiple of the median item's, on the list of least
            certain items.
    """

    picture: str
    label: str
    uncertainty_ratio: float | None = None


@dataclass(frozen=True)
class HitRow:
    """The first hits of a query in one cell."""

    title: str
    hits: list[Tile]


@dataclass(frozen=True)
class QueryHits:
    """A query with its first hits, by the rows of GRID_ROWS."""

    picture: str
    label: str
    rows: list[HitRow]


@dataclass(frozen=True)
class QueryGroup:
    """A titled group of queries."""

    title: str
    explanation: str
    queries: list[QueryHits]


def render_page(
    manifests: Mapping[int, Manifest],
    release: int,
    old_release: int | None,
    comparison: Comparison | None,
    basis: str | None,
    seed: int,
    links: Sequence[tuple[str, str]] = (),
) -> str:
    """Render the page of a release.

    The page refers to no other file; pictures are read now, and are part of it.

    Args:
        manifests: The releases by number.
        release: The release to show.
        old_release: The release before; None for a first release.
        comparison: Measured figures; None: those of the manifest.
        basis: A sentence about the data of the comparison; None: one about the manifest's evidence.
        seed: The seed of the drawn pictures.
        links: Title and address of running pages; they are not checked here.

    Returns:
        HTML.

    Raises:
        NotFoundError: An upgrade of the route does not exist.
        ValueError: The comparison has no query with an answer, or vectors of one dimension.
        InvalidInputError: A picture of the comparison cannot be read.
        KeyError: `release` or `old_release` is not among the manifests, or the comparison lacks a
            cell.
        importlib.metadata.PackageNotFoundError: A package of SOFTWARE is not installed.
    """
    new = manifests[release]
    best = None if old_release is None else best_route(manifests, old_release, release)
    route = () if best is None else best.releases
    matrix: Matrix = {}
    if comparison is not None:
        matrix = matrix_from_pictures(comparison.cells)
    elif old_release is not None:
        matrix = matrix_from_manifest(manifests[old_release], new, route)
    return (
        template_environment(Path(__file__).parent)
        .get_template("page.html.j2")
        .render(
            old=None if old_release is None else manifests[old_release],
            new=new,
            releases=[
                manifests[number] for number in route or sorted({old_release or release, release})
            ],
            route=route,
            verdict=VERDICTS[new.gate.verdict],
            matrix=matrix,
            queries=QUERIES,
            galleries=GALLERIES,
            titles=CELL_TITLES,
            bounds=BOUND_LABELS,
            marks=CELL_LABELS,
            kept=retention_percent(matrix),
            basis=basis or describe_manifest_matrix(new, route),
            downloads={}
            if old_release is None
            else download_sizes(manifests, old_release, release, route),
            cost=comparison.measured_seconds if comparison else None,
            backfill=backfill_chart(comparison) if comparison and comparison.curves else None,
            map=gallery_map(comparison) if comparison else None,
            groups=_groups(comparison) if comparison else [],
            least=_least_certain(comparison) if comparison else [],
            facts=manifest_facts,
            seconds=_seconds,
            bytes=_bytes,
            software=software_versions(),
            seed=seed,
            links=links,
        )
    )


def _groups(comparison: Comparison) -> list[QueryGroup]:
    changed = find_flips(comparison)
    total = f"of {changed.answerable_count} searches"
    lonely = len(comparison.pictures) - changed.answerable_count
    if lonely:
        total += f" (and {lonely} with nothing to find, alone in their class)"
    return [
        QueryGroup(
            "Searches that improved",
            f"{len(changed.improved_rows)} {total} now find the right class first, where the old "
            "model did not. Green is right, dotted red wrong.",
            [_query_hits(comparison, query) for query in changed.improved_rows[:EXAMPLES]],
        ),
        QueryGroup(
            "Searches that worsened",
            f"{len(changed.worsened_rows)} {total}, {changed.worsened_percent:.1f} %, found the "
            "right class first before and do not any more.",
            [_query_hits(comparison, query) for query in changed.worsened_rows[:EXAMPLES]],
        ),
    ]


def _query_hits(comparison: Comparison, query: int) -> QueryHits:
    cells = comparison.cells
    rows = [
        HitRow(title, [_tile(comparison, hit) for hit in cells[name].neighbours[query].tolist()])
        for title, name in GRID_ROWS.items()
        if name in cells
    ]
    tile = _tile(comparison, query)
    return QueryHits(tile.picture, tile.label, rows)


def _tile(comparison: Comparison, row: int, times: float | None = None) -> Tile:
    pictures = comparison.pictures
    return Tile(thumbnail(pictures.root / pictures.paths[row]), pictures.class_of(row), times)


def _least_certain(comparison: Comparison) -> list[Tile]:
    if comparison.uncertainty is None:
        return []
    least = uncertainty_order(comparison.uncertainty)[:LEAST_CERTAIN]
    median = float(np.median(comparison.uncertainty))
    times = comparison.uncertainty[least] / median if median > 0 else [None] * len(least)
    return [_tile(comparison, row, over) for row, over in zip(least, times, strict=True)]


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{1000 * value:.0f} ms"


def _bytes(value: int) -> str:
    return f"{value / 1e6:.1f} MB" if value >= 1e6 else f"{value / 1e3:.0f} kB"


# Seed of the drawn pictures and of the random order of the backfill curve.
REPORT_SEED = 0


def upgrade_page(
    model_repo: Path,
    release: int,
    image_folder: Path | None,
    running_pages: RunningPages | None = None,
) -> str:
    """Return the page of a release from a publication folder, which is verified first.

    Withdrawn releases cannot be shown. Only metadata, manifests and, with `image_folder`, the
    files of the releases between the two are verified. A first release has no comparison, and then
    `image_folder` is not read. Nothing is written but temporary folders.

    Args:
        model_repo: The publication folder.
        release: The release to show.
        image_folder: Class folders to measure on and to show; only read. If there are more than
            MOST_IMAGES pictures, a fixed random draw is used. None: use the manifest's figures.
        running_pages: Running pages to link to; None: no links.

    Returns:
        HTML, in one file that refers to no other.

    Raises:
        NotFoundError: No such release in use, nothing is published in the folder, or no folder
            `image_folder`.
        VerificationError: A file or signature is wrong, metadata has expired, or a model cannot be
            run.
        InvalidInputError: Too few images, a file that is no image, or an invalid address of a
            running page.
        UnavailableError: The folder cannot be read.
        CannotWriteError: The temporary folder cannot be written.
        ValueError: No picture shares its class with another one, or vectors have one dimension.
        NoEncoderError: A release embeds no images, with `image_folder`.
        OSError: No temporary folder can be made, or this user may not list `image_folder`
            (PermissionError).
    """
    links = () if running_pages is None else running_pages.links(release)
    with tempfile.TemporaryDirectory() as state:
        trusted = TrustedFolder(model_repo, Path(state))
        trusted.refresh()
        manifests = dict(trusted.manifests())
        if release not in manifests:
            raise NotFoundError(
                f"release {release} of {model_repo} cannot be shown: it is not published, was "
                "withdrawn, or this version cannot use it; usable releases: "
                f"{join_few(sorted(manifests, reverse=True)) or 'none'}"
            )
        old = predecessor(manifests, release)
        comparison = basis = None
        if image_folder is not None and old is not None:
            pictures, total = read_folder(image_folder, REPORT_SEED)
            for number in {old, *range(old + 1, release + 1)} & set(manifests):
                trusted.verify_files(number)
            comparison = compare(model_repo, manifests, old, release, pictures)
            basis = (
                f"Measured on {len(pictures)} of {total} images of {image_folder.resolve().name}: "
                "each is a query, all others are the gallery. Upgraded as gateways and devices "
                "do, by int8 transforms where they are published."
            )
        return render_page(manifests, release, old, comparison, basis, REPORT_SEED, links)
