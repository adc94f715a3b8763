"""Recognition of persons: IJB-C and VGGFace2 by faces, Market-1501 by whole bodies.

IJB-C: 1:1 verification of template pairs, and 1:N search in two galleries. The files have the names
of NIST and of the usual copies: `ijbc_face_tid_mid.txt` (image, template, media),
`ijbc_template_pair_label.txt` (template, template, 1 or 0), `ijbc_1N_gallery_G1.csv` and `…_G2.csv`
and `ijbc_1N_probe_mixed.csv` (TEMPLATE_ID, SUBJECT_ID, …), all below `meta`. The cropped faces lie
below `loose_crop`.

VGGFace2: the test set, 50 images of each of its 500 subjects, drawn once (fct.txt section 4.2).

Market-1501: the file name contains person and camera: `0002_c1s1_000451_03.jpg` is person 2 by
camera 1. Person 0000 is a distractor that is no query. -1 is a bad detection, which is ignored, and
so are images of the query's person by the same camera.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nobackfill.class_folders import ImageListing, list_images
from nobackfill.errors import InvalidInputError, NotFoundError
from nobackfill.metrics.distances import Floats, Metric, to_unit_norm
from nobackfill.metrics.identification import open_set_search, tpir_at_fpir
from nobackfill.metrics.ranking import Ranking, Relevance, rank, same_label
from nobackfill.metrics.retrieval import average_precision, cmc, mean
from nobackfill.metrics.verification import tar_at_far
from nobackfill.training.protocols.protocol import (
    Figures,
    Protocol,
    images,
    integer,
    ranked,
    table,
    words,
)
from nobackfill.vectors import Vectors

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class OperatingPoints:
    """Rates of false accepts (far) and false positives (fpir); defaults are BCT's main tables."""

    far: tuple[float, ...] = (1e-4,)
    fpir: tuple[float, ...] = (1e-2,)


@dataclass(frozen=True)
class Faces:
    """Face images in the order of their vectors, each with its template and media."""

    names: tuple[str, ...]
    templates: Ints
    media: Ints


@dataclass(frozen=True)
class Templates:
    """One unit vector per template."""

    ids: Ints
    vectors: Floats

    def of(self, ids: Ints) -> Floats:
        """Return the vectors of template ids. Raises InvalidInputError for one without a face."""
        places = np.searchsorted(self.ids, ids)
        places = np.minimum(places, len(self.ids) - 1)
        missing = ids[self.ids[places] != ids]
        if len(missing):
            raise InvalidInputError(f"template {missing[0]} has no face in the media list")
        found: Floats = self.vectors[places]
        return found


@dataclass(frozen=True)
class VerificationPairs:
    """Template pairs of the 1:1 protocol; `same` is true for pairs of one person."""

    first: Ints
    second: Ints
    same: NDArray[np.bool_]


@dataclass(frozen=True)
class Enrolled:
    """Templates with their subjects, one row per template: a gallery, or the probes."""

    templates: Ints
    subjects: Ints


def read_faces(folder: Path) -> Faces:
    """Read the faces of IJB-C. Raises NotFoundError and InvalidInputError."""
    path = folder / "ijbc_face_tid_mid.txt"
    rows = list(words(path, 3))
    numbers = np.array([[integer(t, path), integer(m, path)] for _, t, m in rows], np.int64)
    if not rows:
        raise InvalidInputError(f"{path}: expected faces, got none")
    return Faces(tuple(name for name, _, _ in rows), numbers[:, 0], numbers[:, 1])


def read_pairs(folder: Path) -> VerificationPairs:
    """Read the template pairs of IJB-C. Raises NotFoundError and InvalidInputError."""
    path = folder / "ijbc_template_pair_label.txt"
    numbers = np.array([[integer(w, path) for w in row] for row in words(path, 3)], np.int64)
    if not len(numbers) or not np.isin(numbers[:, 2], (0, 1)).all():
        raise InvalidInputError(f"{path}: expected pairs labelled 0 or 1")
    return VerificationPairs(numbers[:, 0], numbers[:, 1], numbers[:, 2] == 1)


def read_enrolled(path: Path) -> Enrolled:
    """Read a gallery or probe file, in which a template has one row per media."""
    subjects: dict[int, int] = {}
    for row in table(path, ("TEMPLATE_ID", "SUBJECT_ID")):
        template, subject = integer(row["TEMPLATE_ID"], path), integer(row["SUBJECT_ID"], path)
        if subjects.setdefault(template, subject) != subject:
            raise InvalidInputError(f"{path}: template {template} has two subjects")
    ids = np.array(sorted(subjects), np.int64)
    return Enrolled(ids, np.array([subjects[i] for i in ids.tolist()], np.int64))


