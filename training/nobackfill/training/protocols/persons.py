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
from nobackfill.metrics.ranking import Ranking, Relevance, rank, relevance_by_label
from nobackfill.metrics.retrieval import average_precision, cmc, mean_of_answerable
from nobackfill.metrics.verification import tar_at_far
from nobackfill.training.protocols.protocol import (
    Figures,
    Protocol,
    list_protocol_images,
    parse_integer,
    ranking_protocol,
    read_table,
    read_words,
)
from nobackfill.vectors import Vectors

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class OperatingPoints:
    """The rates at which IJB-C is measured; the defaults are those of BCT's main tables.

    Attributes:
        far: false accept rates of the 1:1 protocol, 0 to 1.
        fpir: false positive identification rates of the 1:N protocol, 0 to 1.
    """

    far: tuple[float, ...] = (1e-4,)
    fpir: tuple[float, ...] = (1e-2,)


@dataclass(frozen=True)
class Faces:
    """Face images in the order of their vectors.

    Attributes:
        paths: paths below the folder of cropped faces.
        template_ids: the template of each face, int64 [n].
        media_ids: the photograph or video of each face, int64 [n].
    """

    paths: tuple[str, ...]
    template_ids: Ints
    media_ids: Ints


@dataclass(frozen=True)
class Templates:
    """One unit vector per template.

    Attributes:
        ids: template ids, int64 [t], ascending.
        vectors: [t,dim], in the order of `ids`.
    """

    ids: Ints
    vectors: Floats

    def vectors_of(self, ids: Ints) -> Floats:
        """Return the vectors of template ids: int64 [m] -> [m,dim]; ids may repeat.

        `ids` may be empty. The order is that of `ids`.

        Raises:
            InvalidInputError: a template has no face.
            IndexError: there is no template at all, and `ids` is not empty.
        """
        places = np.searchsorted(self.ids, ids)
        places = np.minimum(places, len(self.ids) - 1)
        missing = ids[self.ids[places] != ids]
        if len(missing):
            raise InvalidInputError(
                f"IJB-C's template {missing[0]} is named by a pair, gallery or probe file, but has "
                "no face in ijbc_face_tid_mid.txt; download all files of one version of IJB-C"
            )
        vectors: Floats = self.vectors[places]
        return vectors


@dataclass(frozen=True)
class VerificationPairs:
    """Template pairs of the 1:1 protocol.

    Attributes:
        first_template_ids, second_template_ids: template ids, int64 [p].
        is_same_person: whether a pair is of one person, bool [p].
    """

    first_template_ids: Ints
    second_template_ids: Ints
    is_same_person: NDArray[np.bool_]


@dataclass(frozen=True)
class SubjectTemplates:
    """Templates with their subjects, one row per template: a gallery, or the probes.

    Attributes:
        template_ids: template ids, int64 [t], ascending.
        subject_ids: the person of each template, int64 [t].
    """

    template_ids: Ints
    subject_ids: Ints


def read_faces(folder: Path) -> Faces:
    """Read the faces of IJB-C from ijbc_face_tid_mid.txt in `folder`.

    The order is that of the file, and no image is opened.

    Raises:
        NotFoundError: the file does not exist.
        InvalidInputError: it is no UTF-8 text, cannot be read, has no line, or a line that is not a
            name and two numbers.
    """
    path = folder / "ijbc_face_tid_mid.txt"
    rows = list(read_words(path, 3))
    numbers = np.array(
        [[parse_integer(t, path), parse_integer(m, path)] for _, t, m in rows], np.int64
    )
    if not rows:
        raise InvalidInputError(
            f"{path}: expected lines of image, template and media, got an empty file; download it "
            "again"
        )
    return Faces(tuple(name for name, _, _ in rows), numbers[:, 0], numbers[:, 1])


