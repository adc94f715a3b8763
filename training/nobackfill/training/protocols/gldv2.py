"""Google Landmarks v2, retrieval: mAP@100 of test queries over the index set.

`retrieval_solution_v2.1.csv` has id, images (index ids, spaces between, or None) and Usage: Public,
Private, or Ignored for queries without an answer. `index.csv` lists the index images by id. The
images lie below `test` and `index`, and there the data set's own script puts both files, too.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nobackfill.errors import InvalidInputError
from nobackfill.metrics.ranking import Ranking, Relevance
from nobackfill.metrics.retrieval import average_precision_at, mean
from nobackfill.training.protocols.files import either, table
from nobackfill.training.protocols.protocol import Figures, Protocol, images, ranked

MAP_AT = 100
SOLUTION = "retrieval_solution_v2.1.csv"


@dataclass(frozen=True)
class Landmarks:
    """Query and index ids in the order of their vectors; relevance by positions in `index`."""

    queries: tuple[str, ...]
    index: tuple[str, ...]
    relevance: Relevance


def read_landmarks(folder: Path, usage: str = "Private") -> Landmarks:
    """The queries of one usage. The papers report the private ones (750), public ones select
    models.

    Raises NotFoundError, InvalidInputError (an answer outside the index, no query of that usage).
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
    """Where the data set keeps an image: below the first three characters of its id."""
    return f"{image_id[0]}/{image_id[1]}/{image_id[2]}/{image_id}.jpg"


def protocol(root: Path, _scratch: Path) -> Protocol:
    """mAP@100 of the private queries."""
    landmarks = read_landmarks(root)
    queries = images(root / "test", [image_path(query) for query in landmarks.queries])
    index = images(root / "index", [image_path(image) for image in landmarks.index])
    return ranked(queries, index, landmarks.relevance, _figures)


def _figures(ranking: Ranking) -> Figures:
    return {f"map_at_{MAP_AT}": mean(average_precision_at(ranking, MAP_AT))}