def pool(faces: Faces, vectors: Floats) -> Templates:
    """Compute template vectors: the mean of the means of each media, normalised.

    A long video therefore has the same weight as a photograph."""
    if len(vectors) != len(faces.names):
        raise InvalidInputError(
            f"expected {len(faces.names)} vectors, one a face, got {len(vectors)}"
        )
    keys = np.stack((faces.templates, faces.media), 1)
    media, place = np.unique(keys, axis=0, return_inverse=True)
    of_media = _group_means(vectors, place.reshape(-1), len(media))
    ids, place = np.unique(media[:, 0], return_inverse=True)
    return Templates(ids, to_unit_norm(_group_means(of_media, place.reshape(-1), len(ids))))


def verify_templates(
    pairs: VerificationPairs, first: Templates, second: Templates, rates: Sequence[float]
) -> Mapping[float, float]:
    """Measure TAR at each FAR.

    The first template of a pair is embedded by one model, the second by another (BCT 3.3)."""
    products = np.einsum("pd,pd->p", first.of(pairs.first), second.of(pairs.second))
    distances = 1 - products
    genuine, impostor = distances[pairs.same], distances[~pairs.same]
    return {rate: tar_at_far(genuine, impostor, rate) for rate in rates}


def search_templates(
    probes: Enrolled,
    galleries: Sequence[Enrolled],
    of_probes: Templates,
    of_galleries: Templates,
    rates: Sequence[float],
    metric: Metric = "cosine",
) -> Mapping[str, float]:
    """Measure TPIR at each FPIR, rank-1 and rank-5.

    Returns:
        Means over the galleries, each gallery's own figures (`G1 rank-1`), and ranks in the merged
        galleries, where every probe has a mate. A probe whose subject is in another gallery is
        non-mated in this one.
    """
    queries = of_probes.of(probes.templates)

    def ranks(gallery: Enrolled) -> dict[str, float]:
        relevance = same_label(probes.subjects, gallery.subjects)
        ranking = rank(queries, of_galleries.of(gallery.templates), relevance, metric)
        return {f"rank-{k}": mean(cmc(ranking, k)) for k in (1, 5)}

    apart = []
    for gallery in galleries:
        relevance = same_label(probes.subjects, gallery.subjects)
        found = open_set_search(queries, of_galleries.of(gallery.templates), relevance, metric)
        told = {f"tpir@fpir={rate:g}": tpir_at_fpir(found, rate) for rate in rates}
        apart.append(told | ranks(gallery))
    figures = {name: float(np.mean([told[name] for told in apart])) for name in apart[0]}
    for number, told in enumerate(apart, 1):
        figures |= {f"G{number} {name}": value for name, value in told.items()}
    merged = ranks(_merged(galleries))
    return figures | {f"merged {name}": value for name, value in merged.items()}


def _merged(galleries: Sequence[Enrolled]) -> Enrolled:
    templates = np.concatenate([gallery.templates for gallery in galleries])
    return Enrolled(templates, np.concatenate([gallery.subjects for gallery in galleries]))


def ijbc(root: Path, _scratch: Path, points: OperatingPoints = OperatingPoints()) -> Protocol:
    """Read the protocol of IJB-C: TAR@FAR of pairs, TPIR@FPIR and ranks of the mixed probes.

    The first template of a pair and the probes are embedded by the query model, the others by the
    gallery's.
    """
    meta = root / "meta"
    faces, pairs = read_faces(meta), read_pairs(meta)
    probes = read_enrolled(meta / "ijbc_1N_probe_mixed.csv")
    galleries = [read_enrolled(meta / f"ijbc_1N_gallery_G{number}.csv") for number in (1, 2)]
    listing = images(root / "loose_crop", faces.names)

    def figures(queries: Vectors, gallery_vectors: Vectors, _metric: Metric) -> Figures:
        # Templates are unit vectors, which both metrics rank equally.
        first, second = pool(faces, queries), pool(faces, gallery_vectors)
        verified = verify_templates(pairs, first, second, points.far)
        accepted = {f"tar@far={rate:g}": share for rate, share in verified.items()}
        return accepted | dict(search_templates(probes, galleries, first, second, points.fpir))

    return Protocol(listing, listing, figures)


