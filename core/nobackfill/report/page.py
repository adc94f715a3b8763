"""The page of a published release: one self-contained HTML file.

It shows what the upgrade does to a gallery, measured where there are images.
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

from nobackfill.class_folders import Listing, list_filled
from nobackfill.errors import InvalidInputError, NotFoundError, few
from nobackfill.images import decode_file
from nobackfill.metrics.backfill import uncertainty_order
from nobackfill.pages.templates import environment
from nobackfill.release.manifest import Manifest, PublishedFile, Unlabelled
from nobackfill.release.routes import route_along
from nobackfill.release.trust.trust import TrustedFolder
from nobackfill.report.charts import backfill_chart, gallery_map
from nobackfill.report.comparison import (
    GALLERIES,
    QUERIES,
    Comparison,
    Matrix,
    basis_of_evidence,
    best_route,
    compare,
    flips,
    kept,
    matrix_of_evidence,
    matrix_of_pictures,
    predecessor,
)


@dataclass(frozen=True)
class Served:
    """Addresses of pages as their commands print them; empty where none are served."""

    # `gateway serve --console`.
    console: str = ""
    # `edge-client browse`.
    browse: str = ""

    def links(self, release: int) -> Sequence[tuple[str, str]]:
        """What there is to see of a release, and its address. Raises InvalidInputError."""
        pages = (
            (self.console, f"release/{release}", f"release {release} at the gateway's console"),
            (self.console, "playground", "old and new side by side"),
            (self.browse, "release", "what a sync does to the device's gallery"),
            (self.browse, "uncertain", "its least certain pictures"),
        )
        return [(said, _base(served) + path) for served, path, said in pages if served]


def _base(address: str) -> str:
    if not address.startswith(("http://", "https://")):
        raise InvalidInputError(
            f"expected an address as gateway serve --console or edge-client browse prints it, "
            f"http://…, got {address!r}"
        )
    return address.rstrip("/") + "/"


# Larger folders are sampled: the report compares every image with every other.
MOST_IMAGES = 2000
# Sides of a small copy in pixels.
THUMBNAIL = 64
# Of a small copy of a photograph, JPEG is a tenth of the size that PNG is.
JPEG_QUALITY = 80


def read_folder(folder: Path, seed: int) -> tuple[Listing, int]:
    """Pictures of class folders, at most MOST_IMAGES drawn by seed; and how many there are in all.

    Raises NotFoundError for a missing folder, InvalidInputError where fewer than two classes have
    two images each: nothing could be found, or nothing confused.
    """
    if not folder.is_dir():
        raise NotFoundError(f"no folder {folder}; --images expects a folder of class folders")
    listing = list_filled(folder)
    if (np.bincount(listing.labels) >= 2).sum() < 2:
        raise InvalidInputError(
            f"{folder}: expected at least two class folders with two images each, found "
            f"{len(listing)} images in {len(listing.class_names)} class folders"
        )
    if len(listing) <= MOST_IMAGES:
        return listing, len(listing)
    drawn = np.random.default_rng(seed).choice(len(listing), MOST_IMAGES, replace=False)
    return listing.select(np.sort(drawn)), len(listing)


def thumbnail(file: Path) -> str:
    """A small copy as a data URI, so that the report needs no other file."""
    image = Image.fromarray(decode_file(file, THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=JPEG_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


# Beside the release's own files, the figures come from these.
SOFTWARE = ("nobackfill", "onnxruntime", "numpy", "pillow")


def downloads(
    manifests: Mapping[int, Manifest], old: int, release: int, route: tuple[int, ...]
) -> dict[str, int]:
    """Bytes by part that a device of release `old` downloads to follow `release`.

    As a device chooses: int8 transforms where they are published, the probes of every release on
    the way, nothing that `old` has brought already. Manifests and signatures come on top.
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
    held = {file.path for file in manifests[old].files()}
    lengths = {
        part: sum(file.length for file in files if file.path not in held)
        for part, files in parts.items()
    }
    return {part: length for part, length in lengths.items() if length}


def facts(manifest: Manifest) -> list[tuple[str, str]]:
    """Version, method, digests and recipe of a release, as rows of name and value."""
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


def _unlabelled(cell: Unlabelled) -> str:
    figures = {
        "agreement@10 with new / new": (cell.agreement, cell.stayed_agreement),
        "R@1 of the very item": (cell.recall1, cell.stayed_recall1),
    }
    told = [
        f"{name} {100 * new:.1f} % (old / old {100 * old:.1f})"
        for name, (new, old) in figures.items()
    ]
    return f"{', '.join(told)}; of {cell.queries} second views"


def _input(manifest: Manifest) -> str:
    kinds = []
    if manifest.embedder.file is not None:
        frame = manifest.frame
        told = [f"{frame.width} x {frame.height} pixels", frame.fit, frame.interpolation]
        kinds.append(", ".join(one for one in told if one not in ("stretch", "bilinear")))
    if (text := manifest.text_encoder) is not None:
        kinds.append(f"{text.length} tokens of text")
    return ", ".join(kinds)


def software() -> str:
    """The versions that the figures were computed with, as one line."""
    versions = ", ".join(f"{name} {version(name)}" for name in SOFTWARE)
    return f"{versions}, Python {platform.python_version()}"