def read_pairs(folder: Path) -> VerificationPairs:
    """Read the template pairs of IJB-C from ijbc_template_pair_label.txt in `folder`.

    The order is that of the file; pairs may repeat.

    Raises:
        NotFoundError: the file does not exist.
        InvalidInputError: it is no UTF-8 text, cannot be read, has a line that is not two templates
            and 0 or 1, or has not both labels.
    """
    path = folder / "ijbc_template_pair_label.txt"
    numbers = np.array(
        [[parse_integer(w, path) for w in row] for row in read_words(path, 3)], np.int64
    )
    if not len(numbers) or set(numbers[:, 2].tolist()) != {0, 1}:
        raise InvalidInputError(
            f"{path}: expected lines of two templates and the label 0 or 1, and both labels, got "
            "another label, one of them alone or an empty file; download it again"
        )
    return VerificationPairs(numbers[:, 0], numbers[:, 1], numbers[:, 2] == 1)


def read_subject_templates(path: Path) -> SubjectTemplates:
    """Read a gallery or probe file of IJB-C, in which a template has one row per media.

    Other columns are ignored, and so is the letter case of the header. A file without rows gives
    empty arrays.

    Raises:
        NotFoundError: the file does not exist.
        InvalidInputError: it is no UTF-8 text, cannot be read, a column is missing, a row is too
            short, a number is none, or a template has two subjects.
    """
    subjects: dict[int, int] = {}
    for row in read_table(path, ("TEMPLATE_ID", "SUBJECT_ID")):
        template, subject = (
            parse_integer(row["TEMPLATE_ID"], path),
            parse_integer(row["SUBJECT_ID"], path),
        )
        if subjects.setdefault(template, subject) != subject:
            raise InvalidInputError(
                f"{path}: expected one subject for each template, but template {template} has "
                "two; download it again"
            )
    ids = np.array(sorted(subjects), np.int64)
    return SubjectTemplates(ids, np.array([subjects[i] for i in ids.tolist()], np.int64))


def pool_templates(faces: Faces, vectors: Floats) -> Templates:
    """Compute template vectors: the mean of the means of each media, normalised.

    A long video therefore has the same weight as a photograph. The media of a template are told
    apart by their numbers, and a number may occur in several templates. NaN in a vector makes its
    template's vector NaN.

    Args:
        faces: n faces with their templates and media.
        vectors: their vectors [n,dim].

    Raises:
        InvalidInputError: there is another number of vectors.
        ValueError: a template's mean is a zero vector.
    """
    if len(vectors) != len(faces.paths):
        raise InvalidInputError(
            f"vectors of IJB-C: expected one for each of the {len(faces.paths)} faces, got "
            f"{len(vectors)}; embed every face of the protocol, in its order"
        )
    keys = np.stack((faces.template_ids, faces.media_ids), 1)
    media, place = np.unique(keys, axis=0, return_inverse=True)
    of_media = _group_means(vectors, place.reshape(-1), len(media))
    ids, place = np.unique(media[:, 0], return_inverse=True)
    return Templates(ids, to_unit_norm(_group_means(of_media, place.reshape(-1), len(ids))))


def verify_templates(
    pairs: VerificationPairs, first: Templates, second: Templates, rates: Sequence[float]
) -> Mapping[float, float]:
    """Measure the true accept rate (TAR) at each false accept rate (FAR).

    The first template of a pair is embedded by one model, the second by another (BCT 3.3).
    Distances are 1 - cosine. A rate that occurs twice is measured once. A pair with NaN is never
    accepted.

    Args:
        pairs: pairs of one person and of two, at least one of each.
        first, second: the templates by each model.
        rates: the FARs, 0 to 1.

    Returns:
        TAR by FAR, shares 0 to 1.

    Raises:
        InvalidInputError: a template of a pair has no face.
        ValueError: there are no pairs of one kind, a rate is out of range, or the two models have
            different dimensions.
    """
    products = np.einsum(
        "pd,pd->p",
        first.vectors_of(pairs.first_template_ids),
        second.vectors_of(pairs.second_template_ids),
    )
    distances = 1 - products
    genuine, impostor = distances[pairs.is_same_person], distances[~pairs.is_same_person]
    return {rate: tar_at_far(genuine, impostor, rate) for rate in rates}


