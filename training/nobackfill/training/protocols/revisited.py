"""Revisited Oxford and Paris (Radenovic et al. 2018): easy, medium and hard, with junk left out.

`gnd_roxford5k.pkl`, `gnd_rparis6k.pkl`: {"imlist", "qimlist", "gnd": [{"bbx", "easy", "hard",
"junk"}]}, the last three as positions in imlist. The images lie in `jpg`, or in folders in there.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from nobackfill.errors import InvalidInputError
from nobackfill.images import checked_header, read_file
from nobackfill.metrics.distances import Metric
from nobackfill.metrics.ranking import Ints, Ranking, Relevance, rank
from nobackfill.metrics.retrieval import PerQuery, mean
from nobackfill.training.protocols.pickles import read_plain
from nobackfill.training.protocols.protocol import Figures, Protocol, images
from nobackfill.vectors import Vectors

Difficulty = Literal["easy", "medium", "hard"]
# Answers that mP@k looks at.
PRECISION_AT = 10
# What counts as an answer, and what is taken out of the ranking.
_SETUPS: Mapping[Difficulty, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "easy": (("easy",), ("junk", "hard")),
    "medium": (("easy", "hard"), ("junk",)),
    "hard": (("hard",), ("junk", "easy")),
}


@dataclass(frozen=True)
class Revisited:
    """Image names in the order of their vectors; queries are cut to `boxes` (x0, y0, x1, y1)."""

    queries: tuple[str, ...]
    boxes: tuple[tuple[float, float, float, float], ...]
    gallery: tuple[str, ...]
    relevance: Relevance


def read_revisited(path: Path, difficulty: Difficulty) -> Revisited:
    """The DMU paper reports medium. Raises NotFoundError, InvalidInputError."""
    if difficulty not in _SETUPS:
        raise InvalidInputError(f"expected easy, medium or hard, got {difficulty!r}")
    data = read_plain(path)
    try:
        gallery, queries = tuple(map(str, data["imlist"])), tuple(map(str, data["qimlist"]))
        truths = list(data["gnd"])
        boxes = tuple(_box(truth["bbx"]) for truth in truths)
        positive, ignored = _SETUPS[difficulty]
        relevance = Relevance(
            [_joined(truth, positive, len(gallery)) for truth in truths],
            [_joined(truth, ignored, len(gallery)) for truth in truths],
        )
    except (KeyError, TypeError) as error:
        raise InvalidInputError(
            f"{path}: expected imlist, qimlist and gnd with bbx, easy, hard, junk ({error!r})"
        ) from error
    if len(queries) != len(truths):
        raise InvalidInputError(f"{path}: {len(queries)} queries, {len(truths)} ground truths")
    return Revisited(queries, boxes, gallery, relevance)


def trapezoid_average_precision(ranking: Ranking) -> PerQuery:
    """Average precision as this benchmark's published code has it: the area under the
    precision-recall points by trapezia, which lies a little above
    `nobackfill.metrics.retrieval.average_precision`.
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
    """mP@k: of the first k answers (or up to the last relevant one, if that comes earlier) the
    share that is relevant.
    """
    values = []
    for ranks in ranking.ranks:
        if not len(ranks):
            values.append(np.nan)
            continue
        depth = min(int(ranks[-1]), k)
        values.append(float((ranks <= depth).sum()) / depth)
    return np.array(values)


def oxford(root: Path, scratch: Path) -> Protocol:
    """mAP and mP@10 of the revisited Oxford, each difficulty."""
    return _protocol(root, "gnd_roxford5k.pkl", scratch)


def paris(root: Path, scratch: Path) -> Protocol:
    """mAP and mP@10 of the revisited Paris, each difficulty."""
    return _protocol(root, "gnd_rparis6k.pkl", scratch)


def _protocol(root: Path, truth: str, scratch: Path) -> Protocol:
    setups = {difficulty: read_revisited(root / truth, difficulty) for difficulty in _SETUPS}
    read = setups["medium"]
    asked = images(root / "jpg", _paths(root / "jpg", read.queries))
    for number, (path, box) in enumerate(zip(asked.paths, read.boxes, strict=True)):
        _write_cut(asked.root / path, box, scratch / f"{number}.png")
    cut = images(scratch, [f"{number}.png" for number in range(len(asked))])
    gallery = images(root / "jpg", _paths(root / "jpg", read.gallery))

    def figures(queries: Vectors, stored: Vectors, metric: Metric) -> Figures:
        found = {}
        for difficulty, setup in setups.items():
            ranking = rank(queries, stored, setup.relevance, metric)
            found[f"map_{difficulty}"] = mean(trapezoid_average_precision(ranking))
            found[f"mp_at_{PRECISION_AT}_{difficulty}"] = mean(precision_at(ranking, PRECISION_AT))
        return found

    return Protocol(cut, gallery, figures)


def _paths(folder: Path, names: Sequence[str]) -> list[str]:
    """Where the images of these names are: Paris comes in folders, which its users leave or not."""
    flat = [f"{name}.jpg" for name in names]
    if all((folder / path).is_file() for path in flat):
        return flat
    found = {path.name: path.relative_to(folder).as_posix() for path in folder.rglob("*.jpg")}
    return [found.get(path, path) for path in flat]


def _write_cut(image: Path, box: tuple[float, float, float, float], to: Path) -> None:
    """The box of an image, at its own resolution, without loss."""
    try:
        header = checked_header(read_file(image))
        with Image.open(io.BytesIO(header.picture), formats=(header.format,)) as whole:
            left, top, right, bottom = map(round, box)
            whole.convert("RGB").crop((left, top, right, bottom)).save(to)
    except (InvalidInputError, OSError, ValueError) as error:
        raise InvalidInputError(f"{image}: cannot be cut to {box}: {error}") from error


def _joined(truth: Mapping[str, object], kinds: tuple[str, ...], size: int) -> Ints:
    parts = [np.asarray(truth[kind], np.int64).reshape(-1) for kind in kinds]
    positions = np.unique(np.concatenate(parts))
    if len(positions) and not 0 <= positions[0] <= positions[-1] < size:
        raise InvalidInputError(f"a ground truth names image {positions[-1]} of {size}")
    return positions


def _box(values: object) -> tuple[float, float, float, float]:
    x0, y0, x1, y1 = (float(value) for value in np.asarray(values, np.float64).reshape(-1))
    return x0, y0, x1, y1
