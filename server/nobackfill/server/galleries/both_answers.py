"""Answers of a gallery that asks both models: one ranking of all its items (docs/adr/0033)."""

import numpy as np

from nobackfill.gallery.matches import Matches
from nobackfill.gallery.search import distances
from nobackfill.gallery.search.index import Labels, Mask, Neighbours
from nobackfill.server.galleries.asked import Found
from nobackfill.server.galleries.hosted import Hosted
from nobackfill.server.galleries.plan import Part
from nobackfill.server.galleries.queries import Question
from nobackfill.server.galleries.ranking import rank
from nobackfill.vectors import Vectors

# Candidates of either model, at least.
_HITS = 100


def found(question: Question, allowed: Matches | None) -> Found:
    """The best of the nearest by either model, which must both have been asked: carried items by
    both distances, native ones by the new model's. What an answer shows of them is the new one's.

    Raises InvalidInputError for queries that are none.
    """
    assert question.before is not None, "both models have the query"
    hosted, part, new = question.hosted, question.parts[0], question.vectors[0]
    both, old = question.before
    labels = np.union1d(
        _nearest(question, part, new, allowed), _nearest(question, both.part, old, allowed)
    )
    there, apart, carried = _apart(hosted, part, new, labels)
    kept, stayed, _ = _apart(hosted, both.part, old, there[carried])
    places = np.searchsorted(there, kept)
    likely = apart.astype(np.float64)
    likely[places] = both.joint(apart[places], stayed)
    order = np.lexsort((there, apart, likely))
    ranked = Neighbours(there[order][None], apart[order][None])
    hits = rank([part], [ranked], 0, len(order), hosted.items, exact=hosted.exact)
    return Found(hits[: question.k], part.query.release, part.query.space)


def _nearest(question: Question, part: Part, query: Vectors, allowed: Matches | None) -> Labels:
    wide = max(question.k, _HITS)
    (near,) = question.hosted.search([part], [query], wide, allowed, question.ef)
    labels: Labels = near.labels[0]
    return labels[labels >= 0]


def _apart(
    hosted: Hosted, part: Part, query: Vectors, labels: Labels
) -> tuple[Labels, Vectors, Mask]:
    """Those of `labels` (increasing) that have a vector there, their distances to a query [1, dim],
    and which of them were carried."""
    stored = hosted.store.stored(labels, part.space)
    apart = distances.to_one(part.query.embedder.metric, query, stored.embedding)
    return stored.labels, apart, np.array([one == "upgraded" for one in stored.origins], np.bool_)