def search_templates(
    probes: SubjectTemplates,
    galleries: Sequence[SubjectTemplates],
    probe_templates: Templates,
    gallery_templates: Templates,
    rates: Sequence[float],
    metric: Metric = "cosine",
) -> Mapping[str, float]:
    """Measure TPIR at each FPIR, rank-1 and rank-5.

    TPIR and FPIR are the true and false positive identification rates. Ranks leave out probes
    without a mate.

    Args:
        probes: the queries.
        galleries: at least one gallery.
        probe_templates: the probes' templates by the query model.
        gallery_templates: the galleries' templates by the gallery's model.
        rates: the FPIRs, 0 to 1.
        metric: how distances are computed.

    Returns:
        Shares 0 to 1 by name: `tpir@fpir=0.01` for each rate, `rank-1` and `rank-5`, as means over
        the galleries. The same names with the prefix `G1 `, `G2 `, ... are each gallery's own
        figures. The ranks with the prefix `merged ` are those in all galleries together, where
        every probe has a mate. A probe whose subject is in another gallery is non-mated in this
        one.

    Raises:
        InvalidInputError: a template has no face.
        ValueError: a gallery has no mated or no non-mated probes, a rate is out of range, a vector
            is not finite, or the two models have different dimensions.
        IndexError: there is no template at all.
    """
    queries = probe_templates.vectors_of(probes.template_ids)

    def ranks(gallery: SubjectTemplates) -> dict[str, float]:
        relevance = relevance_by_label(probes.subject_ids, gallery.subject_ids)
        ranking = rank(
            queries, gallery_templates.vectors_of(gallery.template_ids), relevance, metric
        )
        return {f"rank-{k}": mean_of_answerable(cmc(ranking, k)) for k in (1, 5)}

    by_gallery = []
    for gallery in galleries:
        relevance = relevance_by_label(probes.subject_ids, gallery.subject_ids)
        search = open_set_search(
            queries, gallery_templates.vectors_of(gallery.template_ids), relevance, metric
        )
        shares = {f"tpir@fpir={rate:g}": tpir_at_fpir(search, rate) for rate in rates}
        by_gallery.append(shares | ranks(gallery))
    figures = {name: float(np.mean([one[name] for one in by_gallery])) for name in by_gallery[0]}
    for number, shares in enumerate(by_gallery, 1):
        figures |= {f"G{number} {name}": value for name, value in shares.items()}
    merged = ranks(_merged(galleries))
    return figures | {f"merged {name}": value for name, value in merged.items()}


def _merged(galleries: Sequence[SubjectTemplates]) -> SubjectTemplates:
    templates = np.concatenate([gallery.template_ids for gallery in galleries])
    return SubjectTemplates(
        templates, np.concatenate([gallery.subject_ids for gallery in galleries])
    )


def read_ijbc_protocol(
    root: Path, _scratch: Path, points: OperatingPoints = OperatingPoints()
) -> Protocol:
    """Read the protocol of IJB-C: TAR@FAR of pairs, TPIR@FPIR and ranks of the mixed probes.

    The first template of a pair and the probes are embedded by the query model, the others by the
    gallery's. The figures raise the errors of `pool_templates`, `verify_templates` and
    `search_templates`.

    Args:
        root: the data set's folder, with `meta` and `loose_crop` in it.
        points: the rates to measure at.

    Raises:
        NotFoundError: a file or a face image is missing.
        InvalidInputError: a file is no UTF-8 text, cannot be read or has another form, or a gallery
            has a mate for all probes or for none.
    """
    meta = root / "meta"
    faces, pairs = read_faces(meta), read_pairs(meta)
    probes = read_subject_templates(meta / "ijbc_1N_probe_mixed.csv")
    galleries = [
        read_subject_templates(meta / f"ijbc_1N_gallery_G{number}.csv") for number in (1, 2)
    ]
    for number, gallery in enumerate(galleries, start=1):
        has_mate = np.isin(probes.subject_ids, gallery.subject_ids)
        if has_mate.all() or not has_mate.any():
            raise InvalidInputError(
                f"{meta}: expected probes with and without a mate in gallery G{number}, got only "
                "one kind; download all files of one version again"
            )
    listing = list_protocol_images(root / "loose_crop", faces.paths)

    def figures(queries: Vectors, gallery_vectors: Vectors, _metric: Metric) -> Figures:
        # Templates are unit vectors, which both metrics rank equally.
        first, second = pool_templates(faces, queries), pool_templates(faces, gallery_vectors)
        verified = verify_templates(pairs, first, second, points.far)
        accepted = {f"tar@far={rate:g}": share for rate, share in verified.items()}
        return accepted | dict(search_templates(probes, galleries, first, second, points.fpir))

    return Protocol(listing, listing, figures, _subjects(faces, galleries))


