"""From what an index answers to what a query has found."""

import numpy as np

from nobackfill.errors import InvalidInputError
from nobackfill.gallery.filters import Filter
from nobackfill.gallery.matches import Matches
from nobackfill.server.galleries.asked import Found
from nobackfill.server.galleries.hosted import Hosted
from nobackfill.server.galleries.queries import Answer, Question
from nobackfill.server.galleries.ranking import rank


def found(question: Question, answer: Answer) -> Found:
    """Hits, ranked. Raises InvalidInputError for what was refused."""
    if isinstance(answer, InvalidInputError):
        raise answer
    neighbours, row = answer
    hosted = question.hosted
    hits = rank(question.parts, neighbours, row, question.k, hosted.items, exact=hosted.exact)
    query = question.parts[0].query
    return Found(hits, query.release, query.space)


def found_or_refused(question: Question, answer: Answer) -> Found | InvalidInputError:
    """The same of one among several."""
    return answer if isinstance(answer, InvalidInputError) else found(question, answer)


def allowed(hosted: Hosted, filtered: Filter | None) -> Matches | None:
    """Items that pass; None for all. Raises InvalidInputError."""
    return None if filtered is None else hosted.filtering.passing(filtered)


def lost(question: Question, answer: Answer, shown: Found) -> bool:
    """Whether there are fewer hits than were asked for, because one was deleted meanwhile."""
    if len(shown.hits) == question.k or isinstance(answer, InvalidInputError):
        return False
    neighbours, row = answer
    there = sum(int(np.count_nonzero(part.labels[row] >= 0)) for part in neighbours)
    return len(shown.hits) < min(question.k, there)
