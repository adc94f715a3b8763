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
from nobackfill.metrics.retrieval import PerQuery, average_precision_at, mean
from nobackfill.training.protocols.protocol import Figures, Protocol, either, images, ranked, table
from nobackfill.vectors import Vectors

MAP_AT = 100
SOLUTION = "retrieval_solution_v2.1.csv"


@dataclass(frozen=True)
class Landmarks:
    """Query and index ids in the order of their vectors; relevance by positions in `index`."""

    queries: tuple[str, ...]
    index: tuple[str, ...]
    relevance: Relevance


def read_landmarks(folder: Path, usage: str = "Private") -> Landmarks:
    """Read the queries of one usage. Papers report Private (750 queries); Public selects models.

    Raises:
        NotFoundError: a file is missing.
        InvalidInputError: an answer is not in the index, or there is no query of this usage.
    """
    listed = either(folder / "index.csv", folder / "index" / "index.csv")
    index = tuple(row["id"] for row in table(listed, ("id",)))
    position = {image: place for place, image in enumerate(index)}
    path = either(folder / SOLUTION, folder / "test" / SOLUTION)
    queries, relevant = [], []
    for row in table(path, ("id", "images", "Usage")):
        if row["Usage"] != usage:
            continue
        answers = row["images"].split()
        unknown = [image for image in answers if image not in position]
        if unknown:
            raise InvalidInputError(
                f"{path}: image {unknown[0]} of query {row['id']} is not in index.csv"
            )
        queries.append(row["id"])
        relevant.append(np.array([position[image] for image in answers], np.int64))
    if not queries:
        raise InvalidInputError(f"{path}: no query of usage {usage!r}; known: Public, Private")
    nothing = np.empty(0, np.int64)
    return Landmarks(tuple(queries), index, Relevance(relevant, [nothing] * len(queries)))


def image_path(image_id: str) -> str:
    """Return the path of an image in the data set: below the first three characters of its id."""
    return f"{image_id[0]}/{image_id[1]}/{image_id[2]}/{image_id}.jpg"


def gldv2(root: Path, _scratch: Path) -> Protocol:
    """Read the protocol of mAP@100 over the private queries."""
    landmarks = read_landmarks(root)
    queries = images(root / "test", [image_path(query) for query in landmarks.queries])
    index = images(root / "index", [image_path(image) for image in landmarks.index])
    return ranked(queries, index, landmarks.relevance, _figures)


def _figures(ranking: Ranking) -> Figures:
    return {f"map_at_{MAP_AT}": mean(average_precision_at(ranking, MAP_AT))}


# The ground truth of the revisited Oxford and Paris is a pickle. `read_plain` accepts only plain
# containers, numbers, strings and numpy arrays, and refuses every other name before resolving it.