def _subjects(faces: Faces, galleries: Sequence[SubjectTemplates]) -> Ints:
    """Return the subject of each face by its template's gallery entry.

    Faces of a template in no gallery are a class of their own, below 0."""
    subject_of = {
        template: subject
        for entries in galleries
        for template, subject in zip(
            entries.template_ids.tolist(), entries.subject_ids.tolist(), strict=True
        )
    }
    return np.array([subject_of.get(t, -1 - t) for t in faces.template_ids.tolist()], np.int64)


def _group_means(vectors: Floats, place: Ints, groups: int) -> Floats:
    sums = np.zeros((groups, vectors.shape[1]))
    np.add.at(sums, place, vectors)
    averages: Floats = sums / np.bincount(place, minlength=groups)[:, None]
    return averages


SUBSAMPLE = 50


def draw_per_class(
    listing: ImageListing, count_per_class: int = SUBSAMPLE, seed: int = 0
) -> NDArray[np.int64]:
    """Draw `count_per_class` images of every class; return their rows, ascending.

    The result depends only on the labels and the seed. An empty listing without classes raises
    ValueError.

    Args:
        listing: the images.
        count_per_class: the number of images of each class, at least 1.
        seed: of the random choice.

    Returns:
        int64.

    Raises:
        InvalidInputError: a class has fewer images.
    """
    rng = np.random.default_rng(seed)
    drawn = []
    for label, name in enumerate(listing.class_names):
        rows = np.flatnonzero(listing.labels == label)
        if len(rows) < count_per_class:
            raise InvalidInputError(
                f"class {name} of {listing.root}: expected at least {count_per_class} images for "
                f"this test protocol, got {len(rows)}; use the complete test set"
            )
        drawn.append(rng.permutation(rows)[:count_per_class])
    return np.sort(np.concatenate(drawn))


def read_vggface2_protocol(root: Path, _scratch: Path) -> Protocol:
    """Read VGGFace2's protocol: CMC and mAP of 50 images of each subject, among each other.

    A query is left out of its own answers. The 50 images are the same on every call. Figures are
    `cmc1`, `cmc5` and `map`, shares 0 to 1. The figures raise ValueError for vectors that are not
    finite, or are zero with cosine.

    Args:
        root: the test set, one folder for each subject.

    Raises:
        ConfigurationError: the folder does not exist.
        InvalidInputError: there is no class folder, or a subject has fewer than 50 images.
        PermissionError: the folder may not be read by this user.
    """
    listing = list_images(root)
    drawn = listing.select(draw_per_class(listing))
    relevance = relevance_by_label(drawn.labels, drawn.labels, drawn.paths, drawn.paths)
    return ranking_protocol(drawn, drawn, relevance, _face_figures, drawn.labels)


def _face_figures(ranking: Ranking) -> Figures:
    first = {f"cmc{k}": mean_of_answerable(cmc(ranking, k)) for k in (1, 5)}
    return {**first, "map": mean_of_answerable(average_precision(ranking))}


