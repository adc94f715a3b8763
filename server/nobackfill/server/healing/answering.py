"""Answers of a gallery that heals: candidates embedded again, then ranked by what there is."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from nobackfill.errors import InvalidInputError
from nobackfill.gallery.matches import Matches
from nobackfill.gallery.search import distances
from nobackfill.gallery.search.index import Neighbours
from nobackfill.gallery.spec import space_of
from nobackfill.gallery.stored_vectors import Item, StoredVectors
from nobackfill.server.galleries.asked import Found
from nobackfill.server.galleries.queries import Question, run
from nobackfill.server.galleries.ranking import rank
from nobackfill.server.grpc import context
from nobackfill.server.healing.healer import Healer

# Labels of a query's candidates, with their distances.
Candidates = Mapping[int, float]

# Candidates that are asked for and read at once, those of one question in any case: a batch may
# have half a million.
_AT_ONCE = 4096


def candidates(
    healer: Healer, questions: Sequence[Question], allowed: Matches | None
) -> list[Candidates | InvalidInputError]:
    """The nearest of each question, and the nearest of those that are native: by distance alone
    carried ones can be before them that are no nearer in truth (docs/adr/0017). Raises
    DeadlineError, CancelledError."""
    hits = healer.source.hits
    wide = [replace(question, k=max(question.k, hits)) for question in questions]
    found: list[Candidates | InvalidInputError] = []
    native = healer.ledger.native(allowed)
    for question, answer in zip(wide, run(wide, allowed), strict=True):
        if isinstance(answer, InvalidInputError):
            found.append(answer)
            continue
        near = _by_label(answer[0][0], answer[1])
        if native is not None:
            context.current().check()
            alone = question.hosted.search(
                question.parts, question.vectors, question.k, native, question.ef
            )
            near |= _by_label(alone[0], 0)
        found.append(near)
    return found


def groups(near: Sequence[Candidates | InvalidInputError]) -> Iterator[slice]:
    """Questions that are answered together, by what their candidates take."""
    first, many = 0, 0
    for number, one in enumerate(near):
        count = 0 if isinstance(one, InvalidInputError) else len(one)
        if number > first and many + count > _AT_ONCE:
            yield slice(first, number)
            first, many = number, 0
        many += count
    yield slice(first, len(near))


def _by_label(neighbours: Neighbours, row: int) -> dict[int, float]:
    pairs = zip(neighbours.labels[row].tolist(), neighbours.distances[row].tolist(), strict=True)
    return {label: distance for label, distance in pairs if label >= 0}


def carried_first(healer: Healer, question: Question, near: Candidates) -> dict[int, str]:
    """Labels and ids of the carried ones among the first hits as they are ranked now."""
    hosted, part = question.hosted, question.parts[0]
    labels = sorted(near, key=lambda label: (near[label], label))
    there = Neighbours(
        np.array([labels], np.int64), np.array([[near[label] for label in labels]], np.float32)
    )
    ranked = rank([part], [there], 0, len(labels), hosted.items, exact=True, by_score=True)
    first = ranked[: healer.source.hits]
    return {hit.item.label: hit.item.id for hit in first if hit.origin == "upgraded"}


def found(question: Question, near: Candidates, stored: StoredVectors) -> Found:
    """The best of the candidates by the vectors that they have now: by scores, as distances to
    carried and to native vectors do not compare."""
    hosted, part = question.hosted, question.parts[0]
    spec = space_of(hosted.spaces(), part.space).spec
    rows = np.flatnonzero(np.isin(stored.labels, list(near)))
    apart = distances.to_one(spec.metric, question.vectors[0], stored.embedding[rows])
    order = np.lexsort((stored.labels[rows], apart))
    labels = stored.labels[rows][order]
    origins = {int(stored.labels[row]): stored.origins[row] for row in rows.tolist()}

    def items(some: list[int], space: str) -> list[Item | None]:
        # Their vectors' own origins, whatever happens meanwhile.
        return [
            None if one is None else replace(one, origin=origins[one.label])
            for one in hosted.items(some, space)
        ]

    there = Neighbours(labels[None], apart[order][None])
    hits = rank([part], [there], 0, len(labels), items, exact=hosted.exact, by_score=True)
    return Found(hits[: question.k], part.query.release, part.query.space)