TITLES = {"old": "stored by the old model", "served": "after the upgrade", "new": "embedded again"}
# What a cell of the matrix is to a person; the others are only told by their row and column.
BOUNDS = {("old", "old"): "lower bound", ("new", "new"): "upper bound"}
MARKS = BOUNDS | {("new", "old"): "naive swap", ("new", "served"): "what you get"}
# Rows of the picture grid, and the cell of the matrix that each shows.
ROWS = {
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
# Queries of each group, and least certain items, that the page shows.
SHOWN = 6
LEAST_CERTAIN = 16


@dataclass(frozen=True)
class Tile:
    """A small picture with its class."""

    picture: str
    label: str
    # Of a least certain item: its uncertainty in multiples of the median item's.
    times: float | None = None


@dataclass(frozen=True)
class HitRow:
    title: str
    hits: list[Tile]


@dataclass(frozen=True)
class QueryHits:
    """A query with its first hits by ROWS."""

    picture: str
    label: str
    rows: list[HitRow]


@dataclass(frozen=True)
class Group:
    title: str
    text: str
    queries: list[QueryHits]


def render(
    manifests: Mapping[int, Manifest],
    release: int,
    old: int | None,
    comparison: Comparison | None,
    basis: str | None,
    seed: int,
    links: Sequence[tuple[str, str]] = (),
) -> str:
    """The page. `old` None: a first release. Without `comparison` it shows what the manifests say.

    `basis` says in words what the comparison was measured on; `links`: what is served, its address.
    """
    new = manifests[release]
    found = None if old is None else best_route(manifests, old, release)
    route = () if found is None else found.releases
    matrix: Matrix = {}
    if comparison is not None:
        matrix = matrix_of_pictures(comparison.cells)
    elif old is not None:
        matrix = matrix_of_evidence(manifests[old], new, route)
    return (
        environment(Path(__file__).parent)
        .get_template("page.html.j2")
        .render(
            old=None if old is None else manifests[old],
            new=new,
            releases=[manifests[number] for number in route or sorted({old or release, release})],
            route=route,
            verdict=VERDICTS[new.gate.verdict],
            matrix=matrix,
            queries=QUERIES,
            galleries=GALLERIES,
            titles=TITLES,
            bounds=BOUNDS,
            marks=MARKS,
            kept=kept(matrix),
            basis=basis or basis_of_evidence(new, route),
            downloads={} if old is None else downloads(manifests, old, release, route),
            cost=comparison.cost if comparison else None,
            backfill=backfill_chart(comparison) if comparison and comparison.curves else None,
            map=gallery_map(comparison) if comparison else None,
            groups=_groups(comparison) if comparison else [],
            least=_least_certain(comparison) if comparison else [],
            facts=facts,
            seconds=_seconds,
            bytes=_bytes,
            software=software(),
            seed=seed,
            links=links,
        )
    )


def _groups(comparison: Comparison) -> list[Group]:
    changed = flips(comparison)
    asked = f"of {changed.answerable} searches"
    alone = len(comparison.pictures) - changed.answerable
    if alone:
        asked += f" (and {alone} with nothing to find, alone in their class)"
    return [
        Group(
            "What got better",
            f"{len(changed.improved)} {asked} now find the right class first, where the old model "
            "did not. Green is right, dotted red wrong.",
            [_asked(comparison, query) for query in changed.improved[:SHOWN]],
        ),
        Group(
            "What got worse",
            f"{len(changed.worsened)} {asked}, {changed.worsened_percent:.1f} %, found the right "
            "class first before and do not any more.",
            [_asked(comparison, query) for query in changed.worsened[:SHOWN]],
        ),
    ]


def _asked(comparison: Comparison, query: int) -> QueryHits:
    cells = comparison.cells
    rows = [
        HitRow(title, [_tile(comparison, hit) for hit in cells[name].neighbours[query].tolist()])
        for title, name in ROWS.items()
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


# Draws the pictures of a large folder, and the random order of the backfill curve.
SEED = 0


def upgrade_page(
    model_repo: Path, release: int, images: Path | None, served: Served | None = None
) -> str:
    """The HTML of `release`, from a publication folder that is verified first.

    `images`: a folder of class folders to measure on and to show; it is only read. `served`: pages
    that it leads to. Raises NotFoundError, VerificationError, InvalidInputError.
    """
    links = () if served is None else served.links(release)
    with tempfile.TemporaryDirectory() as state:
        trusted = TrustedFolder(model_repo, Path(state))
        trusted.refresh()
        manifests = dict(trusted.manifests())
        if release not in manifests:
            raise NotFoundError(
                f"{model_repo} holds no release {release} in use; it holds "
                f"{few(sorted(manifests, reverse=True)) or 'none'}"
            )
        old = predecessor(manifests, release)
        comparison = basis = None
        if images is not None and old is not None:
            pictures, total = read_folder(images, SEED)
            for number in {old, *range(old + 1, release + 1)} & set(manifests):
                trusted.verify_files(number)
            comparison = compare(model_repo, manifests, old, release, pictures)
            basis = (
                f"Measured on {len(pictures)} of {total} images of {images.resolve().name}: each "
                "is asked, all others are the gallery. Upgraded as gateways and devices do it, by "
                "int8 transforms where they are published."
            )
        return render(manifests, release, old, comparison, basis, SEED, links)
