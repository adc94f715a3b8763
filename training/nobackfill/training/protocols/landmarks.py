"""Landmark retrieval: Google Landmarks v2, and the revisited Oxford and Paris.

Google Landmarks v2: mAP@100 of test queries over the index set. `retrieval_solution_v2.1.csv` has
the columns id, images (index ids separated by spaces, or None) and Usage: Public, Private, or
Ignored for queries without an answer. `index.csv` lists the index images by id. The images lie
below `test` and `index`, where the data set's own script also puts both files.

Revisited Oxford and Paris (Radenovic et al. 2018): easy, medium and hard, without junk images.
`gnd_roxford5k.pkl`, `gnd_rparis6k.pkl`: {"imlist", "qimlist", "gnd": [{"bbx", "easy", "hard",
"junk"}]}, the last three as positions in imlist. The images lie in `jpg`, or in folders below it.
"""

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy._core import multiarray, numeric
from PIL import Image

from nobackfill.errors import InvalidInputError, NotFoundError
from nobackfill.images import check_header, read_file
from nobackfill.metrics.distances import Metric
from nobackfill.metrics.ranking import Ints, Ranking, Relevance, rank
from nobackfill.metrics.retrieval import PerQuery, average_precision_at, mean_of_answerable
from nobackfill.training.protocols.protocol import (
    Figures,
    Protocol,
    check_answerable,
    first_existing_file,
    list_protocol_images,
    ranking_protocol,
    read_table,
    unreadable_file_error,
)
from nobackfill.vectors import Vectors

MAP_AT = 100
SOLUTION = "retrieval_solution_v2.1.csv"


@dataclass(frozen=True)
class Landmarks:
    """The queries of one usage of Google Landmarks v2.

    Attributes:
        query_ids: image ids, in the order of their vectors.
        gallery_ids: image ids of the gallery, in the order of their vectors.
        relevance: positions in `gallery_ids` that each query should find; may be none.
    """

    query_ids: tuple[str, ...]
    gallery_ids: tuple[str, ...]
    relevance: Relevance


def read_landmarks(folder: Path, usage: str = "Private") -> Landmarks:
    """Read the queries of one usage of Google Landmarks v2, and its index.

    Papers report Private (750 queries); Public selects models. Files at the top of the folder count
    before those below. The order of the queries is that of the file. No image is looked for. If the
    index lists an id twice, its last place counts.

    Args:
        folder: the data set's folder, with both CSV files in it, or in `index` and `test`.
        usage: Private or Public.

    Raises:
        NotFoundError: a file is missing.
        InvalidInputError: a file is no UTF-8 text or cannot be read, a column is missing, or a row
            is too short; or an answer is not in the index, or there is no query of this usage.
    """
    listed = first_existing_file(folder / "index.csv", folder / "index" / "index.csv")
    index = tuple(row["id"] for row in read_table(listed, ("id",)))
    position = {image: place for place, image in enumerate(index)}
    path = first_existing_file(folder / SOLUTION, folder / "test" / SOLUTION)
    queries, relevant = [], []
    for row in read_table(path, ("id", "images", "Usage")):
        if row["Usage"] != usage:
            continue
        answers = row["images"].split()
        unknown = [image for image in answers if image not in position]
        if unknown:
            raise InvalidInputError(
                f"{path}: query {row['id']} has the answer {unknown[0]}, which {listed} does not "
                "list; download both files of the same version again"
            )
        queries.append(row["id"])
        relevant.append(np.array([position[image] for image in answers], np.int64))
    if not queries:
        raise InvalidInputError(
            f"{path}: the file has no query of usage {usage!r}; expected Public or Private"
        )
    nothing = np.empty(0, np.int64)
    return Landmarks(tuple(queries), index, Relevance(relevant, [nothing] * len(queries)))


def image_path(image_id: str) -> str:
    """Return the path of an image in the data set: below the first three characters of its id.

    The id "0a1b" gives "0/a/1/0a1b.jpg".

    Raises:
        InvalidInputError: the id has fewer than three characters.
    """
    if len(image_id) < 3:
        raise InvalidInputError(
            "image id of Google Landmarks v2: expected at least three characters, which name its "
            f"folders, got {image_id!r}; download index.csv and {SOLUTION} again"
        )
    return f"{image_id[0]}/{image_id[1]}/{image_id[2]}/{image_id}.jpg"