def _group_means(vectors: Floats, place: Ints, groups: int) -> Floats:
    sums = np.zeros((groups, vectors.shape[1]))
    np.add.at(sums, place, vectors)
    means: Floats = sums / np.bincount(place, minlength=groups)[:, None]
    return means


SUBSAMPLE = 50


def subsample(
    listing: ImageListing, per_class: int = SUBSAMPLE, seed: int = 0
) -> NDArray[np.int64]:
    """Draw `per_class` images of every class; return their rows, ascending.

    The result depends only on the listing and the seed. The images are both queries and gallery.

    Raises:
        InvalidInputError: a class has fewer images.
    """
    rng = np.random.default_rng(seed)
    chosen = []
    for label, name in enumerate(listing.class_names):
        rows = np.flatnonzero(listing.labels == label)
        if len(rows) < per_class:
            raise InvalidInputError(
                f"class {name} of {listing.root}: expected at least {per_class} images, "
                f"got {len(rows)}"
            )
        chosen.append(rng.permutation(rows)[:per_class])
    return np.sort(np.concatenate(chosen))


def vggface2(root: Path, _scratch: Path) -> Protocol:
    """Read the protocol of CMC and mAP over class folders, one per subject; queries exclude
    themselves."""
    listing = list_images(root)
    drawn = listing.select(subsample(listing))
    relevance = same_label(drawn.labels, drawn.labels, drawn.paths, drawn.paths)
    return ranked(drawn, drawn, relevance, _face_figures)


def _face_figures(ranking: Ranking) -> Figures:
    first = {f"cmc{k}": mean(cmc(ranking, k)) for k in (1, 5)}
    return {**first, "map": mean(average_precision(ranking))}


_NAME = re.compile(r"^(-1|\d{4})_c(\d)s\d_\d{6}_\d{2}\.jpg(\.jpg)?\Z")
_BAD = -1


@dataclass(frozen=True)
class Sightings:
    """The images of a folder, ordered by name: paths, persons and cameras."""

    paths: tuple[Path, ...]
    persons: NDArray[np.int64]
    cameras: NDArray[np.int64]


def read_sightings(folder: Path) -> Sightings:
    """Read a folder of Market-1501: `query`, `bounding_box_test` or `bounding_box_train`.

    Raises:
        NotFoundError: the folder does not exist.
        InvalidInputError: it has no images, or one with another name than Market-1501's.
    """
    if not folder.is_dir():
        raise NotFoundError(f"there is no folder {folder}; expected Market-1501's")
    paths = sorted(path for path in folder.iterdir() if path.suffix == ".jpg")
    if not paths:
        raise InvalidInputError(f"{folder}: expected images like 0002_c1s1_000451_03.jpg, got none")
    persons, cameras = [], []
    for path in paths:
        match = _NAME.match(path.name)
        if match is None:
            raise InvalidInputError(f"{path}: expected a name like 0002_c1s1_000451_03.jpg")
        persons.append(int(match[1]))
        cameras.append(int(match[2]))
    return Sightings(tuple(paths), np.array(persons), np.array(cameras))


def relevance(queries: Sightings, gallery: Sightings) -> Relevance:
    """Return which gallery images each query should find: those of its person by other cameras.

    Bad detections are ignored, and so are images of the query's person by the query's camera.

    Returns:
        Positions in the gallery, one array for each query; it may be empty.
    """
    bad = gallery.persons == _BAD
    relevant, ignored = [], []
    for person, camera in zip(queries.persons, queries.cameras, strict=True):
        same = gallery.persons == person
        here = gallery.cameras == camera
        relevant.append(np.flatnonzero(same & ~here & ~bad))
        ignored.append(np.flatnonzero(bad | (same & here)))
    return Relevance(relevant, ignored)


def market1501(root: Path, _scratch: Path) -> Protocol:
    """Read Market-1501's protocol: rank-1 and mAP of `query` in `bounding_box_test`.

    Args:
        root: The folder of the data set.

    Raises:
        NotFoundError: One of the two folders does not exist.
        InvalidInputError: A folder is empty, or a file has another name than Market-1501's.
    """
    queries, gallery = (read_sightings(root / part) for part in ("query", "bounding_box_test"))
    asked, searched = (
        images(sightings.paths[0].parent, [path.name for path in sightings.paths])
        for sightings in (queries, gallery)
    )
    return ranked(asked, searched, relevance(queries, gallery), _sighting_figures)


def _sighting_figures(ranking: Ranking) -> Figures:
    return {"rank-1": mean(cmc(ranking, 1)), "map": mean(average_precision(ranking))}
