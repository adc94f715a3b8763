"""Two models of one hidden truth: items with a part that only the new model sees."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nobackfill.adopt.judgement import Queries
from nobackfill.adopt.pairs import Pairs
from nobackfill.vectors import Vectors, normalise


@dataclass(frozen=True)
class World:
    """Items by both models, and queries that each look like one item: `answers[i]` is its row."""

    old: Vectors
    new: Vectors
    queries_old: Vectors
    queries_new: Vectors
    answers: np.ndarray[tuple[int], np.dtype[np.int64]]

    @property
    def ids(self) -> list[str]:
        return [f"item-{row}" for row in range(len(self.old))]

    @property
    def pairs(self) -> Pairs:
        return Pairs(self.ids, self.old, self.new)

    @property
    def queries(self) -> Queries:
        return Queries(self.queries_old, self.queries_new, self.answers, are_gallery_items=False)


def world(
    items: int = 400, *, seen: int = 12, unseen: int = 12, noise: float = 0.8, seed: int = 0
) -> World:
    """The old model sees `seen` hidden directions, the new one `unseen` more."""
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(items, seen + unseen))
    answers = rng.choice(items, min(items, 200), replace=False)
    asked = hidden[answers] + noise * rng.normal(size=(len(answers), seen + unseen))
    to_old = np.linalg.qr(rng.normal(size=(24, 24)))[0][:seen]
    to_new = np.linalg.qr(rng.normal(size=(seen + unseen + 8, seen + unseen + 8)))[0]

    def old(rows: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> Vectors:
        return normalise((rows[:, :seen] @ to_old).astype(np.float32))

    def new(rows: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> Vectors:
        return normalise((rows @ to_new[: seen + unseen]).astype(np.float32))

    return World(old(hidden), new(hidden), old(asked), new(asked), answers.astype(np.int64))


def kinds(items: int, asked: int, *, noise: float = 1.0, seed: int = 0) -> World:
    """Items of 30 kinds, each of which either model holds together in its own measure; a query is
    one view for the old model and another one for the new."""
    rng = np.random.default_rng(seed)
    dims, number = 24, 30
    own, middles = rng.normal(size=(items, dims)), rng.normal(size=(number, dims))
    kind = rng.integers(number, size=items)
    answers = rng.permutation(items)[:asked].astype(np.int64)

    def model() -> tuple[Vectors, Vectors]:
        held = np.exp(rng.normal(size=number))[kind][:, None] * middles[kind]
        seen = own + 0.5 * rng.normal(size=own.shape) + held
        turn = np.linalg.qr(rng.normal(size=(dims, dims)))[0]
        views = seen[answers] + noise * rng.normal(size=(asked, dims))
        bodies, queries = ((x @ turn).astype(np.float32) for x in (seen, views))
        return normalise(bodies), normalise(queries)

    (old, by_old), (new, by_new) = model(), model()
    return World(old, new, by_old, by_new, answers)


def write_parquet(path: Path, ids: list[str], vectors: Vectors, groups: int = 100) -> Path:
    """A file as others write it: variable lists, some rows a group."""
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = [f"on {name}" for name in ids]
    table = pa.table({"id": ids, "vector": pa.array(list(vectors)), "text": texts})
    pq.write_table(table, path, row_group_size=groups)
    return path