def _latin1(text: str, encoding: str) -> bytes:
    """Stand in for _codecs.encode, by which Python 3 writes bytes into an old pickle protocol."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"the codec {encoding} is not plain data")
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
            raise pickle.UnpicklingError(f"the name {module}.{name} is not plain data")
        return _ALLOWED[module, name]


def read_plain(path: Path) -> Any:
    """Read the plain data in a pickle. Raises NotFoundError, or InvalidInputError for other
    content."""
    try:
        with path.open("rb") as file:
            # Files of Python 2 contain bytes instead of text.
            return _Plain(file, encoding="latin1").load()
    except FileNotFoundError as error:
        raise NotFoundError(f"no protocol file {path}") from error
    except (pickle.UnpicklingError, EOFError, ValueError, KeyError, IndexError, TypeError) as error:
        raise InvalidInputError(f"{path}: expected a pickle of plain data: {error}") from error


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
class Revisited:
    """Image names in vector order; queries are cropped to `boxes` (x0, y0, x1, y1)."""

    queries: tuple[str, ...]
    boxes: tuple[tuple[float, float, float, float], ...]
    gallery: tuple[str, ...]
    relevance: Relevance


def read_revisited(path: Path, difficulty: Difficulty) -> Revisited:
    """Read a ground truth file; DMU reports medium. Raises NotFoundError and InvalidInputError."""
    if difficulty not in _SETUPS:
        raise InvalidInputError(f"expected easy, medium or hard, got {difficulty!r}")
    data = read_plain(path)
    try:
        gallery, queries = tuple(map(str, data["imlist"])), tuple(map(str, data["qimlist"]))
        truths = list(data["gnd"])
        boxes = tuple(_box(truth["bbx"]) for truth in truths)
        positive, ignored = _SETUPS[difficulty]
        relevance = Relevance(
            [_positions(truth, positive, len(gallery)) for truth in truths],
            [_positions(truth, ignored, len(gallery)) for truth in truths],
        )
    except (KeyError, TypeError) as error:
        raise InvalidInputError(
            f"{path}: expected imlist, qimlist and gnd with bbx, easy, hard, junk ({error!r})"
        ) from error
    if len(queries) != len(truths):
        raise InvalidInputError(f"{path}: {len(queries)} queries, {len(truths)} ground truths")
    return Revisited(queries, boxes, gallery, relevance)


def trapezoid_average_precision(ranking: Ranking) -> PerQuery:
    """Return average precision as in this benchmark's published code, per query [q].

    It is the area under the precision-recall points by trapezia, slightly above
    `nobackfill.metrics.retrieval.average_precision`. NaN for a query without relevant images.
    """
    values = []
    for ranks, relevant in zip(ranking.ranks, ranking.relevant, strict=True):
        if not relevant:
            values.append(np.nan)
            continue
        found = np.arange(1, len(ranks) + 1)
        after = found / ranks
        before = np.where(ranks == 1, 1.0, (found - 1) / np.maximum(ranks - 1, 1))
        values.append(float((after + before).sum() / (2 * relevant)))
    return np.array(values)


def precision_at(ranking: Ranking, k: int) -> PerQuery:
    """Return the share of relevant images among the first k (mP@k), per query [q].

    If the last relevant image comes earlier, only the images up to it count."""
    values = []
    for ranks in ranking.ranks:
        if not len(ranks):
            values.append(np.nan)
            continue
        depth = min(int(ranks[-1]), k)
        values.append(float((ranks <= depth).sum()) / depth)
    return np.array(values)


def oxford(root: Path, scratch: Path) -> Protocol:
    """Read the protocol of mAP and mP@10 on the revisited Oxford, for each difficulty."""
    return _protocol(root, "gnd_roxford5k.pkl", scratch)


def paris(root: Path, scratch: Path) -> Protocol:
    """Read the protocol of mAP and mP@10 on the revisited Paris, for each difficulty."""
    return _protocol(root, "gnd_rparis6k.pkl", scratch)


def _protocol(root: Path, truth: str, scratch: Path) -> Protocol:
    setups = {difficulty: read_revisited(root / truth, difficulty) for difficulty in _SETUPS}
    read = setups["medium"]
    asked = images(root / "jpg", _paths(root / "jpg", read.queries))
    for number, (path, box) in enumerate(zip(asked.paths, read.boxes, strict=True)):
        _write_cut(asked.root / path, box, scratch / f"{number}.png")
    cut = images(scratch, [f"{number}.png" for number in range(len(asked))])
    gallery = images(root / "jpg", _paths(root / "jpg", read.gallery))

    def figures(queries: Vectors, gallery_vectors: Vectors, metric: Metric) -> Figures:
        found = {}
        for difficulty, setup in setups.items():
            ranking = rank(queries, gallery_vectors, setup.relevance, metric)
            found[f"map_{difficulty}"] = mean(trapezoid_average_precision(ranking))
            found[f"mp_at_{PRECISION_AT}_{difficulty}"] = mean(precision_at(ranking, PRECISION_AT))
        return found

    return Protocol(cut, gallery, figures)


def _paths(folder: Path, names: Sequence[str]) -> list[str]:
    """Return the paths of images by name; Paris comes in folders, which users may flatten."""
    flat = [f"{name}.jpg" for name in names]
    if all((folder / path).is_file() for path in flat):
        return flat
    found = {path.name: path.relative_to(folder).as_posix() for path in folder.rglob("*.jpg")}
    return [found.get(path, path) for path in flat]


def _write_cut(image: Path, box: tuple[float, float, float, float], to: Path) -> None:
    """Write the box of an image, at its own resolution and without loss."""
    try:
        header = check_header(read_file(image))
        with Image.open(io.BytesIO(header.picture), formats=(header.format,)) as whole:
            left, top, right, bottom = map(round, box)
            whole.convert("RGB").crop((left, top, right, bottom)).save(to)
    except (InvalidInputError, OSError, ValueError) as error:
        raise InvalidInputError(f"{image}: cannot be cut to {box}: {error}") from error


def _positions(truth: Mapping[str, object], kinds: tuple[str, ...], size: int) -> Ints:
    parts = [np.asarray(truth[kind], np.int64).reshape(-1) for kind in kinds]
    positions = np.unique(np.concatenate(parts))
    if len(positions) and not 0 <= positions[0] <= positions[-1] < size:
        raise InvalidInputError(f"a ground truth names image {positions[-1]} of {size}")
    return positions


def _box(values: object) -> tuple[float, float, float, float]:
    x0, y0, x1, y1 = (float(value) for value in np.asarray(values, np.float64).reshape(-1))
    return x0, y0, x1, y1