_NAME = re.compile(r"^(-1|\d{4})_c(\d)s\d_\d{6}_\d{2}\.jpg(\.jpg)?\Z")
_BAD = -1


@dataclass(frozen=True)
class PersonImages:
    """The images of a folder of Market-1501, ordered by name.

    Attributes:
        paths: the files.
        person_ids: the person of each, int64 [n]; 0 is a distractor, -1 a bad detection.
        camera_ids: the camera of each, int64 [n].
    """

    paths: tuple[Path, ...]
    person_ids: NDArray[np.int64]
    camera_ids: NDArray[np.int64]


def read_person_images(folder: Path) -> PersonImages:
    """Read a folder of Market-1501: `query`, `bounding_box_test` or `bounding_box_train`.

    Files with another suffix than .jpg are ignored.

    Raises:
        NotFoundError: the folder does not exist.
        InvalidInputError: it has no images, or one with another name than Market-1501's.
        PermissionError: the folder may not be read by this user.
    """
    if not folder.is_dir():
        raise NotFoundError(
            f"the folder {folder} of Market-1501 does not exist; correct --root, or download the "
            "data set"
        )
    paths = sorted(path for path in folder.iterdir() if path.suffix == ".jpg")
    if not paths:
        raise InvalidInputError(
            f"{folder}: expected images of Market-1501 such as 0002_c1s1_000451_03.jpg, got none; "
            "correct --root"
        )
    persons, cameras = [], []
    for path in paths:
        match = _NAME.match(path.name)
        if match is None:
            raise InvalidInputError(
                f"{path}: expected a file name of Market-1501 such as 0002_c1s1_000451_03.jpg; "
                "remove the file"
            )
        persons.append(int(match[1]))
        cameras.append(int(match[2]))
    return PersonImages(tuple(paths), np.array(persons), np.array(cameras))


def market_relevance(queries: PersonImages, gallery: PersonImages) -> Relevance:
    """Return which gallery images each query of Market-1501 should find.

    These are the images of its person by other cameras.

    Bad detections are ignored, and so are images of the query's person by the query's camera.
    Distractors stay in the gallery as wrong answers. A query without relevant images is allowed.
    For a query of person 0, other distractors would be relevant.

    Returns:
        Relevant and ignored positions in the gallery, one array for each query; it may be empty.
    """
    bad = gallery.person_ids == _BAD
    relevant, ignored = [], []
    for person, camera in zip(queries.person_ids, queries.camera_ids, strict=True):
        same = gallery.person_ids == person
        here = gallery.camera_ids == camera
        relevant.append(np.flatnonzero(same & ~here & ~bad))
        ignored.append(np.flatnonzero(bad | (same & here)))
    return Relevance(relevant, ignored)


def read_market1501_protocol(root: Path, _scratch: Path) -> Protocol:
    """Read Market-1501's protocol: rank-1 and mAP of `query` in `bounding_box_test`.

    Figures are `rank-1` and `map`, shares 0 to 1. The figures raise ValueError for vectors that are
    not finite, or are zero with cosine.

    Args:
        root: the folder of the data set.

    Raises:
        NotFoundError: one of the two folders does not exist.
        InvalidInputError: a folder is empty, or a file has another name than Market-1501's.
        PermissionError: a folder may not be read by this user.
    """
    queries, gallery = (read_person_images(root / part) for part in ("query", "bounding_box_test"))
    query_listing, gallery_listing = (
        list_protocol_images(persons.paths[0].parent, [path.name for path in persons.paths])
        for persons in (queries, gallery)
    )
    relevance = market_relevance(queries, gallery)
    return ranking_protocol(
        query_listing, gallery_listing, relevance, _person_figures, gallery.person_ids
    )


def _person_figures(ranking: Ranking) -> Figures:
    return {
        "rank-1": mean_of_answerable(cmc(ranking, 1)),
        "map": mean_of_answerable(average_precision(ranking)),
    }
