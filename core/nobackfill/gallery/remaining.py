"""What an upgrade still has to do: which items its target lacks, and what it reads of them."""

from collections.abc import Iterator
from itertools import compress

import numpy as np

from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.spec import SpaceSpec, side_passes
from nobackfill.gallery.store import Store
from nobackfill.gallery.tables import among, from_blobs, label_column, vector_table
from nobackfill.gallery.upgrade import Order
from nobackfill.vectors import Vectors


class Remaining:
    """Reads from a source space what a target still lacks."""

    def __init__(self, store: Store, source: str, target: SpaceSpec, needs_side: bool) -> None:
        """Items without side-information are passed over where the runner `needs_side`; otherwise
        they come after those that have some, which goes along for a runner that carries it.

        Raises IncompatibleSpaceError for an unknown source.
        """
        self.store = store
        self.source = store.space(source)
        spaces = {info.spec.space: info for info in store.spaces()}
        self.target = spaces.get(target.space)
        self._passes = side_passes(self.source.spec, target, needs_side=needs_side)

    def chunks(self, order: Order, size: int) -> Iterator[tuple[Labels, Vectors, Vectors | None]]:
        """Labels, embeddings and side-information (of all of them or of none), `size` items each.

        Until nothing is left: what is put meanwhile has larger labels and comes at the end.
        """
        last = dict.fromkeys(self._passes, 0)
        found = True
        while found:
            found = False
            for with_side in self._passes:
                todo = self.labels(order, with_side, last[with_side])
                if len(todo):
                    found = True
                    last[with_side] = int(todo.max())
                for start in range(0, len(todo), size):
                    chunk = self.read(todo[start : start + size], bool(with_side))
                    if len(chunk[0]):
                        yield chunk

    def all_labels(self) -> Labels:
        """Every label that `chunks` would come to, if nothing changed."""
        return np.concatenate([self.labels("label", with_side) for with_side in self._passes])

    def labels(self, order: Order, with_side: bool | None, after: int = 0) -> Labels:
        """Labels above `after` that the target lacks, with or without side-information (None: no
        matter), in the order of work."""
        by = {"label": "s.label", "uncertainty": "s.uncertainty DESC, s.label"}[order]
        where = {None: "TRUE", True: "s.side IS NOT NULL", False: "s.side IS NULL"}[with_side]
        if self.target is not None:
            there = vector_table(self.target.number)
            where += f" AND NOT EXISTS (SELECT 1 FROM {there} t WHERE t.label = s.label)"
        with self.store.reading() as connection:
            rows = connection.execute(
                f"SELECT s.label FROM {vector_table(self.source.number)} s"
                f" WHERE s.label > ? AND {where} ORDER BY {by}",
                (after,),
            )
            return label_column(rows)

    def read(self, labels: Labels, with_side: bool) -> tuple[Labels, Vectors, Vectors | None]:
        """Those of `labels` that are still there, by label."""
        condition, parameters = among(labels)
        with self.store.reading() as connection:
            rows = connection.execute(
                f"SELECT label, embedding, {'side' if with_side else 'NULL'}"
                f" FROM {vector_table(self.source.number)} WHERE {condition} ORDER BY label",
                parameters,
            ).fetchall()
        spec = self.source.spec
        if not rows:
            return np.empty(0, np.int64), np.empty((0, spec.dim), np.float32), None
        columns = zip(*rows, strict=True)
        found = np.array(next(columns), np.int64)
        # A range can hold others than those that were asked for.
        asked = np.isin(found, labels)
        embedding, side = ([*compress(column, asked)] for column in columns)
        sides = from_blobs(side, spec.side_dim) if with_side else None
        return found[asked], from_blobs(embedding, spec.dim), sides