def read_gldv2_protocol(root: Path, _scratch: Path) -> Protocol:
    """Read Google Landmarks v2's protocol: mAP@100 of the private queries over the index.

    The figure is `map_at_100`, a share 0 to 1.

    Args:
        root: the data set's folder.

    Raises:
        NotFoundError: a file or image is missing.
        InvalidInputError: a file is no UTF-8 text, cannot be read or has another form, an answer is
            not in the index, an id has fewer than three characters, or no query has an answer.
    """
    landmarks = read_landmarks(root)
    queries = list_protocol_images(
        root / "test", [image_path(query) for query in landmarks.query_ids]
    )
    index = list_protocol_images(
        root / "index", [image_path(image) for image in landmarks.gallery_ids]
    )
    return ranking_protocol(queries, index, landmarks.relevance, _figures)


def _figures(ranking: Ranking) -> Figures:
    return {f"map_at_{MAP_AT}": mean_of_answerable(average_precision_at(ranking, MAP_AT))}


# The ground truth of the revisited Oxford and Paris is a pickle. `read_plain` accepts only plain
# containers, numbers, strings and numpy arrays, and refuses every other name before resolving it.


def _latin1(text: str, encoding: str) -> bytes:
    """Stand in for _codecs.encode, by which Python 3 writes bytes into an old pickle protocol."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(
            f"it encodes bytes as {encoding}, expected latin1 as in plain data"
        )
    return text.encode("latin1")


def _no_bytes() -> bytes:
    """Stand in for bytes(), by which Python 3 writes empty bytes; a number could be huge."""
    return b""


# numpy 2 renamed its core, so files contain both names.
_ALLOWED: Mapping[tuple[str, str], object] = {
    (module, name): value
    for prefix in ("numpy.core", "numpy._core")
    for (module, name), value in {
        (f"{prefix}.multiarray", "_reconstruct"): multiarray._reconstruct,
        (f"{prefix}.multiarray", "scalar"): multiarray.scalar,
        (f"{prefix}.numeric", "_frombuffer"): numeric.__dict__["_frombuffer"],
    }.items()
} | {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _latin1,
    ("builtins", "bytes"): _no_bytes,
    ("__builtin__", "bytes"): _no_bytes,
}


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(
                f"it needs {module}.{name}, which is not plain data and is not loaded"
            )
        return _ALLOWED[module, name]


def read_plain_pickle(path: Path) -> Any:
    """Read a pickle that contains only lists, dicts, numbers, strings and numpy arrays.

    It runs no other code that the file names. Texts of Python 2 are read as latin-1. Only the first
    object of the file is read.

    Raises:
        NotFoundError: the file does not exist.
        InvalidInputError: it is no pickle, names anything else, or cannot be read.
    """
    try:
        with path.open("rb") as file:
            # Files of Python 2 contain bytes instead of text.
            return _Plain(file, encoding="latin1").load()
    except FileNotFoundError as error:
        raise NotFoundError(
            f"no protocol file {path}; download the data set's ground truth to this place"
        ) from error
    except OSError as error:
        raise unreadable_file_error(path, error) from error
    except (
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
        OverflowError,
    ) as error:
        raise InvalidInputError(
            f"{path}: expected a ground truth as a pickle of plain data ({error}); download it "
            "again"
        ) from error


Difficulty = Literal["easy", "medium", "hard"]
# Depth of mP@k.
PRECISION_AT = 10
# By difficulty: the kinds that are relevant, and those that are removed from the ranking.
_SETUPS: Mapping[Difficulty, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "easy": (("easy",), ("junk", "hard")),
    "medium": (("easy", "hard"), ("junk",)),
    "hard": (("hard",), ("junk", "easy")),
}


@dataclass(frozen=True)
class RevisitedBuildings:
    """The revisited Oxford or Paris at one difficulty.

    Attributes:
        query_names: image names without suffix, in the order of their vectors.
        query_boxes: the part of each query image that is embedded, (x0, y0, x1, y1) in pixels.
        gallery_names: image names without suffix, in the order of their vectors.
        relevance: positions in `gallery_names` that each query should find, and those to ignore.
    """

    query_names: tuple[str, ...]
    query_boxes: tuple[tuple[float, float, float, float], ...]
    gallery_names: tuple[str, ...]
    relevance: Relevance


def read_revisited(path: Path, difficulty: Difficulty) -> RevisitedBuildings:
    """Read a ground truth file of the revisited Oxford or Paris.

    No image is looked for. Queries may have no relevant image.

    Args:
        path: gnd_roxford5k.pkl or gnd_rparis6k.pkl.
        difficulty: easy, medium or hard; DMU reports medium.

    Raises:
        NotFoundError: the file does not exist.
        InvalidInputError: the difficulty is unknown, the file is no pickle of plain data, cannot be
            read or has another form, or a position is outside the gallery.
    """
    if difficulty not in _SETUPS:
        raise InvalidInputError(
            f"difficulty of a landmark protocol: expected easy, medium or hard, got {difficulty!r}"
        )
    data = read_plain_pickle(path)
    try:
        gallery, queries = tuple(map(str, data["imlist"])), tuple(map(str, data["qimlist"]))
        truths = list(data["gnd"])
        boxes = tuple(_box(truth["bbx"]) for truth in truths)
        positive, ignored = _SETUPS[difficulty]
        relevance = Relevance(
            [_positions(path, truth, positive, len(gallery)) for truth in truths],
            [_positions(path, truth, ignored, len(gallery)) for truth in truths],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInputError(
            f"{path}: expected a ground truth with imlist, qimlist, and gnd with bbx, easy, hard "
            f"and junk of each query, found a missing or wrong part ({error}); download the file "
            "again"
        ) from error
    if len(queries) != len(truths):
        raise InvalidInputError(
            f"{path}: expected one ground truth for each query, got {len(queries)} queries and "
            f"{len(truths)} ground truths; download it again"
        )
    return RevisitedBuildings(queries, boxes, gallery, relevance)


def trapezoid_average_precision(ranking: Ranking) -> PerQuery:
    """Return average precision as in this benchmark's published code, per query [q].

    It is the area under the precision-recall points by trapezia, slightly above
    `nobackfill.metrics.retrieval.average_precision`. NaN for a query without relevant images. The
    order is that of the queries. Relevant images that the ranking lacks count as not found.
    """
    values = []
    for ranks, relevant in zip(ranking.ranks, ranking.relevant_counts, strict=True):
        if not relevant:
            values.append(np.nan)
            continue
        count = np.arange(1, len(ranks) + 1)
        after = count / ranks
        before = np.where(ranks == 1, 1.0, (count - 1) / np.maximum(ranks - 1, 1))
        values.append(float((after + before).sum() / (2 * relevant)))
    return np.array(values)


def precision_at(ranking: Ranking, k: int) -> PerQuery:
    """Return the share of relevant images among the first k (mP@k), per query [q].

    If the last relevant image comes earlier, only the images up to it count. NaN for a query
    without relevant images, or with none in the ranking. k is at least 1. The order is that of the
    queries.
    """
    values = []
    for ranks in ranking.ranks:
        if not len(ranks):
            values.append(np.nan)
            continue
        depth = min(int(ranks[-1]), k)
        values.append(float((ranks <= depth).sum()) / depth)
    return np.array(values)


def read_oxford_protocol(root: Path, scratch: Path) -> Protocol:
    """Read the protocol of mAP and mP@10 on the revisited Oxford, for each difficulty.

    Figures are `map_` and `mp_at_10_` with easy, medium and hard, shares 0 to 1. Query images are
    cut when this is called; the gallery's are not opened.

    Args:
        root: the data set's folder.
        scratch: an existing empty folder, to which the boxes of the query images are written.

    Raises:
        NotFoundError: the ground truth or an image is missing.
        InvalidInputError: the ground truth cannot be read or has another form, no query has an
            answer, or a query image cannot be cut, or its cut cannot be written to `scratch`.
    """
    return _protocol(root, "gnd_roxford5k.pkl", scratch)


def read_paris_protocol(root: Path, scratch: Path) -> Protocol:
    """Read the protocol of mAP and mP@10 on the revisited Paris, for each difficulty.

    Figures are `map_` and `mp_at_10_` with easy, medium and hard, shares 0 to 1. Query images are
    cut when this is called; the gallery's are not opened. Images may lie in folders below `jpg`.

    Args:
        root: the data set's folder.
        scratch: an existing empty folder, to which the boxes of the query images are written.

    Raises:
        NotFoundError: the ground truth or an image is missing.
        InvalidInputError: the ground truth cannot be read or has another form, no query has an
            answer, or a query image cannot be cut, or its cut cannot be written to `scratch`.
    """
    return _protocol(root, "gnd_rparis6k.pkl", scratch)


def _protocol(root: Path, truth: str, scratch: Path) -> Protocol:
    setups = {difficulty: read_revisited(root / truth, difficulty) for difficulty in _SETUPS}
    for setup in setups.values():
        check_answerable(setup.relevance, root / truth)
    medium = setups["medium"]
    queries = list_protocol_images(root / "jpg", _paths(root / "jpg", medium.query_names))
    for number, (path, box) in enumerate(zip(queries.paths, medium.query_boxes, strict=True)):
        _write_cut(queries.root / path, box, scratch / f"{number}.png")
    cut = list_protocol_images(scratch, [f"{number}.png" for number in range(len(queries))])
    gallery = list_protocol_images(root / "jpg", _paths(root / "jpg", medium.gallery_names))

    def figures(query_vectors: Vectors, gallery_vectors: Vectors, metric: Metric) -> Figures:
        shares = {}
        for difficulty, setup in setups.items():
            ranking = rank(query_vectors, gallery_vectors, setup.relevance, metric)
            shares[f"map_{difficulty}"] = mean_of_answerable(trapezoid_average_precision(ranking))
            shares[f"mp_at_{PRECISION_AT}_{difficulty}"] = mean_of_answerable(
                precision_at(ranking, PRECISION_AT)
            )
        return shares

    return Protocol(cut, gallery, figures)


def _paths(folder: Path, names: Sequence[str]) -> list[str]:
    """Return the paths of images by name; Paris comes in folders, which users may flatten."""
    flat = [f"{name}.jpg" for name in names]
    if all((folder / path).is_file() for path in flat):
        return flat
    nested = {path.name: path.relative_to(folder).as_posix() for path in folder.rglob("*.jpg")}
    return [nested.get(path, path) for path in flat]


def _write_cut(image: Path, box: tuple[float, float, float, float], to: Path) -> None:
    """Write the box of an image, at its own resolution and without loss."""
    try:
        header = check_header(read_file(image))
        with Image.open(io.BytesIO(header.picture_bytes), formats=(header.format,)) as whole:
            left, top, right, bottom = map(round, box)
            whole.convert("RGB").crop((left, top, right, bottom)).save(to)
    except (InvalidInputError, OSError, ValueError) as error:
        raise InvalidInputError(
            f"the query image {image} cannot be cut to its box {box} ({error}); download the image "
            "again"
        ) from error


def _positions(path: Path, truth: Mapping[str, object], kinds: tuple[str, ...], size: int) -> Ints:
    parts = [np.asarray(truth[kind], np.int64).reshape(-1) for kind in kinds]
    positions = np.unique(np.concatenate(parts))
    if len(positions) and not 0 <= positions[0] <= positions[-1] < size:
        raise InvalidInputError(
            f"{path}: a ground truth names the gallery image {positions[-1]}, but there are only "
            f"{size}; download the file again"
        )
    return positions


def _box(values: object) -> tuple[float, float, float, float]:
    x0, y0, x1, y1 = (float(value) for value in np.asarray(values, np.float64).reshape(-1))
    return x0, y0, x1, y1
